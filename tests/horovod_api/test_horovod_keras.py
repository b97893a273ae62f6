"""hvdtrain.horovod.keras and .tensorflow: training on ranks beside one process, on each backend;
skipped where they are not installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ranks
from pages import failures, run_page
from ranks import ROOT, needs_horovod, needs_keras, needs_mpirun, needs_tensorflow

pytestmark = pytest.mark.in_turn

BACKENDS = ["torch", "jax", pytest.param("tensorflow", marks=needs_tensorflow)]


def environment(backend: str) -> dict[str, str]:
    return {"KERAS_BACKEND": backend, "JAX_ENABLE_X64": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}


@needs_keras
@needs_mpirun
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_check_of_keras_passes(backend: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = ranks.mpirun(
        2, ["tests/support/keras_on_ranks.py", str(out)], env=environment(backend)
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert {name: failure for name, failure in json.loads(out.read_text()).items() if failure} == {}


@needs_tensorflow
@needs_mpirun
def test_every_check_of_tensorflow_passes(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = ranks.mpirun(
        2, ["tests/support/tensorflow_on_ranks.py", str(out)], env=environment("tensorflow")
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert {name: failure for name, failure in json.loads(out.read_text()).items() if failure} == {}


def failures_of_gradients(size: int, module: str, folder: Path) -> dict[str, str]:
    out = folder / f"{size}.json"
    result = ranks.mpirun(
        size, ["tests/support/gradients_on_ranks.py", str(out), module], env=environment("jax")
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return {name: failure for name, failure in json.loads(out.read_text()).items() if failure}


@needs_keras
@needs_tensorflow
@needs_mpirun
@pytest.mark.parametrize("size", [2, 3])
def test_the_gradient_of_each_collective_is_horovods_on_torch_tensorflow_jax_and_keras(
    size: int, tmp_path: Path
) -> None:
    assert failures_of_gradients(size, "hvdtrain.horovod", tmp_path) == {}


@needs_horovod
@needs_mpirun
@pytest.mark.slow
def test_horovod_itself_has_these_gradients(tmp_path: Path) -> None:
    assert failures_of_gradients(2, "horovod.torch", tmp_path) == {}


UNEVEN = """
import sys, keras, numpy as np, hvdtrain.horovod.keras as hvd
hvd.init()
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, name="sgd")), loss="mse")
rows = 8 + 4 * hvd.rank()
model.fit(np.ones((rows, 3)), np.ones((rows, 1)), batch_size=4, verbose=0)
if "join" in sys.argv:
    last = hvd.join()
    apart = hvd.allgather_object([value.tolist() for value in model.get_weights()])
    hvd.broadcast_variables([*model.weights, *model.optimizer.variables], root_rank=last)
    together = hvd.allgather_object([value.tolist() for value in model.get_weights()])
    assert last == 1 and apart[0] != apart[1] and together == [apart[1]] * 2, (last, apart, together)
    assert hvd.allgather_object(int(model.optimizer.iterations)) == [3, 3]
print("done", hvd.rank(), flush=True)
"""  # noqa: E501


@needs_keras
@needs_mpirun
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_ends_before_the_batches_of_another_is_named(backend: str) -> None:
    result = ranks.mpirun(2, ["-c", UNEVEN], env=environment(backend))
    assert result.returncode != 0 and result.stdout.split() == ["done", "0"]
    assert "rank 0 ended without it; rank 1 asked for it" in result.stderr, result.stderr
    assert "where: allreduce 'gradients of sgd'" in result.stderr, result.stderr
    assert result.seconds < 200


ON_ONE_CORE = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import keras, numpy as np, hvdtrain.horovod.keras as hvd
if "late" in sys.argv:
    keras.ops.ones(3) + 1
hvd.init()
model = keras.Sequential([keras.Input((600,)), keras.layers.Dense(600), keras.layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(1e-3)), loss="mse")
model.fit(np.ones((64, 600)), np.ones((64, 1)), batch_size=8, verbose=0)
print("done", flush=True)
"""


@needs_keras
@needs_mpirun
def test_jax_trains_on_ranks_that_are_pinned_to_a_core() -> None:
    """As mpirun pins two ranks; JAX has one thread there, which would run the step and wait for the
    arrays of the call in it."""
    result = ranks.mpirun(2, ["-c", ON_ONE_CORE], env=environment("jax"))
    assert result.returncode == 0 and result.stdout.split() == ["done", "done"], result.stderr
    result = ranks.mpirun(2, ["-c", ON_ONE_CORE, "late"], env=environment("jax"))
    assert result.returncode != 0 and "JAX was used before hvd.init()" in result.stderr, (
        result.stderr
    )


@needs_keras
@needs_mpirun
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_with_unequal_batches_are_equal_after_join_and_a_broadcast_as_the_page_says(
    backend: str,
) -> None:
    result = ranks.mpirun(2, ["-c", UNEVEN, "join"], env=environment(backend))
    assert result.returncode == 0 and sorted(result.stdout.split()) == ["0", "1", "done", "done"], (
        result.stderr
    )


@needs_keras
@needs_mpirun
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_others_go_on_from_the_last_commit_of_fit(backend: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    argv = ["tests/support/keras_elastic.py", str(out)]
    env = environment(backend) | {"HVDTRAIN_ENGINE": "mpi"}
    with ranks.Job(3, argv, options=["--with-ft", "ulfm"], env=env, is_warm=True) as job:
        result = job.wait()
    assert out.exists(), result.stderr
    row = json.loads(out.read_text())
    assert (row["size"], row["resets"], row["epoch"]) == (2, [2], 3)
    assert row["found"] == pytest.approx([row["expected"]] * 2, rel=1e-12)


@needs_tensorflow
@needs_mpirun
def test_the_page_runs_and_prints_the_output_that_it_shows(tmp_path: Path) -> None:
    page = ROOT / "docs" / "keras.md"
    messages = failures(page, run_page(page, tmp_path))
    assert not messages, "\n".join(messages)
