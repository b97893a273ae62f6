"""Milliseconds of a training step with each shard.stage, and of DeepSpeed, FSDP2 and Lightning, in turn in the same processes.

mpirun -np 2 python benchmarks/shards.py [--case mlp] [--trainers mpi/0,mpi/1,mpi/2,mpi/3] [--to mpi/0] [--rounds 15] [--steps 5]
                                         [--json FILE] [key=value ...]

A trainer is ENGINE/STAGE of hvdtrain, or a trainer of sharded_peers.py. All have the same model,
initial weights and batches, and Adam, in float32. In each round every trainer trains a block of
steps, and each round begins with another trainer; ratios are within a round. Losses are means over
the samples of all ranks in a block: the script fails if two trainers' losses differ by more than
--tolerance.

All trainers except the mpi engine's communicate with Gloo. mpi/3 makes MPI torch's process group,
so it can be compared only with other stages of mpi.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, Protocol

import torch
from blocks import Trainer, in_turn, mean_loss, spread
from sharded_peers import PEERS, Feed
from step import device_name

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.config.read import configure
from hvdtrain.training.build import connect
from hvdtrain.training.health.signals import Signals

CASES = {  # mlp: many weights for each sample, so that the optimizer takes much of a step
    "mlp": [
        "data.name=digits",
        "model.name=mlp",
        "model.widths=[1024,1024,1024,1024,1024]",
        "batch.size=32",
    ],
    "gpt": [
        *(
            "data.name=image_tokens",
            "data.source=digits",
            "task.name=language",
            "model.name=gpt",
            "model.layers=6",
            "model.heads=4",
        ),
        *("model.width=128", "batch.size=16"),
    ],
}
OURS = [f"{engine}/{stage}" for engine in ("mpi", "torchdist") for stage in range(4)]
JOB = ["optim.name=adam", "optim.base_lr=1e-3", "optim.weight_decay=0"]


class Timed(Protocol):
    """A trainer."""

    losses: list[float]  # of each block

    def block(self, steps: int) -> float:
        """Trains that many steps; seconds. A collective."""


class Ours:
    """hvdtrain's own loop, with a sync point at the end of each block."""

    def __init__(self, overrides: list[str], communicator: Communicator, signals: Signals) -> None:
        self.trainer = Trainer(overrides, communicator, signals)
        self.losses: list[float] = []

    def block(self, steps: int) -> float:
        before = self.trainer.now.sums
        seconds = self.trainer.block(steps)
        self.losses.append(mean_loss(before, self.trainer.now.sums))
        return seconds


def start(options: argparse.Namespace, signals: Signals) -> dict[str, Timed]:
    """The trainers by name. Every rank calls it."""
    communicators: dict[str, Communicator] = {}
    trainers: dict[str, Timed] = {}
    job = [*CASES[options.case], *JOB, f"log.every_steps={options.steps}", *options.overrides]
    for name in sorted(
        options.trainers, key=lambda name: not name.startswith("torchdist")
    ):  # which starts torch's process group
        engine, _, stage = name.partition("/")
        if engine in ("mpi", "torchdist"):
            if engine not in communicators:
                communicators[engine], _ = connect(
                    configure(None, [f"comm.engine={engine}"]), placement(os.environ)
                )
            trainers[name] = Ours([*job, f"shard.stage={stage}"], communicators[engine], signals)
        else:
            feed = Feed(
                Trainer(job, communicators["torchdist"], signals),
                options.steps * (options.rounds + 1),
            )
            trainers[name] = PEERS[name](feed)
    return {name: trainers[name] for name in options.trainers}


def rows(trainers: dict[str, Timed], times: dict[str, list[float]], steps: int) -> dict[str, Any]:
    """Milliseconds of a step of each trainer, its losses, and its ratio to each other one in the
    same round."""
    found: dict[str, Any] = {}
    for name, seconds in times.items():
        ms, quartiles_ms = spread([1e3 * s / steps for s in seconds], 2)
        ratios = {
            other: spread([a / b for a, b in zip(seconds, times[other], strict=True)], 3)
            for other in times
            if other != name
        }
        found[name] = {
            "ms": ms,
            "quartiles_ms": quartiles_ms,
            "ratio_to": ratios,
            "losses": trainers[name].losses,
        }
    return found


def table(found: dict[str, Any], references: list[str]) -> str:
    """Markdown: a line for each trainer, with the ratios to the references."""
    heads = [
        "trainer",
        "ms a step (quartiles)",
        *[f"ratio to {name} (quartiles)" for name in references],
        "loss of the last block",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, row in found.items():
        cells = [name, median_and_quartiles(row["ms"], row["quartiles_ms"], 1)]
        cells += [
            median_and_quartiles(*row["ratio_to"][other], 2) if other != name else "1"
            for other in references
        ]
        cells.append(f"{row['losses'][-1]:.7f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def median_and_quartiles(median: float, quartiles: list[float], digits: int) -> str:
    """12.3 (11.9 to 12.8)"""
    low, high = quartiles
    return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def largest_difference(trainers: dict[str, Timed]) -> float:
    """Between the losses of a block, relative to the first trainer's."""
    first = next(iter(trainers.values())).losses
    return max(
        abs(a / b - 1)
        for trainer in trainers.values()
        for a, b in zip(trainer.losses, first, strict=True)
    )


def parse() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", choices=CASES, default="mlp")
    parser.add_argument(
        "--trainers", type=names, default=[f"mpi/{stage}" for stage in range(4)], metavar="NAME,..."
    )
    parser.add_argument(
        "--to",
        type=names,
        metavar="NAME,...",
        help="trainers that ratios of the table are to; default: the first",
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tolerance", type=float, default=1e-5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a line to this file")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="for all, as in model.layers=2; peers take all but optim.name",
    )
    options = parser.parse_intermixed_args()
    if unknown := [
        name for name in [*options.trainers, *(options.to or [])] if name not in [*OURS, *PEERS]
    ]:
        parser.error(f"no trainer {', '.join(unknown)}; there are {', '.join([*OURS, *PEERS])}")
    if set(options.to or []) - set(options.trainers):
        parser.error("--to names a trainer that is not among --trainers")
    engines = {name.partition("/")[0] for name in options.trainers}
    if ("mpi/3" in options.trainers and engines != {"mpi"}) or (
        engines - {"mpi"} and "torchdist" not in engines
    ):
        parser.error(
            "mpi/3 goes with stages of mpi alone; others need a stage of torchdist beside them, "
            "as in torchdist/1,deepspeed/1"
        )
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    place = placement(os.environ)
    with Signals(place.rank) as signals:
        trainers = start(options, signals)
        times = in_turn(
            {name: trainer.block for name, trainer in trainers.items()},
            options.rounds,
            options.steps,
        )
    difference = largest_difference(trainers)
    found = rows(trainers, times, options.steps)
    facts: dict[str, Any] = {
        "case": options.case,
        "ranks": place.size,
        "device": device_name(torch.device("cpu")),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 1),
        "words": options.overrides,
        "rounds": options.rounds,
        "steps_per_block": options.steps,
        "largest_difference_of_losses": difference,
    }
    if place.rank == 0:
        print(
            f"\n{table(found, options.to or options.trainers[:1])}\n\n{json.dumps(facts)}",
            flush=True,
        )
        if options.json:
            with options.json.open("a") as out:
                out.write(json.dumps(facts | {"rows": found}) + "\n")
    if not difference < options.tolerance:
        sys.exit(
            f"losses differ by {difference:.1e} of the first trainer's: the trainers do not train "
            "the same"
        )


if __name__ == "__main__":
    main()
