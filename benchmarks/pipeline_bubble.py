"""The measured share of a step in which the ranks of a pipeline wait, compared with the formula (p
- 1) / (m + p - 1) and simulations.

mpirun -np 2 python benchmarks/pipeline_bubble.py [--engine mpi|torchdist] [--stages sleeping|computing] [--micro 4,8,16] [--rounds 20]

sleeping: a stage sleeps 5 ms forward and 10 ms backward, as if each rank had its own machine.
Waiting beyond the formula is caused by the executor and the messages. computing: a GPT, its stages
cut by measured time. Ranks that share a core compute faster while the others wait. So the two ends
of a step, where few ranks compute, are shorter than in the formula. "one speed" simulates the
schedule with the times of a stage that computes alone. "shared" uses these times only while no
other rank computes, and otherwise the times while all ranks compute. Both times are measured in
each round. Cases take turns; the first round is left out. ms, and shares in percent: median
(quartiles).
"""  # noqa: E501

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from blocks import spread
from torch import nn

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.config import plugins
from hvdtrain.config.sections.comm import CommConfig
from hvdtrain.extras.pipeline.costs import measured_seconds
from hvdtrain.extras.pipeline.cuts import balanced_cuts
from hvdtrain.extras.pipeline.executor import (
    MicroBatch,
    Pipeline,
    Spent,
    measured_bubble,
)
from hvdtrain.extras.pipeline.schedule import (
    Action,
    Schedule,
    Seconds,
    cost,
    formula,
    needs,
    timeline,
)
from hvdtrain.extras.pipeline.stages import Stage, stages_of, units_of
from hvdtrain.frameworks.torch.models import gpt

SCHEDULES: tuple[tuple[Schedule, int], ...] = (
    ("1f1b", 1),
    ("gpipe", 1),
    ("zero_bubble", 1),
    ("interleaved", 2),
)
SLEEP_S = 0.005  # of a rank's forward pass, and of each of the two gradients
REPEATS = 3  # of a stage's passes, for its speed in a round
CPU = torch.device("cpu")
CONTEXT = 64
VOCABULARY = 16


class Slow(torch.autograd.Function):
    """The identity, which takes so many seconds forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient, None, None


class Sleeping(nn.Module):
    """A stage that takes `seconds` forward and twice as long backward: half of that for the
    gradient of the inputs, if they need one."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        of_weights = self.seconds if x.requires_grad else 2 * self.seconds
        return Slow.apply(x, self.seconds, self.seconds) * Slow.apply(self.weight, 0.0, of_weights)


class Case(NamedTuple):
    schedule: Schedule
    virtual: int
    micro: int
    pipeline: Pipeline
    stages: dict[int, Stage]  # of this rank


class Speeds(NamedTuple):
    """The seconds of each stage."""

    alone: list[Seconds]
    together: list[Seconds]  # while all ranks compute


class Workload:
    """The stages of one kind, and what goes into them."""

    def __init__(self, options: argparse.Namespace, ranks: Communicator) -> None:
        self._ranks = ranks
        self._is_gpt = options.stages == "computing"
        self._tokens = torch.randint(
            VOCABULARY, (options.samples, CONTEXT), generator=torch.Generator().manual_seed(0)
        )
        self._activations = torch.randn(
            options.samples, CONTEXT, options.width, generator=torch.Generator().manual_seed(0)
        )
        self._sizes = {"layers": options.layers, "heads": 4, "width": options.width}

    def stages(self, virtual: int) -> list[Stage]:
        """Returns the stages of all ranks."""
        count = self._ranks.size * virtual
        if not self._is_gpt:
            return stages_of(
                nn.Sequential(*(Sleeping(SLEEP_S / virtual) for _ in range(count))),
                range(count),
                "stages",
            )
        torch.manual_seed(1)
        model = gpt.build("gpt", CONTEXT, VOCABULARY, **self._sizes)
        seconds = (
            measured_seconds(units_of(model, "stages"), self._tokens)
            if self._ranks.rank == 0
            else []
        )
        units = [
            Seconds(*each)
            for each in self._ranks.allgather_object([tuple(unit) for unit in seconds])[0]
        ]
        return stages_of(model, balanced_cuts([sum(unit) for unit in units], count), "stages")

    def inputs(self, stage: int) -> torch.Tensor:
        return self._tokens if self._is_gpt and stage == 0 else self._activations

    def step(self, case: Case) -> list[Spent]:
        """Returns the times of each rank in a step that all ranks begin together."""
        self._ranks.allgather_object(0)
        case.pipeline.train(
            [len(self._tokens)] * case.micro,
            lambda number: self.inputs(0),
            lambda number, outputs: outputs.square().mean(),
        )
        return [Spent(*each) for each in self._ranks.allgather_object(tuple(case.pipeline.spent))]

    def speeds(self, case: Case) -> Speeds:
        """Measured: first one rank after the other, then all at once."""
        alone: list[tuple[int, Seconds]] = []
        for rank in range(self._ranks.size):
            own = self._own_seconds(case) if rank == self._ranks.rank else []
            # the others wait here
            alone += [each for found in self._ranks.allgather_object(own) for each in found]
        together = [
            each
            for found in self._ranks.allgather_object(self._own_seconds(case))
            for each in found
        ]
        return Speeds(
            *([Seconds(*seconds) for _, seconds in sorted(found)] for found in (alone, together))
        )

    def _own_seconds(self, case: Case) -> list[tuple[int, tuple[float, float]]]:
        """(stage, median seconds) of this rank's stages."""
        found: dict[int, list[Seconds]] = {number: [] for number in case.stages}
        for _ in range(REPEATS):
            for number, stage in case.stages.items():
                start = time.perf_counter()
                passes = MicroBatch(stage, self.inputs(number), is_first=number == 0)
                middle = time.perf_counter()
                passes.backward(torch.ones_like(passes.outputs))
                found[number].append(Seconds(middle - start, time.perf_counter() - middle))
        return [(number, tuple(median(of))) for number, of in found.items()]


def median(found: Sequence[Seconds]) -> Seconds:
    return Seconds(
        statistics.median(each.forward for each in found),
        statistics.median(each.backward for each in found),
    )


def medians(found: Sequence[Speeds]) -> Speeds:
    """Returns the medians for each stage."""
    return Speeds(
        *(
            [median(stage) for stage in zip(*of_rounds, strict=True)]
            for of_rounds in zip(*found, strict=True)
        )
    )


def shared_bubble(case: Case, ranks: int, speeds: Speeds) -> float:
    """Returns the share of waiting if a pass advances at one speed while no other rank computes,
    and otherwise at the other speed."""
    found = timeline(case.schedule, ranks, case.micro, case.virtual, speeds.alone)
    orders = [found.order(rank)[::-1] for rank in range(ranks)]  # the next pass is the last
    left: list[float] = [1.0] * ranks  # of the next pass
    done: set[Action] = set()
    total = busy = 0.0
    while any(orders):
        running = [
            rank
            for rank, order in enumerate(orders)
            if order and done.issuperset(needs(case.schedule, order[-1], ranks * case.virtual))
        ]
        seconds = speeds.alone if len(running) == 1 else speeds.together
        whole = {rank: cost(orders[rank][-1], seconds[orders[rank][-1].stage]) for rank in running}
        interval = min(left[rank] * whole[rank] for rank in running)
        total = total + interval
        busy = busy + interval * len(running)
        for rank in running:
            left[rank] -= interval / whole[rank]
            if left[rank] < 1e-9:
                done.add(orders[rank].pop())
                left[rank] = 1.0
    return 1 - busy / (total * ranks)


def make_cases(workload: Workload, ranks: Communicator, numbers: Sequence[int]) -> list[Case]:
    cases = []
    for schedule, virtual in SCHEDULES:
        own = {
            number: stage
            for number, stage in enumerate(workload.stages(virtual))
            if number % ranks.size == ranks.rank
        }
        pipeline = Pipeline(own, ranks, schedule, CPU, "stages")
        cases += [Case(schedule, virtual, micro, pipeline, own) for micro in numbers]
    return cases


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    ranks: Communicator = plugins.load("comm", options.engine, "").connect(
        placement(os.environ), CommConfig(engine=options.engine)
    )
    workload = Workload(options, ranks)
    cases = make_cases(workload, ranks, options.micro)
    shares: list[list[float]] = [[] for _ in cases]
    milliseconds: list[list[float]] = [[] for _ in cases]
    found: dict[int, list[Speeds]] = {case.virtual: [] for case in cases}
    for number in range(options.rounds + 1):
        for at in [(number + each) % len(cases) for each in range(len(cases))]:
            spent = workload.step(cases[at])
            if number:
                shares[at].append(100 * measured_bubble(spent))
                milliseconds[at].append(1e3 * max(each.seconds for each in spent))
        for case in {case.virtual: case for case in cases}.values():
            found[case.virtual].append(workload.speeds(case))
    speeds = {virtual: medians(of_rounds[1:]) for virtual, of_rounds in found.items()}
    rows = [
        row(case, shares[at], milliseconds[at], speeds[case.virtual], ranks.size)
        | facts(options, ranks.size)
        for at, case in enumerate(cases)
    ]
    if ranks.rank == 0:
        report(rows, speeds, options)
    ranks.close()


def row(
    case: Case, shares: list[float], milliseconds: list[float], speeds: Speeds, ranks: int
) -> dict[str, Any]:
    one_speed = timeline(case.schedule, ranks, case.micro, case.virtual, speeds.alone).bubble
    return {
        "schedule": case.schedule,
        "micro": case.micro,
        "formula": round(100 * formula(case.schedule, ranks, case.micro, case.virtual), 1),
        "one_speed": round(100 * one_speed, 1),
        "shared": round(100 * shared_bubble(case, ranks, speeds), 1),
        "measured": spread(shares, 1),
        "ms": spread(milliseconds, 1),
        "steps": len(shares),
        "alone_ms": [[round(1e3 * each, 2) for each in stage] for stage in speeds.alone],
        "together_ms": [[round(1e3 * each, 2) for each in stage] for stage in speeds.together],
    }


def facts(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    where = f"{ranks} ranks on {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    sizes = {
        name: getattr(options, name) for name in ("engine", "stages", "samples", "layers", "width")
    }
    return sizes | {
        "where": where,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def report(
    rows: list[dict[str, Any]], speeds: dict[int, Speeds], options: argparse.Namespace
) -> None:
    print(
        f"{options.engine}, {options.stages} stages, {rows[0]['where']}, {options.rounds} steps "
        "of each"
    )
    for virtual, (alone, together) in speeds.items():
        passes = ", ".join(
            f"{1e3 * sum(a):.1f} ({1e3 * sum(b):.1f})" for a, b in zip(alone, together, strict=True)
        )
        print(
            f"{virtual} on a rank: ms of a micro-batch in each stage, alone (while all compute): "
            f"{passes}"
        )
    print(
        "\n| schedule | m | formula | one speed | shared | measured | ms a step "
        "|\n|---|---|---|---|---|---|---|"
    )
    for one in rows:
        measured, ms = (
            f"{median} ({low} to {high})" for median, (low, high) in (one["measured"], one["ms"])
        )
        predicted = " | ".join(str(one[name]) for name in ("formula", "one_speed", "shared"))
        print(f"| `{one['schedule']}` | {one['micro']} | {predicted} | {measured} | {ms} |")
    if options.json:
        with options.json.open("a") as file:
            file.writelines(json.dumps(one) + "\n" for one in rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default="torchdist", choices=["mpi", "torchdist"])
    parser.add_argument("--stages", default="computing", choices=["sleeping", "computing"])
    parser.add_argument(
        "--micro", default=[4, 8, 16], type=lambda value: [int(each) for each in value.split(",")]
    )
    parser.add_argument("--rounds", type=int, default=20, help="steps of each case")
    parser.add_argument("--samples", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="append the rows to this file as JSON lines"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
