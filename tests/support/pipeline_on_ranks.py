"""Compares pipelines of every schedule with the whole model: {case: the largest relative
difference}, on the ranks.

Three steps of SGD in float64: losses, every gradient, and what the last model gives in evaluation
mode. Each rank also trains the whole model. The names that begin with "faulty" are pipelines with a
fault, which the test must notice.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional

from hvdtrain.comm.communicator import Buffer, Communicator, Handle
from hvdtrain.core.extras import implementation
from hvdtrain.extras.pipeline.cuts import balanced_cuts
from hvdtrain.extras.pipeline.executor import Pipeline, Spent, measured_bubble
from hvdtrain.extras.pipeline.schedule import Schedule, timeline
from hvdtrain.extras.pipeline.stages import stages_of, tied_parameters, units_of
from hvdtrain.frameworks.torch.models import gpt, mlp

STEPS = 3
CONTEXT = 5
TOKENS = 11
CPU = torch.device("cpu")
SHARES = (  # of each data-parallel rank, the samples of its micro-batches
    ((2, 2, 2, 2), (3, 1, 0, 2)),
    ((1,), (4,)),
    ((3, 3, 1, 2, 0, 2, 1), (0, 0, 0, 0, 0, 0, 0)),
    ((0, 0), (0, 3)),
)
SCHEDULES: tuple[tuple[Schedule, int], ...] = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("zero_bubble", 1),
    ("interleaved", 2),
    ("interleaved", 3),
)


class Case(NamedTuple):
    model: str
    schedule: Schedule
    virtual: int
    shares: Sequence[Sequence[int]]


def cases() -> list[Case]:
    shares = {"gpt": SHARES, "tied gpt": SHARES[2:3], "mlp": SHARES[:1]}
    return [
        Case(model, *schedule, these)
        for model in shares
        for schedule in SCHEDULES
        for these in shares[model]
    ]


def model_of(name: str, stages: int) -> nn.Module:
    torch.manual_seed(3)
    if name == "mlp":
        return mlp.build("mlp", (4, 3, 1), 5, widths=(8,) * stages).double()
    return gpt.build(
        "gpt", CONTEXT, TOKENS, layers=stages - 1, heads=2, width=8, tied=name == "tied gpt"
    ).double()


def batch_of(name: str, samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if name == "mlp":
        return torch.randn(
            samples, 4, 3, 1, generator=generator, dtype=torch.float64
        ), torch.randint(5, (samples,), generator=generator)
    tokens = torch.randint(TOKENS, (samples, CONTEXT + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="sum")


class Doubled:
    """A communicator that delivers twice the gradients; all else is the real communicator's."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def start_send(self, x: Buffer, to: int, name: str, tag: int = 0) -> Handle:
        return self._communicator.start_send(
            x * 2 if name.endswith("gradient") else x, to, name, tag
        )


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the largest number."""
    return (
        float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-300))
        if expected.numel()
        else 0.0
    )


def difference(case: Case, pipe: Communicator, data: Communicator, fault: str = "") -> float:
    """On this rank."""
    count = pipe.size * case.virtual
    whole = model_of(case.model, count)
    model = model_of(case.model, count)
    stages = stages_of(model, balanced_cuts([1.0] * len(units_of(model, "test")), count), "test")
    own = {number: stage for number, stage in enumerate(stages) if number % pipe.size == pipe.rank}
    parameters = {id(p): p for stage in own.values() for p in stage.parameters()}.values()
    names = {id(p): name for name, p in model.named_parameters()}
    communicator: Any = Doubled(pipe) if fault == "doubled" else pipe
    pipeline = Pipeline(own, communicator, case.schedule, CPU, "test")
    tied = tied_parameters(model, stages)
    assert bool(tied) == (case.model == "tied gpt")
    shares = [case.shares[rank % 2] for rank in range(data.size)]
    mine = shares[data.rank]
    total = max(1, sum(map(sum, shares)))
    found = 0.0
    for step in range(STEPS):
        batches = [
            [batch_of(case.model, n, 1000 * step + 100 * rank + i) for i, n in enumerate(share)]
            for rank, share in enumerate(shares)
        ]
        expected = (
            sum(
                [loss_of(whole(x), y) for share in batches for x, y in share if len(x)],
                torch.zeros(()),
            )
            / total
        )
        if expected.requires_grad:
            expected.backward()

        losses: list[torch.Tensor] = []

        def loss(
            number: int, outputs: torch.Tensor, ys: Any = batches[data.rank], losses: Any = losses
        ) -> torch.Tensor:
            losses.append(loss_of(outputs, ys[number][1]) / total)
            return losses[-1]

        pipeline.train(mine, lambda number, xs=batches[data.rank]: xs[number][0], loss)
        for p in parameters:
            own_gradient = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad = data.allreduce(own_gradient.clone(), f"gradient.{names[id(p)]}")
        if fault != "not tied":
            pipeline.add_tied(tied)
        own_loss = (
            torch.stack([each.detach() for each in losses]).sum()
            if losses
            else torch.zeros((), dtype=torch.float64)
        )
        sums = data.allreduce(own_loss.clone(), "loss")
        if pipe.rank == pipe.size - 1:
            found = max(found, gap(sums, expected.detach().double()))
        theirs = dict(whole.named_parameters())
        with torch.no_grad():
            for p in parameters:
                other = theirs[names[id(p)]]
                found = max(
                    found,
                    gap(p.grad, torch.zeros_like(other) if other.grad is None else other.grad),
                )
            for p in (*parameters, *theirs.values()):
                if p.grad is not None:
                    p.sub_(0.5 * p.grad)
                p.grad = None
    outputs: dict[int, torch.Tensor] = {}
    pipeline.evaluate(
        mine, lambda number: batch_of(case.model, mine[number], number)[0], outputs.__setitem__
    )
    if pipe.rank == pipe.size - 1:
        assert sorted(outputs) == [number for number, n in enumerate(mine) if n], sorted(outputs)
        for number, each in outputs.items():
            found = max(
                found, gap(each, whole(batch_of(case.model, mine[number], number)[0]).detach())
            )
    return found


def torchs_own(pipe: Communicator, schedule: Any) -> float:
    """A schedule of torch.distributed.pipelining over the process group of a communicator, with its
    own exchange of shapes. A copy without the extra of such process groups has nothing to
    compare."""
    extra = implementation("shard.stage=3")
    if extra is None:
        return 0.0
    name = f"{extra.rpartition('.')[0]}.torch.process_group"
    importlib.import_module(name).start_process_group(pipe)
    whole = model_of("gpt", pipe.size)
    model = model_of("gpt", pipe.size)
    x, y = batch_of("gpt", 8, 1)
    loss_of(whole(x), y).backward()
    cuts = balanced_cuts([1.0] * len(units_of(model, "test")), pipe.size)
    stage = stages_of(model, cuts, "test")[pipe.rank]
    runner = schedule(
        PipelineStage(stage, pipe.rank, pipe.size, torch.device("cpu")),
        4,
        loss_fn=loss_of,
        scale_grads=False,
    )
    runner.step(
        *([x] if pipe.rank == 0 else []), **({"target": y} if pipe.rank == pipe.size - 1 else {})
    )
    theirs = dict(whole.named_parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    return max(gap(p.grad, theirs[names[id(p)]].grad) for p in stage.parameters())


class Slow(torch.autograd.Function):
    """The identity, in 20 ms forward and 40 ms backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.04)
        return gradient


class SlowLayer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Slow.apply(super().forward(x))


def bubbles(
    pipe: Communicator, schedule: Schedule, virtual: int, micro: int
) -> tuple[float, float]:
    """The share of waiting that was measured, the mean over ranks, and the one predicted; of up to
    3 jobs, on a busy machine."""
    predicted = timeline(schedule, pipe.size, micro, virtual).bubble
    measured = [1.0]
    while len(measured) <= 3 and min(measured) > predicted + 0.1:
        measured.append(bubble_of_a_job(pipe, schedule, virtual, micro))
    return min(measured), predicted


def bubble_of_a_job(pipe: Communicator, schedule: Schedule, virtual: int, micro: int) -> float:
    """Returns the bubble of a job, the same on all ranks."""
    model = nn.Sequential(*(SlowLayer(4, 4) for _ in range(pipe.size * virtual)))
    stages = stages_of(model, range(pipe.size * virtual), "test")
    pipeline = Pipeline(
        {i: stage for i, stage in enumerate(stages) if i % pipe.size == pipe.rank},
        pipe,
        schedule,
        CPU,
        "test",
    )
    pipe.allgather_object(0)  # all begin together
    pipeline.train(
        [1] * micro, lambda number: torch.ones(1, 4), lambda number, outputs: outputs.sum()
    )
    spent = [Spent(*each) for each in pipe.allgather_object(tuple(pipeline.spent))]
    return measured_bubble(spent)


def apart_by_case(communicator: Communicator, engine: str, size: int) -> dict[str, Any]:
    """The largest difference from the whole model, of pipelines of `size` ranks; and the share of
    time that stages wait."""
    pipe = communicator.split(communicator.rank // size)
    data = communicator.split(communicator.rank % size)
    assert pipe is not None and data is not None
    found: dict[str, Any] = {}
    for case in cases():
        name = f"{case.model}, {case.schedule} x {case.virtual}, {case.shares}"
        found[name] = max(communicator.allgather_object(difference(case, pipe, data)))
    tied = Case("tied gpt", "1f1b", 1, SHARES[0])
    for fault in ("doubled", "not tied"):
        found[f"faulty: {fault}"] = max(
            communicator.allgather_object(difference(tied, pipe, data, fault))
        )
    if engine == "mpi" and pipe.size == communicator.size:
        for schedule in (ScheduleGPipe, Schedule1F1B):
            found[f"torch's {schedule.__name__}"] = max(
                communicator.allgather_object(torchs_own(pipe, schedule))
            )
    return found


def measured_bubbles(communicator: Communicator, size: int) -> dict[str, Any]:
    """The share of time that stages wait, measured and predicted."""
    pipe = communicator.split(communicator.rank // size)
    assert pipe is not None
    return {f"{schedule} {m}": bubbles(pipe, schedule, v, m) for schedule, v, m in BUBBLES}


BUBBLES: tuple[tuple[Schedule, int, int], ...] = (
    ("gpipe", 1, 1),
    ("1f1b", 1, 6),
    ("interleaved", 2, 4),
)
