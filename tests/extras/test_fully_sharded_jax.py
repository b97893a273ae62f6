"""shard.stage=3 in JAX: the numbers of one process with everything, and whole weights of one block
at a time."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rank_threads import in_threads
from ranks import needs_extra

from hvdtrain.comm.communicator import (
    Communicator,
    CompletedHandle,
    Handle,
    SingleProcessCommunicator,
    part_of,
)
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import Arrays, Batch
from hvdtrain.core.extras import implementing_module
from hvdtrain.core.progress import Hyper
from hvdtrain.data.field import Field
from hvdtrain.frameworks.learner import Learner
from hvdtrain.tasks.classification import Classification
from hvdtrain.tasks.language import Language
from hvdtrain.tasks.task import Task
from hvdtrain.training.build import build_learner

pytestmark = [pytest.mark.usefixtures("jax_compilation_cache"), pytest.mark.in_turn]

TASK = Classification((3, 3, 1), 3, np.array([0.4]), np.array([0.2]))
PASSES = ((5, 2), (3, 0), (0, 2))  # samples of each rank in its micro-batches
MLP = "model.name=mlp model.widths=[6,5,7]"


def learner(communicator: Communicator, words: str, task: Task = TASK) -> Any:
    return build_learner(
        configure(None, f"framework=jax speed.precision=fp64 batch.size=12 {words}".split()),
        task,
        communicator,
    )


def batch(rank: int, number: int) -> Batch:
    rng = np.random.default_rng(10 * rank + number)
    n = PASSES[rank][number]
    return {"x": rng.integers(0, 256, (n, *TASK.shape), dtype=np.uint8), "y": rng.integers(0, 3, n)}


def step(one: Learner, batches: list[Batch], number: int) -> dict[str, float]:
    hyper = Hyper(lr=0.1, momentum=0.9, weight_decay=0.02, batch=12, step=number)
    return {
        name: float(value)
        for name, value in one.step([one.to_device(each) for each in batches], hyper, 5).items()
    }


def check_same(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-11, atol=1e-13, err_msg=name)


def mixed(shape: tuple[int, int, int], classes: int) -> Any:
    """A pair whose blocks share a weight, of which one has two parts, and whose first weights each
    rank draws for itself."""
    width = int(np.prod(shape))
    dice = np.random.default_rng()

    def init(key: jax.Array) -> dict[str, Any]:
        return {
            name: dice.normal(size=(width, width)) / width
            for name in ("a", "b", "c", "d", "unused")
        }

    def apply(
        params: dict[str, Any], x: jax.Array, wrap: Any = lambda number, block: block
    ) -> jax.Array:
        x = x.reshape(len(x), -1)
        x = wrap(4, lambda params, x: jnp.tanh(x @ params["a"] @ params["d"]))(params, x)
        pair = wrap(7, lambda params, x: (jnp.tanh(x @ params["b"] + x @ params["a"]), 2 * x))(
            params, x
        )
        x = jnp.sin(pair[1])
        x = wrap(7, lambda params, x: x @ params["c"] + pair[0] @ params["b"])(params, x)
        return x[:, :classes]

    return init, apply


def after_steps(one: Any, batches: list[Batch]) -> tuple[Arrays, list[dict[str, float]]]:
    """The state after three steps, and what an evaluation of the averages of the weights gives for
    each batch."""
    for number in range(3):
        step(one, batches, number)
    one.sync_buffers(one.communicator)
    with one.averaged():
        sums = [one.evaluate(one.to_device(each)) for each in batches]
    return one.state(), [{name: float(value) for name, value in each.items()} for each in sums]


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("size", "words", "units"),
    [
        (
            2,
            f"{MLP} optim.name=lamb optim.clip_norm=0.5 optim.clip_value=0.05 optim.ema=0.7",
            "in 3 blocks with 85.1% of them, and the rest",
        ),
        (
            3,
            f"{MLP} optim.name=sgd model.dropout=0 model.recompute=2 shard.reshard=false",
            "in 3 blocks with 85.1% of them, and the rest",
        ),
        (
            2,
            f"model.name={__name__}:mixed optim.name=adamw",
            "in 2 blocks with 60.0% of them, and the rest",
        ),
        (
            2,
            "model.name=linear optim.name=sgd recipe.gradient_noise=0.01",
            "as one unit: the model shows no blocks",
        ),
    ],
)
def test_ranks_make_the_steps_of_one_process(size: int, words: str, units: str) -> None:
    """Of uneven and empty micro-batches, from a state of one process, in which rank 1 has no part
    of a bias."""
    alone = learner(SingleProcessCommunicator(), words.replace("shard.reshard=false", ""))
    begin = alone.state()
    batches = [batch(rank, number) for rank in range(size) for number in range(2)]
    expected, sums = after_steps(alone, [each for each in batches if len(each["y"])])

    def of_rank(communicator: Any) -> tuple[Arrays, list[dict[str, float]], list[tuple[int, int]]]:
        one = learner(communicator, f"{words} shard.stage=3")
        assert one.describe().endswith(
            f"weights sharded over {size} ranks {units} (ZeRO stage 3)"
        ), one.describe()
        first = communicator.allgather_object(one.state())
        check_same(first[communicator.rank], first[0])  # rank 0's, whatever a rank draws
        one.load(begin)
        rank = communicator.rank
        found = after_steps(one, [batch(rank, number) for number in range(2)])
        ranges = [
            (piece.start, piece.stop)
            for piece in one.pieces()
            if piece.name.startswith("p.") and not piece.is_whole
        ]
        assert len(ranges) == len(one.model.names) and sum(len(p) for p in one.weights) == sum(
            b - a for a, b in ranges
        )
        return *found, ranges

    found = in_threads(size, of_rank)
    of_ranks = [each for _, sums, _ in found for each in sums if each["count"]]
    for ours, one in zip(of_ranks, sums, strict=True):
        assert ours == pytest.approx(one, rel=1e-11)
    for state, _, _ in found:
        check_same(state, expected)
    shares = [sum(b - a for a, b in ranges) for *_, ranges in found]
    assert sum(shares) == sum(
        array.size for name, array in expected.items() if name.startswith("p.")
    )
    assert max(shares) - min(shares) <= 4, "each unit is cut evenly"


@pytest.mark.in_turn
def test_a_loss_that_is_not_finite_stops_the_step_on_every_rank_and_local_statistics_stay() -> None:
    """Of a convnet with norms; rank 1 has a bad sample, rank 0 none in the second micro-batch."""
    words = "model.name=convnet model.widths=[4] optim.name=sgd guard.nonfinite=skip"

    def of_rank(communicator: Any, stage: int) -> list[Arrays]:
        one = learner(communicator, f"{words} shard.stage={stage}")
        empty = batch(1, 1)
        own = batch(communicator.rank, 0)
        batches = [own, empty if communicator.rank == 0 else batch(0, 1)]
        step(one, batches, 0)
        found = [one.state()]
        assert (
            step(
                one,
                [
                    own | {"w": np.full(len(own["y"]), np.nan if communicator.rank else 1.0)},
                    batches[1],
                ],
                1,
            )["nonfinite"]
            == 0.5
        )
        return [*found, one.state()]

    whole, parts = (
        in_threads(2, lambda communicator, stage=stage: of_rank(communicator, stage))
        for stage in (0, 3)
    )
    for rank in range(2):
        check_same(parts[rank][0], whole[rank][0])
        check_same(parts[rank][1], parts[rank][0])
    mean = "b.norm1.running_mean"
    assert np.abs(parts[0][0][mean] - parts[1][0][mean]).max() > 1e-3, "of each rank's own samples"


@needs_extra("sample")
@pytest.mark.in_turn
def test_ranks_draw_what_one_draws_and_go_on() -> None:
    """A gpt with dropout and tied weights draws between steps from weights that are whole
    meanwhile."""
    task = Language(Field("uint16", (7,), 9))
    words = (
        "model.name=gpt model.layers=1 model.heads=1 model.width=4 model.tied=true "
        "model.residual_dropout=0.2 optim.name=sgd"
    )
    tokens = np.random.default_rng(3).integers(0, 9, (4, 7)).astype(np.uint16)
    options: dict[str, Any] = {
        "tokens": 9,
        "temperature": 1.0,
        "seed": 4,
        "first": 0,
        "before_each": lambda: None,
    }

    def of_rank(communicator: Any, words: str) -> tuple[np.ndarray, Arrays]:
        one = learner(communicator, words, task)
        own = {"tokens": tokens if communicator.rank == 0 else tokens[:0]}
        step(one, [own], 0)
        sampler = implementing_module("log.samples").sampler_of(one, configure(None, []))
        drawn = sampler.continue_sequences(np.ones((3, 1), np.int64), 9, **options)
        step(one, [own], 1)
        return drawn, one.state()

    drawn, state = of_rank(SingleProcessCommunicator(), words)
    for found in in_threads(
        2, lambda communicator: of_rank(communicator, f"{words} shard.stage=3")
    ):
        np.testing.assert_array_equal(found[0], drawn)
        check_same(found[1], state)


class OneOfTwo(SingleProcessCommunicator):
    """Rank 1 of 2, whose parts alone have numbers. Counts the bytes of all arrays at each
    collective: in passes, and beside them."""

    rank = 1
    size = 2

    def __init__(self) -> None:
        gc.collect()
        self.before = live_bytes()
        self.in_pass = 0
        self.beside = 0
        self.gathers = 0

    def allreduce(self, x: Any, name: str, op: Any = "sum") -> Any:
        if name.startswith("gradient."):
            self.in_pass = max(self.in_pass, live_bytes() - self.before)
        else:
            self.beside = max(self.beside, live_bytes() - self.before)
        return x

    def start_spread(self, x: Any, name: str) -> Handle:
        self.gathers += 1
        self.in_pass = max(self.in_pass, live_bytes() - self.before)
        x[: part_of(len(x), 1, 2).start] = 0.0
        return CompletedHandle(x)

    def start_reduce_scatter(self, x: Any, name: str) -> Handle:
        self.in_pass = max(self.in_pass, live_bytes() - self.before)
        return CompletedHandle(x[part_of(len(x), 1, 2)])


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def watched(words: str) -> tuple[OneOfTwo, dict[str, int]]:
    """Two steps of two micro-batches of a gpt of 5 blocks; bytes of each parameter."""
    task = Language(Field("uint16", (9,), 11))
    communicator = OneOfTwo()
    one = learner(
        communicator,
        f"model.name=gpt model.layers=5 model.heads=2 model.width=32 optim.name=adamw {words}",
        task,
    )
    communicator.in_pass = communicator.beside = communicator.gathers = 0
    for number in range(2):
        tokens = np.random.default_rng(number).integers(0, 11, (2, 1, 9)).astype(np.uint16)
        step(one, [{"tokens": each} for each in tokens], number)
    return communicator, {
        piece.name: piece.nbytes for piece in one.pieces() if piece.name.startswith("p.")
    }


def test_a_rank_has_whole_weights_of_one_block_at_a_time() -> None:
    """Of 5 blocks, which are all but 3 % of the weights; shard.reshard=false keeps all from forward
    to backward."""
    whole, _ = watched("shard.stage=0")
    parts, sizes = watched("shard.stage=3")
    kept, _ = watched("shard.stage=3 shard.reshard=false")
    weights = sum(sizes.values())
    block = sum(size for name, size in sizes.items() if "blocks.0." in name)
    rest = weights - 5 * block
    activations = 0.1 * weights
    assert rest < 0.03 * weights
    state = 1.5 * weights  # half of the weights, and of two numbers of Adam's for each
    so_far = 0.5 * weights  # gradients of the micro-batch before
    assert (
        state + so_far + block < parts.in_pass < state + so_far + rest + 2 * block + activations
    ), vars(parts)
    assert 2 * weights <= parts.beside < 2 * weights + activations, (
        vars(parts),
        "with all gradients",
    )
    assert kept.in_pass > parts.in_pass + 2 * block, (vars(kept), vars(parts))
    assert whole.in_pass >= 4 * weights, (vars(whole), "weights, gradients and state")
    assert parts.gathers == 2 * (1 + 2 * (5 + 4) - 1), (
        "twice a block, the last once in its pass, the first once for two passes"
    )
    assert kept.gathers == 2 * (1 + 5 + 4)
