"""Strategies on ranks that are threads of this process: their steps are those of one process with
all samples, or a mean by numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from rank_threads import ThreadRank, in_threads

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import Arrays, Batch
from hvdtrain.core.progress import Hyper
from hvdtrain.frameworks.torch.buffers import Buffers
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner
from hvdtrain.training.replicas.broadcast import broadcast_state

TASK = Classification((4, 4, 2), 3, np.array([0.4, 0.5]), np.array([0.2, 0.3]))
SHARES = (5, 0, 3)  # samples of each rank in a step
MLP = ["model.name=mlp", "model.widths=[7,5]"]
WORDS = ["speed.device=cpu", "speed.precision=fp64", "comm.bucket_mb=0.001"]


def learner(communicator: Any, state: Arrays | None, *words: str, model: list[str] = MLP) -> Any:
    one = build_learner(configure(None, [*WORDS, *model, *words]), TASK, communicator)
    if state:  # threads draw their first weights from one generator
        one.load(state)
    return one


def batch(rank: int, step: int) -> Batch:
    rng = np.random.default_rng(10 * rank + step)
    return {
        "x": rng.integers(0, 256, (SHARES[rank], *TASK.shape), dtype=np.uint8),
        "y": rng.integers(0, TASK.classes, SHARES[rank]),
    }


def all_samples(step: int) -> Batch:
    of_ranks = [batch(rank, step) for rank in range(len(SHARES))]
    return {name: np.concatenate([each[name] for each in of_ranks]) for name in of_ranks[0]}


def in_micro_batches(whole: Batch) -> list[Batch]:
    half = len(whole["y"]) // 2
    return [
        {name: array[part] for name, array in whole.items()}
        for part in (slice(half), slice(half, None))
    ]


def train(one: Any, batch_of: Any, words: Hyper, steps: int = 3) -> Arrays:
    for step in range(steps):
        one.step(
            [one.to_device(each) for each in in_micro_batches(batch_of(step))],
            words._replace(step=step),
            step,
        )
    state: Arrays = one.state()
    return state


def check_equal(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-11, atol=1e-13, err_msg=name)


HYPER = Hyper(lr=0.1, momentum=0.9, weight_decay=0.01, batch=sum(SHARES), noise=0.01)


@pytest.mark.parametrize("how", ["comm.reduce=bucket", "shard.stage=1", "shard.stage=2"])
def test_ranks_make_the_steps_of_one_process_with_all_samples(how: str) -> None:
    """Clipped by the norm of all parameters, with noise, in two micro-batches; one rank has no
    samples."""
    alone = learner(SingleProcessCommunicator(), None, "optim.clip_norm=0.3")
    first = alone.state()
    expected = train(alone, all_samples, HYPER)

    def of_rank(rank: ThreadRank) -> Arrays:
        one = learner(rank, first, how, "optim.clip_norm=0.3")
        return train(one, lambda step: batch(rank.rank, step), HYPER)

    for found in in_threads(len(SHARES), of_rank):
        check_equal(found, expected)


def test_a_number_that_is_not_finite_in_one_part_leaves_out_the_step_on_every_rank() -> None:
    """The gradient of the last bias alone is infinite, which is in the part of one rank."""
    first = learner(SingleProcessCommunicator(), None).state()

    def of_rank(rank: ThreadRank) -> tuple[list[float], Arrays]:
        one = learner(rank, first, "shard.stage=2", "guard.nonfinite=skip")
        one.parameters[-1].register_hook(lambda gradient: gradient * math.inf)
        counts = [float(one.step([one.to_device(batch(rank.rank, 0))], HYPER, 0)["nonfinite"])]
        return counts, one.state()

    for counts, found in in_threads(len(SHARES), of_rank):
        assert counts == [pytest.approx(1 / len(SHARES))]
        check_equal(
            {name: found[name] for name in first if name.startswith("p.")},
            {n: a for n, a in first.items() if n.startswith("p.")},
        )


def test_after_local_steps_the_ranks_have_the_mean() -> None:
    """Each rank steps twice alone, from the mean over its own samples; weights and momentum then
    are the mean over ranks."""
    alone = [learner(SingleProcessCommunicator(), None) for _ in SHARES]
    first = alone[0].state()
    ends = [
        train(
            one,
            lambda step, rank=rank: batch(rank, step),
            HYPER._replace(batch=max(1, share), noise=0.0),
            2,
        )
        for rank, (one, share) in enumerate(zip(alone, SHARES, strict=True))
    ]
    expected = {name: np.mean([end[name] for end in ends], axis=0) for name in first}
    assert max(float(np.abs(ends[0][name] - ends[2][name]).max()) for name in first) > 1e-3, (
        "they were apart"
    )

    def of_rank(rank: ThreadRank) -> Arrays:
        one = learner(rank, first, "comm.local_steps=2", "log.every_steps=2")
        return train(one, lambda step: batch(rank.rank, step), HYPER._replace(noise=0.0), 2)

    for found in in_threads(len(SHARES), of_rank):
        check_equal(found, expected)


def test_running_statistics_become_their_mean_and_other_buffers_those_of_the_first_rank() -> None:
    def of_rank(rank: ThreadRank) -> dict[str, Any]:
        model = torch.nn.BatchNorm1d(2)
        model.running_mean.copy_(torch.tensor([1.0, 10.0]) * rank.rank)
        model.running_var.fill_(2.0**rank.rank)
        model.num_batches_tracked.fill_(7 + rank.rank)
        Buffers(model, torch.device("cpu")).sync_buffers(rank)
        return {name: buffer.tolist() for name, buffer in model.named_buffers()}

    mean_of_three = {
        "running_mean": [1.0, 10.0],
        "running_var": [pytest.approx(7 / 3)] * 2,
        "num_batches_tracked": 7,
    }
    assert in_threads(3, of_rank) == [mean_of_three] * 3


class Scaled(torch.nn.Module):
    """A linear model with a temperature, as CLIP learns one: a parameter without dimensions."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(math.prod(shape), classes)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x.flatten(1)) * self.scale


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    "optimizer",
    ["adam optim.ema=0.9", "novograd", "torch.optim.AdamW", "torch.optim.NAdam", "torch.optim.SGD"],
)
def test_a_parameter_without_dimensions_is_trained_and_resumed_in_parts(
    optimizer: str, stage: int
) -> None:
    """Its state has numbers for the parameter beside those of its one element, which lies on one
    rank."""
    words = [f"optim.name={optimizer}", *["optim.momentum=0.9"] * optimizer.endswith("SGD")]
    model = ["model.name=test_ranks_in_threads:Scaled"]
    hyper = HYPER._replace(noise=0.0, lr=0.02)

    def made(communicator: Any, state: Arrays | None, *more: str) -> Any:
        return learner(communicator, state, *" ".join([*words, *more]).split(), model=model)

    first = made(alone := SingleProcessCommunicator(), None).state()
    expected = train(made(alone, train(made(alone, first), all_samples, hyper)), all_samples, hyper)

    def of_rank(rank: ThreadRank) -> Arrays:
        state = first
        for _ in range(2):
            state = train(
                made(rank, state, f"shard.stage={stage}"),
                lambda step: batch(rank.rank, step),
                hyper,
            )
        return state

    for found in in_threads(len(SHARES), of_rank):
        check_equal(found, expected)
    assert "p.scale" in expected and any(name.startswith("s.scale.") for name in expected)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_state_of_before_the_first_step_takes_the_place_of_that_of_a_class(stage: int) -> None:
    """As guard.nonfinite=rollback to step 0 loads it: rank 0 has it whole, and a class of
    torch.optim has no state in it."""
    words = ["optim.name=torch.optim.Adam", f"shard.stage={stage}"]
    first = learner(SingleProcessCommunicator(), None).state()
    first = {name: array for name, array in first.items() if not name.startswith("s.")}

    def of_rank(rank: ThreadRank) -> tuple[Arrays, Arrays, Arrays]:
        one = learner(rank, first, *words)
        once = train(one, lambda step: batch(rank.rank, step), HYPER)
        broadcast_state(rank, one, first if rank.rank == 0 else None)
        back: Arrays = one.state()
        return once, back, train(one, lambda step: batch(rank.rank, step), HYPER)

    for once, back, again in in_threads(len(SHARES), of_rank):
        assert len(once) > len(back)
        check_equal(back, first)
        check_equal(again, once)
