"""Modules of flax, equinox and haiku in framework=jax: what the library itself computes, on ranks,
resumed; objects; refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ranks import mpirun, needs_mpirun
from test_jax_zero import RANKS, TASK, batch, on_ranks

from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import digest
from hvdtrain.core.progress import Hyper, fold
from hvdtrain.errors import UserError
from hvdtrain.frameworks.jax.learner import _DROPOUT
from hvdtrain.frameworks.jax.model import key_data, key_of
from hvdtrain.frameworks.learner import Learner
from hvdtrain.training.build import build_learner

pytest.importorskip("flax", reason="flax is not installed: make test-keras")
pytest.importorskip("equinox", reason="equinox is not installed: make test-keras")
pytest.importorskip("haiku", reason="dm-haiku is not installed: make test-keras")
from jax_libraries import CASES, linen_bound

pytestmark = [pytest.mark.in_turn, pytest.mark.usefixtures("jax_compilation_cache")]

STEPS = 4
RATE = 0.3
SEED = 5


def learner(communicator: Communicator, *words: str) -> Learner:
    given = [
        "framework=jax",
        "speed.precision=fp64",
        "batch.size=12",
        "optim.name=sgd",
        "optim.momentum=0",
        "optim.weight_decay=0",
    ]
    return build_learner(configure(None, [*given, *words]), TASK, communicator)


def take_steps(one: Learner, rank: int | None, first: int = 0, last: int = STEPS) -> None:
    """rank: whose samples it has; None: it has all of them."""
    batches = [
        batch(each, number)
        for each in (range(RANKS) if rank is None else [rank])
        for number in range(2)
    ]
    for step in range(first, last):
        one.step(
            [one.to_device(each) for each in batches],
            Hyper(RATE, 0.0, 0.0, batch=12, step=step),
            SEED + step,
        )


def weights(one: Learner) -> dict[str, np.ndarray]:
    return {name[2:]: array for name, array in one.state().items() if name.startswith("p.")}


def by_library(library: str, params: dict[str, Any], ranks: int) -> dict[str, np.ndarray]:
    """Weights after STEPS steps of SGD on the samples of all ranks, with the library's own dropout
    for the key of each micro-batch."""
    of_rank = [[batch(rank, number) for number in range(2)] for rank in range(RANKS)]
    of_rank = of_rank if ranks > 1 else [[each for batches in of_rank for each in batches]]

    def loss(params: dict[str, Any], keys: list[list[Any]]) -> Any:
        total = jnp.zeros(())
        for batches, of_batches in zip(of_rank, keys, strict=True):
            for each, key in zip(batches, of_batches, strict=True):
                if len(each["y"]):
                    logits = CASES[library].reference.outputs(
                        params, inputs(each["x"]), key_of(key)
                    )
                    total += -jax.nn.log_softmax(logits)[jnp.arange(len(logits)), each["y"]].sum()
        return total / 12

    with jax.enable_x64(True):
        params = {name: jnp.asarray(array) for name, array in params.items()}
        gradient = jax.jit(jax.grad(loss))
        for step in range(STEPS):
            keys = [
                [key_data(fold(SEED + step, _DROPOUT, rank, i)) for i in range(len(of_rank[rank]))]
                for rank in range(ranks)
            ]
            gradients = gradient(params, keys)
            params = {name: array - RATE * gradients[name] for name, array in params.items()}
        return {name: np.asarray(array) for name, array in params.items()}


def inputs(x: np.ndarray) -> jax.Array:
    return jnp.asarray((x / 255 - TASK.mean) / TASK.std)


@pytest.mark.parametrize("library", CASES)
def test_ranks_have_the_weights_of_the_library_alone_and_go_on_with_the_same_bits(
    library: str,
) -> None:
    """By dropout too, which differs between ranks: each count of ranks has its own reference."""
    name, reference = CASES[library]

    words = f"model.name=jax_libraries:{name}"
    alone = learner(SingleProcessCommunicator(), words)
    again = learner(SingleProcessCommunicator(), words, "seed=9")
    start = weights(alone)
    other = weights(again)
    assert set(start) == set(reference.names)
    assert all(
        not np.array_equal(start[each], other[each])
        for each in reference.names
        if start[each].ndim == 2
    )
    data = batch(0, 0)
    with jax.enable_x64(True):
        logits = reference.outputs(
            {each: jnp.asarray(array) for each, array in start.items()}, inputs(data["x"]), None
        )
    np.testing.assert_allclose(
        alone.predict(alone.to_device(data)).outputs, logits, rtol=0, atol=1e-12
    )

    def of_rank(communicator: Communicator) -> dict[str, np.ndarray]:
        one = learner(communicator, words)
        take_steps(one, communicator.rank)
        return weights(one)

    take_steps(alone, None, 0, 2)
    again.load(alone.state())
    for one in (alone, again):
        take_steps(one, None, 2)
    assert digest(again.state()) == digest(alone.state())
    for ranks, states in ((1, [weights(alone)]), (RANKS, on_ranks(of_rank))):
        expected = by_library(library, start, ranks)
        for found in states:
            for each, array in expected.items():
                assert np.abs(array - start[each]).max() > 1e-3
                np.testing.assert_allclose(
                    found[each], array, rtol=0, atol=1e-12, err_msg=f"{ranks} {each}"
                )


def test_a_bound_module_has_the_first_weights() -> None:
    """Whatever the seed; on the way to a job's own number type."""
    a, b = (
        weights(
            learner(
                SingleProcessCommunicator(), "model.name=jax_libraries:linen_bound", f"seed={seed}"
            )
        )
        for seed in (1, 2)
    )
    expected = linen_bound().variables["params"]["first"]["kernel"]
    np.testing.assert_array_equal(a["first.kernel"], np.asarray(expected, np.float64))
    assert a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


BATCH_NORM = "LayerNorm or GroupNorm instead of BatchNorm"


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        (
            "LinenNormed",
            "keeps state that a forward pass changes, which would depend on the number of ranks "
            "and on padding: it has the",
            BATCH_NORM,
        ),
        ("linen_normed_bound", 'Cannot update variable "mean" in "/BatchNorm_0"', BATCH_NORM),
        ("NnxNormed", "it changes norm.mean, norm.var", BATCH_NORM),
        ("EquinoxNormed", "it has a layer with a StateIndex", BATCH_NORM),
        ("equinox_with_state", "it has a layer with a StateIndex", BATCH_NORM),
        (
            "haiku_normed",
            "it has the state batch_norm/~/mean_ema, batch_norm/~/var_ema",
            BATCH_NORM,
        ),
        (
            "haiku_normed model.with_state=false",
            "on padding: it needs transform_with_state",
            BATCH_NORM,
        ),
        (
            "narrow",
            "for images (2, 3, 3, 1) the model returns float64 (2, 2), not logits (2, 3)",
            "outputs of that shape",
        ),
        (
            "in_float32",
            "the model returns float32, but the job computes in float64",
            "speed.precision=fp32",
        ),
        (
            "of_batches",
            "the model fails for inputs (2, 3, 3, 1) of float64: TypeError: ",
            "one sample: an image (H, W, C)",
        ),
        ("NoParameters", "has no parameter to train", ""),
    ],
)
def test_what_does_not_fit_is_refused(name: str, what: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        learner(SingleProcessCommunicator(), *f"model.name=jax_libraries:{name}".split())
    assert what in f"{caught.value.what}", caught.value.what
    assert fix in f"{caught.value.fix}", caught.value.fix


@needs_mpirun
@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize("name", ["SowingLinen", "SowingNnx"])
def test_what_a_module_sows_is_a_line(name: str) -> None:
    """Such as a penalty that no loss of the job has."""
    one: Any = learner(SingleProcessCommunicator(), f"model.name=jax_libraries:{name}")
    assert one.notes == ("not used: what the model sows: penalty",)


def test_a_script_gives_the_object_and_gets_its_weights(tmp_path: Path) -> None:
    """Of each library, on two ranks."""
    done = mpirun(
        2, ["tests/support/jax_library_jobs.py", str(tmp_path / "out.json"), str(tmp_path)]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "out.json").read_text()).keys() == {*CASES, "pair"}
