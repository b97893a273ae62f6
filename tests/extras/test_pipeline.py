"""Pipeline parallelism: cuts, schedules and passes by themselves; and on ranks, against the whole
model."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from late_gpu import HOST, LateGpu
from pool import on_ranks
from rank_threads import ThreadRank, in_threads
from ranks import FULL, needs_mpirun
from torch import nn

from hvdtrain.comm.communicator import CompletedHandle, Handle, SingleProcessCommunicator
from hvdtrain.errors import UserError
from hvdtrain.extras.pipeline.costs import measured_seconds
from hvdtrain.extras.pipeline.cuts import balanced_cuts
from hvdtrain.extras.pipeline.executor import (
    MicroBatch,
    Pipeline,
    Spent,
    measured_bubble,
)
from hvdtrain.extras.pipeline.messages import Messages
from hvdtrain.extras.pipeline.schedule import (
    Action,
    Schedule,
    Seconds,
    formula,
    of_stages,
    takes_in_order,
    timeline,
)
from hvdtrain.extras.pipeline.stages import (
    Stage,
    stages_of,
    tied_parameters,
    units_of,
)
from hvdtrain.frameworks.torch.models import gpt, mlp
from hvdtrain.frameworks.torch.pipeline_unit import Unit

SCHEDULES: list[tuple[Schedule, int]] = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("zero_bubble", 1),
    ("interleaved", 2),
    ("interleaved", 3),
]


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
def test_ranks_take_messages_as_they_are_sent(schedule: Schedule, virtual: int) -> None:
    """As NCCL needs it. With an odd number of micro-batches two ranks with several stages do not,
    so that host memory is sent."""
    for ranks, micro in itertools.product((2, 3, 4), range(9)):
        is_odd = virtual > 1 and ranks == 2 and micro > 1 and micro % 2 == 1
        found = timeline(schedule, ranks, micro, virtual)
        assert takes_in_order(found) == (not is_odd), (ranks, micro)
        assert takes_in_order(timeline(schedule, ranks, micro, virtual, backward=False))
    late = timeline("gpipe", 2, 2)
    swapped = [late.ranks[0], [late.ranks[1][i] for i in (1, 0, 2, 3)]]
    assert not takes_in_order(late._replace(ranks=swapped))


def slowest(costs: Sequence[float], cuts: Sequence[int]) -> float:
    return max(
        sum(costs[start:stop]) for start, stop in zip(cuts, [*cuts[1:], len(costs)], strict=True)
    )


def test_cuts_make_the_slowest_stage_as_fast_as_can_be() -> None:
    generator = torch.Generator().manual_seed(0)
    for units, stages in itertools.product(range(1, 9), range(1, 6)):
        if stages <= units:
            costs = torch.randint(0, 20, (units,), generator=generator).tolist()
            cuts = balanced_cuts(costs, stages)
            all_cuts = itertools.combinations(range(1, units), stages - 1)
            assert len(cuts) == stages and cuts == sorted(set(cuts)) and cuts[0] == 0
            assert slowest(costs, cuts) == min(
                slowest(costs, [0, *others]) for others in all_cuts
            ), (costs, cuts)
    assert balanced_cuts([1, 1, 1, 1, 4], 2) == [0, 4]
    with pytest.raises(UserError, match="a model of 3 units cannot be divided into 4 stages"):
        balanced_cuts([1, 1, 1], 4)


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_pass_is_made_once_and_behind_those_that_it_needs(
    schedule: Schedule, virtual: int, ranks: int
) -> None:
    last = ranks * virtual - 1
    for micro in range(20):
        found = timeline(schedule, ranks, micro, virtual)
        stops: dict[Action, float] = {
            each.action: each.stop for rank in found.ranks for each in rank
        }
        assert len(stops) == sum(map(len, found.ranks)) and len(
            {a for a in stops if a.kind == "forward"}
        ) == micro * (last + 1)
        gradients = {
            (a.stage, a.micro): a for a in stops if a.kind in ("backward", "input gradient")
        }
        assert len(gradients) == micro * (last + 1)
        split = {(a.stage, a.micro) for a in stops if a.kind == "input gradient"}
        assert split == {(a.stage, a.micro) for a in stops if a.kind == "weight gradient"} and bool(
            split
        ) == (schedule == "zero_bubble" and ranks > 1 and micro > 0)
        for rank, row in enumerate(found.ranks):
            assert all(a.stop <= b.start for a, b in itertools.pairwise(row))
            for (kind, stage, number), start, _ in row:
                assert stage % ranks == rank
                needed = (
                    [Action("forward", stage - 1, number)] if kind == "forward" and stage else []
                )
                if kind in ("backward", "input gradient"):
                    needed = [
                        Action("forward", stage, number),
                        *([gradients[stage + 1, number]] if stage < last else []),
                    ]
                if kind == "weight gradient":
                    needed = [Action("input gradient", stage, number)]
                assert all(stops[each] <= start for each in needed), (kind, stage, number)
        alone = timeline(schedule, ranks, micro, virtual, backward=False)
        assert {a for rank in range(ranks) for a in alone.order(rank)} == {
            a for a in stops if a.kind == "forward"
        }


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
def test_the_bubble_is_that_of_the_papers(schedule: Schedule, virtual: int) -> None:
    """(p - 1) / (v m + p - 1); zero_bubble, whose rank waits for one of the three parts of a pass
    instead of all: 3 m."""
    parts = 3 if schedule == "zero_bubble" else virtual
    for ranks, rounds in itertools.product((1, 2, 3, 4, 8), (1, 2, 5)):
        found = timeline(schedule, ranks, rounds * ranks, virtual)
        assert found.bubble == pytest.approx(
            (ranks - 1) / (parts * rounds * ranks + ranks - 1), abs=1e-12
        )
        assert formula(schedule, ranks, rounds * ranks, virtual) == pytest.approx(
            found.bubble, abs=1e-12
        )
    uneven = timeline(
        schedule, 2, 1, virtual, [Seconds(1, 1), *[Seconds(3, 5)] * (2 * virtual - 1)]
    )
    # 1 + 3 + 2.5, then the weights of the second stage
    longest = 9 if schedule == "zero_bubble" else 2 + 8 * (2 * virtual - 1)
    assert uneven.seconds == longest and (
        virtual > 1 or uneven.bubble == pytest.approx(1 - 10 / (2 * longest))
    )


def test_the_bubble_of_cut_units() -> None:
    """Two stages of 3 and 6 s: with 2 micro-batches the ranks are busy for 6 and 12 of 1.5 + 1 +
    0.5 + 1 + 10 + 1.5 s."""
    units = [Seconds(1, 1), Seconds(0.5, 0.5), Seconds(1, 5)]
    assert of_stages(units, [0, 2]) == [Seconds(1.5, 1.5), Seconds(1, 5)]
    assert timeline("gpipe", 2, 2, seconds=of_stages(units, [0, 2])).bubble == pytest.approx(
        1 - 18 / (2 * 15.5)
    )


def held(order: Sequence[Action]) -> int:
    """The most micro-batches whose activations a rank holds."""
    changes = [{"forward": 1, "input gradient": 0}.get(action.kind, -1) for action in order]
    return max(itertools.accumulate(changes))


def test_what_a_rank_holds() -> None:
    ranks = 4
    micro = 12
    for schedule, most in {"gpipe": [12] * 4, "1f1b": [4, 3, 2, 1]}.items():
        assert [held(timeline(schedule, ranks, micro).order(rank)) for rank in range(ranks)] == most
    assert (
        max(held(timeline("zero_bubble", ranks, micro).order(rank)) for rank in range(ranks))
        <= ranks
    )


@pytest.mark.parametrize("split", [False, True])
def test_a_stage_may_begin_in_place(split: bool) -> None:
    """A ReLU that changes what comes from the stage before, then a matrix: the gradient of x is
    that of positive x."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2)).double()
    stage = stages_of(model, [0, 1], "test")[1]
    x = torch.tensor([[-1.0, 2.0, -3.0], [4.0, -5.0, 6.0]], dtype=torch.float64)
    positive = (x > 0).double()
    passes = MicroBatch(stage, x.clone(), is_first=False)
    ones = torch.ones_like(passes.outputs)
    found = passes.input_gradient(ones) if split else passes.backward(ones)
    if split:
        passes.weight_gradient()
    torch.testing.assert_close(
        found, ones @ model[2].weight.detach() * positive, rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(
        model[2].weight.grad, ones.T @ (x * positive), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("how", ["plain", "frozen", "dropout"])
def test_a_backward_pass_in_two_parts_is_the_same(how: str) -> None:
    """The gradient of the input, then those of the weights, which may be left for later."""
    found: list[dict[str, torch.Tensor]] = []
    for split in (False, True):
        torch.manual_seed(1)
        model = gpt.build(
            "gpt", 4, 9, layers=2, heads=2, width=8, residual_dropout=0.3 * (how == "dropout")
        ).double()
        if how == "frozen":
            model.blocks[0].requires_grad_(False)  # type: ignore[index]
        stage = stages_of(model, [0, 1], "test")[1]
        inputs = torch.randn(2, 3, 4, 8, dtype=torch.float64)  # two micro-batches
        passes = [MicroBatch(stage, x, is_first=False) for x in inputs]
        if split:
            gradients = [one.input_gradient(torch.ones_like(one.outputs)) for one in passes]
            for one in reversed(passes):
                one.weight_gradient()
        else:
            gradients = [one.backward(torch.ones_like(one.outputs)) for one in passes]
        gradients_of = {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
        found.append(gradients_of | {f"x{i}": gradient for i, gradient in enumerate(gradients)})
    assert found[0].keys() == found[1].keys() and len(found[0]) == (17 if how == "frozen" else 29)
    for name, gradient in found[0].items():
        assert gradient.abs().max() > 0 or name.endswith("x0.bias")
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-12, atol=1e-14)


def test_units_make_the_model() -> None:
    models = {
        (2, 3, 3, 1): mlp.build("mlp", (3, 3, 1), 4, widths=(6, 5)),
        (2, 4): gpt.build("gpt", 6, 9, layers=3, heads=2, width=8),
    }
    for shape, model in models.items():
        x = torch.randn(shape) if len(shape) > 2 else torch.randint(9, shape)
        y = x
        for stage in stages_of(model, [0, 2, 3], "test"):
            y = stage(y)
        assert torch.equal(y, model(x))


def test_a_tied_parameter_is_found() -> None:
    tied = gpt.build("gpt", 6, 9, layers=2, heads=2, width=8, tied=True)
    assert [
        (each.name, each.stages)
        for each in tied_parameters(tied, stages_of(tied, [0, 1, 3], "test"))
    ] == [("tokens.weight", (0, 2))]
    assert tied_parameters(tied, stages_of(tied, [0], "test")) == []


class Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.ones(1))

    def pipeline_units(self) -> list[Unit]:
        return [Unit("layer", (self.layer,), lambda x: self.layer(x) * self.gain)]


def test_models_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(
        UserError,
        match="Linear does not define where it can be divided into stages / "
        "parallel.pipeline|Linear does not define",
    ):
        units_of(nn.Linear(2, 2), "parallel.pipeline")
    with pytest.raises(UserError, match="gain of Outside is in no unit, so no stage would have it"):
        stages_of(Outside(), [0], "parallel.pipeline")


def test_an_engine_without_messages_is_refused() -> None:
    with pytest.raises(
        UserError, match="the single engine cannot send messages from one rank to another"
    ):
        Pipeline(
            {0: Stage([])},
            SingleProcessCommunicator(),
            "gpipe",
            torch.device("cpu"),
            "parallel.pipeline",
        )


class Wire:
    """Records what is sent; fives arrive."""

    rank = 0
    size = 2

    def __init__(self) -> None:
        self.sent: list[list[float]] = []

    def start_send(self, x: torch.Tensor, to: int, name: str, tag: int = 0) -> Handle:
        self.sent.append(x.tolist())
        return CompletedHandle(x)

    def start_recv(self, x: torch.Tensor, source: int, name: str, tag: int = 0) -> Handle:
        return CompletedHandle(x.fill_(5.0))


def test_a_gpu_sends_what_it_has_filled_once_it_has_more_to_do() -> None:
    gpu = LateGpu()
    wire = Wire()
    messages = Messages(wire, HOST, gpu)  # type: ignore[arg-type]
    numbers = torch.zeros(3)
    gpu.present(HOST).give(lambda: numbers.fill_(2.0))
    sent = messages.start_send(numbers, 1, "stage", 3)
    assert wire.sent == [], "the host does not wait here"
    assert gpu.log == ["side stream 1 waits for stream of MainThread", "side stream 1 keeps (3,)"]
    messages.flush()
    messages.flush()
    assert wire.sent == [[2.0] * 3]
    sent.wait()
    assert messages.start_recv((2,), torch.float64, 1, "stage", 3).wait().tolist() == [5.0] * 2


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_stages_on_gpus_give_the_gradients_of_stages_on_cpus(schedule: Schedule) -> None:
    """Ranks that wait for each other's messages send their own before."""

    def gradients(rank: ThreadRank, gpu: LateGpu | None) -> list[torch.Tensor]:
        layer = nn.Linear(3, 3).double()
        with torch.no_grad():
            for p in layer.parameters():
                p.copy_(torch.arange(p.numel()).view(p.shape) / 7 + rank.rank)
        stage = Stage([Unit("layer", (layer,), layer)])
        pipeline = Pipeline({rank.rank: stage}, rank, schedule, HOST, "test", gpu)  # type: ignore[arg-type]
        x = torch.arange(30, dtype=torch.float64).view(10, 3).split([3, 4, 1, 2])
        pipeline.train(
            [len(part) for part in x],
            lambda number: x[number],
            lambda number, outputs: outputs.square().sum(),
        )
        return [p.grad for p in layer.parameters() if p.grad is not None]

    on_cpu = in_threads(2, lambda rank: gradients(rank, None))
    on_gpu = in_threads(2, lambda rank: gradients(rank, LateGpu()))
    for one, other in zip(itertools.chain(*on_cpu), itertools.chain(*on_gpu), strict=True):
        assert torch.equal(one, other)
    assert len(on_cpu[0]) == 2


class Sleeps(torch.autograd.Function):
    """The identity, in 50 ms forward and 100 ms backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)
        return gradient


class SleepingLayer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleeps.apply(super().forward(x))


def test_units_are_timed() -> None:
    """Each by itself; gradients, statistics and generators are as before."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), SleepingLayer(8, 8), nn.Dropout(0.1))
    before = torch.get_rng_state()
    found = measured_seconds(
        units_of(model, "test"), torch.randn(64, 8, generator=torch.Generator()), repeats=2
    )
    assert len(found) == 4 and all(each.forward > 0 and each.backward > 0 for each in found)
    assert (
        found[2].forward > 0.05
        and found[2].backward > 0.1
        and min(sum(each) for each in found) < 0.1
    )
    assert all(p.grad is None for p in model.parameters()) and model[1].num_batches_tracked == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_units_that_work_in_place_are_timed() -> None:
    """What they take is as before: the fastest of several passes is of one x."""
    x = torch.randn(4, 8, generator=torch.Generator())
    before = x.clone()
    found = measured_seconds(
        units_of(
            nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True)), "test"
        ),
        x,
        repeats=1,
    )
    assert len(found) == 3 and torch.equal(x, before)
    with pytest.raises(
        UserError, match="unit 1 failed while it was timed: RuntimeError: mat1 and mat2"
    ):
        measured_seconds(units_of(nn.Sequential(nn.ReLU(), nn.Linear(7, 8)), "test"), x, repeats=1)


def test_the_measured_bubble() -> None:
    assert measured_bubble([Spent(4.0, 1.0), Spent(3.0, 2.0)]) == 0.5  # 3 and 1 of 4 seconds


@pytest.mark.parametrize(
    ("engine", "size", "stages"),
    [
        pytest.param("mpi", 3, 3, marks=[needs_mpirun, pytest.mark.slow]),
        *[
            pytest.param("torchdist", 2, 2, marks=[needs_mpirun, pytest.mark.slow]),
            pytest.param("mpi", 4, 4, marks=[needs_mpirun, pytest.mark.slow, pytest.mark.ranks4]),
            pytest.param("mpi", 2, 2, marks=[needs_mpirun, pytest.mark.slow]),
            pytest.param("mpi", 4, 2, marks=[needs_mpirun, pytest.mark.slow, pytest.mark.ranks4]),
            pytest.param(
                "torchdist", 4, 2, marks=[needs_mpirun, pytest.mark.slow, pytest.mark.ranks4]
            ),
        ]
        * FULL,
    ],
)
def test_a_pipeline_is_the_whole_model(engine: str, size: int, stages: int) -> None:
    """`stages` ranks are a pipeline, of which there are size / stages with samples of their own."""
    found: dict[str, Any] = on_ranks(
        engine, size, "pipeline_on_ranks:apart_by_case", engine, stages
    )[0]
    faulty = {name: found.pop(name) for name in ("faulty: doubled", "faulty: not tied")}
    assert min(faulty.values()) > 0.1, faulty
    assert len(found) >= 30 and max(found.values()) < 1e-12, found


@pytest.mark.slow
@pytest.mark.clock
@needs_mpirun
def test_stages_wait_as_long_as_the_schedule_says() -> None:
    for name, (measured, predicted) in on_ranks(
        "torchdist", 2, "pipeline_on_ranks:measured_bubbles", 2
    )[0].items():
        assert measured == pytest.approx(predicted, abs=0.2), name
