"""Milliseconds of a training step with each engine, and with settings of Horovod, in turn.

python benchmarks/engines.py --root DIR [--ranks 2,4] [--precisions fp32,bf16] [--rounds 5] [--json FILE] [--only SETTING ...] [--networks NAME ...]

Each setting is a job of its own under mpirun, with one thread a rank; a round starts every setting once and begins with another one.
The time of a run is the median of its blocks, each measured on the slowest rank. Ratios are to mpi
in the same round: below 1 is faster. Without --only: mpi, Horovod as hvdtrain starts it, and
Horovod with `comm.reduce=bucket`.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from blocks import Trainer, spread
from peers import environment
from rows import append

from hvdtrain.comm.launcher_variables import placement
from hvdtrain.config.read import configure
from hvdtrain.training.build import connect
from hvdtrain.training.health.signals import Signals

BLOCKS = 5
BLOCK_S = 0.5  # seconds that a block takes, about
MPI = "mpi"
NETWORKS = {
    "mlp": ["data.name=digits", "model.name=mlp", "batch.size=64"],
    "convnet": ["data.name=digits", "model.name=convnet", "batch.size=64"],
    "wide_resnet": [
        "data.name=fashion_mnist",
        "model.name=wide_resnet",
        "model.widths=[16,16,32,64]",
        "model.dropout=0",
        "batch.size=128",
    ],
}
SETTINGS: dict[str, list[str]] = {
    MPI: ["comm.engine=mpi"],
    "horovod": ["comm.engine=horovod"],
    "horovod comm.reduce=bucket": ["comm.engine=horovod", "comm.reduce=bucket"],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, help="folder that holds FashionMNIST/raw")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument(
        "--only",
        nargs="+",
        default=list(SETTINGS),
        metavar="SETTING",
        help="of the list above, or 'horovod key=value ... VARIABLE=value'",
    )
    parser.add_argument("--worker", nargs="+", metavar="key=value", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    for ranks in map(int, options.ranks.split(",")):
        for precision in options.precisions.split(","):
            for network in options.networks:
                compare(options, ranks, precision, network)


def compare(options: argparse.Namespace, ranks: int, precision: str, network: str) -> None:
    """Measures the settings in turn, prints a line for each, and appends its row."""
    job = [*NETWORKS[network], f"speed.precision={precision}"]
    if "data.name=fashion_mnist" in job:
        job.append(f"data.root={options.root}")
    times: dict[str, list[float]] = {setting: [] for setting in options.only}
    for number in range(options.rounds):
        first = number % len(options.only)
        for setting in options.only[first:] + options.only[:first]:
            times[setting].append(run(setting, ranks, job))
    for setting in options.only:
        ratios = [a / b for a, b in zip(times[setting], times[options.only[0]], strict=True)]
        ratio, quartiles = spread(ratios, 3)
        row = {
            "ranks": ranks,
            "precision": precision,
            "network": network,
            "setting": setting,
            "step_ms": round(statistics.median(times[setting]), 3),
            "ratio": ratio,
            "ratio_quartiles": quartiles,
            "to": options.only[0],
            "n": options.rounds,
        }
        print(
            f"{ranks} ranks, {precision}, {network:<11} {setting:<40} {row['step_ms']:8.3f} ms  "
            f"{ratio:.3f} ({quartiles[0]:.3f} to {quartiles[1]:.3f})",
            flush=True,
        )
        if options.json:
            append(options.json, row)


def run(setting: str, ranks: int, job: list[str]) -> float:
    """Returns the milliseconds of a step, measured in a separate job."""
    engine, *others = setting.split()
    words = SETTINGS.get(setting, [f"comm.engine={engine}", *others])
    variables = dict(word.split("=") for word in words if word.split("=")[0].isupper())
    keys = [word for word in words if not word.split("=")[0].isupper()]
    command = ["timeout", "-k", "5", "150", "mpirun", "-np", str(ranks), sys.executable, __file__]
    done = subprocess.run(
        [*command, "--worker", *job, *keys],
        env=environment() | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"step_ms"')]
    if done.returncode or len(lines) != 1:
        sys.exit(f"{setting}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return float(json.loads(lines[0])["step_ms"])


def work(words: list[str]) -> None:
    """One rank: trains in blocks, and rank 0 prints the median."""
    place = placement(os.environ)
    engine = next(word for word in words if word.startswith("comm.engine="))
    communicator, _ = connect(configure(None, [engine, *communicator_keys(words)]), place)
    with Signals(place.rank) as signals:
        trainer = Trainer(words, communicator, signals)
        every = trainer.job.config.log.every_steps
        trainer.block(2 * every)
        began = time.perf_counter()
        trainer.block(2 * every)
        step_s = (time.perf_counter() - began) / (2 * every)
        steps = communicator.broadcast_object(max(1, round(BLOCK_S / step_s / every)) * every)
        blocks = [trainer.block(steps) / steps for _ in range(BLOCKS)]
        slowest = [max(rows) for rows in zip(*communicator.allgather_object(blocks), strict=True)]
        result: dict[str, Any] = {"step_ms": 1e3 * statistics.median(slowest), "steps": steps}
        if place.rank == 0:
            print(json.dumps(result), flush=True)
    communicator.close()


def communicator_keys(words: list[str]) -> list[str]:
    """Returns the keys that an engine reads when it starts."""
    return [word for word in words if word.startswith("comm.") and "engine" not in word]


if __name__ == "__main__":
    main()
