"""framework=keras on each backend, and all frameworks beside each other: the same weights to 1e-12,
on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from framework_jobs import RECIPES
from ranks import FULL, mpirun, needs_keras, needs_mpirun, needs_tensorflow, python

pytestmark = pytest.mark.in_turn

BACKENDS = ["torch", "jax", pytest.param("tensorflow", marks=needs_tensorflow)]
Weights = dict[str, list[Any]]  # by recipe


def trained(folder: Path, framework: str, size: int, *jobs: str) -> Weights:
    """framework: "torch", "jax", "keras-BACKEND" or "keras by torch-torch"."""
    folder.mkdir(exist_ok=True)
    name, _, backend = framework.partition("-")
    out = folder / f"{framework}-{size}.json"
    words = ["tests/support/framework_jobs.py", name, str(out), str(folder), *jobs]
    env = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = mpirun(size, words, env=env) if size > 1 else python(words, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    found: Weights = json.loads(out.read_text())
    return found


@pytest.fixture(scope="module")
def in_torch(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return trained(tmp_path_factory.mktemp("torch"), "torch", 1, *RECIPES, "penalized", "passed_on")


def assert_near(found: Weights, expected: Weights, *recipes: str) -> None:
    assert found.keys() == set(recipes)
    for name in recipes:
        for ours, theirs in zip(found[name], expected[name], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12, err_msg=name)


def test_jax_has_the_weights_of_torch(in_torch: Weights, tmp_path: Path) -> None:
    assert_near(trained(tmp_path, "jax", 1, *RECIPES), in_torch, *RECIPES)


def test_numpy_has_the_linear_weights_of_torch(in_torch: Weights, tmp_path: Path) -> None:
    assert_near(trained(tmp_path, "numpy", 1, "linear"), in_torch, "linear")


@needs_keras
@needs_mpirun
@pytest.mark.parametrize("backend", BACKENDS)
def test_keras_has_the_weights_of_torch_on_any_number_of_ranks(
    backend: str, in_torch: Weights, tmp_path: Path
) -> None:
    """By all recipes on one rank, by some on three with uneven shares, whose layers add to the loss
    in one of them."""
    assert_near(trained(tmp_path / "1", f"keras-{backend}", 1, *RECIPES), in_torch, *RECIPES)
    some = [*(RECIPES if FULL else ["lamb", "mixed", "convnet"]), "penalized"]
    assert_near(trained(tmp_path / "3", f"keras-{backend}", 3, *some), in_torch, *some)


@needs_keras
@needs_mpirun
def test_keras_on_torch_has_what_framework_torch_has(in_torch: Weights, tmp_path: Path) -> None:
    """Parts of the optimizer's state, DDP and averages of a model of Keras."""
    ways = {
        "sgd": "shard.stage=2 comm.engine=mpi",
        "averaged": "comm.reduce=ddp comm.engine=torchdist",
        "lamb": "shard.stage=1 comm.engine=mpi",
        "penalized": "comm.reduce=ddp comm.engine=torchdist",
    }
    some = [f"{recipe} {words}" for recipe, words in ways.items()]
    assert_near(trained(tmp_path, "keras by torch-torch", 3, *some), in_torch, *ways)


@needs_keras
@needs_mpirun
def test_a_job_of_one_backend_goes_on_in_another(in_torch: Weights, tmp_path: Path) -> None:
    """Stopped on two ranks within an epoch, resumed on one."""
    some = list(RECIPES) if FULL else ["adamw", "smoothed"]
    trained(tmp_path, "keras-torch", 2, *(f"{recipe} stop.steps=17" for recipe in some))
    assert_near(
        trained(tmp_path, "keras-jax", 1, *(f"{recipe} stop.steps=null" for recipe in some)),
        in_torch,
        *some,
    )


@needs_keras
@needs_mpirun
def test_a_job_goes_from_framework_to_framework(in_torch: Weights, tmp_path: Path) -> None:
    """torch, JAX on two ranks, Keras, torch on two: layers have the same names and shapes in
    each."""
    ways = [("torch", 1, 17), ("jax", 2, 31), ("keras-torch", 1, 43), ("torch", 2, None)]
    for number, (framework, size, steps) in enumerate(ways):
        stop = "null" if steps is None else str(steps)
        after = [f"resume={tmp_path / str(number - 1)}"] if number else []
        job = " ".join(["passed_on", f"run={tmp_path / str(number)}", f"stop.steps={stop}", *after])
        found = trained(tmp_path / "weights", framework, size, job)
    assert_near(found, in_torch, "passed_on")


@needs_keras
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_check_of_keras_in_one_process_passes(backend: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = python(
        ["tests/support/keras_jobs.py", str(out), str(tmp_path)],
        env={"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert {name: failure for name, failure in json.loads(out.read_text()).items() if failure} == {}
