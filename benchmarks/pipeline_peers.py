"""Milliseconds of a training step on a pipeline: hvdtrain's executor and the schedules of torch.distributed.pipelining, in turn.

mpirun -np 2 python benchmarks/pipeline_peers.py [--rounds 20] [--micro 4] [--samples 4] [--json FILE]

Both have the same stages of a GPT, weights and micro-batches, SGD in float32, and messages over the
torchdist engine's Gloo group. A round is one step of each, after a warm-up step; rounds alternate
which one begins. The script fails if the losses of a step differ. The ratio is hvdtrain's time
divided by the time of torch's schedule in the same round: median and quartiles.
"""  # noqa: E501

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from blocks import spread
from pipeline_bubble import CONTEXT, VOCABULARY
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.config import plugins
from hvdtrain.config.sections.comm import CommConfig
from hvdtrain.extras.pipeline.cuts import balanced_cuts
from hvdtrain.extras.pipeline.executor import Pipeline
from hvdtrain.extras.pipeline.stages import Stage, stages_of, units_of
from hvdtrain.frameworks.torch.models import gpt

THEIRS: dict[Any, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
CPU = torch.device("cpu")
LR = 0.05
# tokens (n, CONTEXT + 1) -> the mean loss, on the last rank
OneStep = Callable[[torch.Tensor], float]


def loss_of(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean over tokens."""
    return functional.cross_entropy(outputs.flatten(0, -2), y.flatten())


def ours(stage: Stage, ranks: Communicator, schedule: Any, micro: int) -> OneStep:
    pipeline = Pipeline({ranks.rank: stage}, ranks, schedule, CPU, "ours")
    optimizer = torch.optim.SGD(stage.parameters(), lr=LR)

    def one_step(tokens: torch.Tensor) -> float:
        parts = tokens.chunk(micro)
        losses = list[torch.Tensor]()

        def loss(number: int, outputs: torch.Tensor) -> torch.Tensor:
            losses.append(loss_of(outputs, parts[number][:, 1:]) / micro)
            return losses[-1]

        pipeline.train([len(part) for part in parts], lambda number: parts[number][:, :-1], loss)
        optimizer.step()
        optimizer.zero_grad()
        return sum(float(each.detach()) for each in losses)

    return one_step


def theirs(stage: Stage, ranks: Communicator, schedule: Any, micro: int) -> OneStep:
    # divides gradients by micro
    runner = THEIRS[schedule](
        PipelineStage(stage, ranks.rank, ranks.size, CPU), micro, loss_fn=loss_of
    )
    optimizer = torch.optim.SGD(stage.parameters(), lr=LR)

    def one_step(tokens: torch.Tensor) -> float:
        losses: list[torch.Tensor] = []
        inputs = [tokens[:, :-1]] if ranks.rank == 0 else []
        is_last = ranks.rank == ranks.size - 1
        runner.step(*inputs, **({"target": tokens[:, 1:], "losses": losses} if is_last else {}))
        optimizer.step()
        optimizer.zero_grad()
        return sum(float(each.detach()) for each in losses) / micro

    return one_step


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    ranks: Communicator = plugins.load("comm", "torchdist", "").connect(
        placement(os.environ), CommConfig(engine="torchdist")
    )
    assert dist.get_backend() == "gloo"
    torch.manual_seed(1)
    model = gpt.build(
        "gpt", CONTEXT, VOCABULARY, layers=options.layers, heads=4, width=options.width
    )
    cuts = balanced_cuts([0.0, *[1.0] * options.layers, 0.1], ranks.size)
    steps = {}
    for schedule in THEIRS:
        for name, make in {"hvdtrain": ours, "torch": theirs}.items():
            own = stages_of(copy.deepcopy(model), cuts, "stages")[ranks.rank]
            steps[schedule, name] = make(own, ranks, schedule, options.micro)
    assert len(units_of(model, "units")) == options.layers + 2
    times: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    generator = torch.Generator().manual_seed(0)
    keys = list(steps)
    largest = 0.0
    for number in range(options.rounds + 1):
        tokens = torch.randint(
            VOCABULARY, (options.micro * options.samples, CONTEXT + 1), generator=generator
        )
        losses = []
        for key in keys[number % len(keys) :] + keys[: number % len(keys)]:
            ranks.allgather_object(0)
            start = time.perf_counter()
            losses.append(steps[key](tokens))
            seconds = max(ranks.allgather_object(time.perf_counter() - start))
            times[key] += [seconds] if number else []
        largest = max(largest, max(losses) - min(losses))
    largest = max(ranks.allgather_object(largest))
    if largest > 1e-5:
        raise SystemExit(f"the two do not train the same: losses differ by {largest:.1g}")
    if ranks.rank == 0:
        report(times, largest, options)
    ranks.close()


def report(
    times: dict[tuple[str, str], list[float]], largest: float, options: argparse.Namespace
) -> None:
    where = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(
        f"{options.micro} micro-batches, {options.rounds} rounds, {where}, losses within "
        f"{largest:.1g}"
    )
    print(
        "| schedule | hvdtrain, ms a step | torch.distributed.pipelining | ratio "
        "|\n|---|---|---|---|"
    )
    for schedule in THEIRS:
        own = times[schedule, "hvdtrain"]
        other = times[schedule, "torch"]
        ratio = spread([a / b for a, b in zip(own, other, strict=True)], 3)
        of_both = [spread([1e3 * each for each in found], 1) for found in (own, other)]
        print(
            f"| `{schedule}` | "
            + " | ".join(f"{median} ({low} to {high})" for median, (low, high) in (*of_both, ratio))
            + " |"
        )
        if options.json:
            sizes = {
                name: getattr(options, name)
                for name in ("micro", "samples", "layers", "width", "rounds")
            }
            row = {
                "schedule": schedule,
                "hvdtrain_ms": of_both[0],
                "torch_ms": of_both[1],
                "ratio": ratio,
                "torch": torch.__version__,
            }
            with options.json.open("a") as file:
                file.write(json.dumps(row | sizes | {"load": round(os.getloadavg()[0], 1)}) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--micro", type=int, default=4, help="micro-batches of a step; as many as ranks or more"
    )
    parser.add_argument("--samples", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="append the rows to this file as JSON lines"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
