"""Workers that wait and workers that do not: time to an accuracy with one slow worker, updates a second, staleness, bytes.

mpirun -np 4 python benchmarks/asynchronous.py [--part accuracy|fashion|rate|servers ...] [--seeds 1,2,3] [--slow 5] [--json FILE] [--quick]
                                               [--data KEY=VALUE ...]

Three workers train a perceptron on digits; with servers rank 0 holds the weights. A pass sleeps
--ms-per-sample for each of its samples, and --slow times as long on the last worker. So the times
are those of separate machines, however many cores this machine has. accuracy: seconds to 95 % with
each way of waiting. fashion: seconds to 88 % of Fashion-MNIST, with a perceptron of 256 units,
batches of 256 and a fifth of the sleep; --data data.root=DIR has its files. rate: updates per
second and staleness for each bound, and the bytes that an update sends over the network. servers:
updates per second with one server and with two, for a perceptron with 5 million weights and cheap
passes.
"""  # noqa: E501

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import platform
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from hvdtrain.comm.communicator import Buffer, Communicator, Handle
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.config.read import configure
from hvdtrain.events.log import Event, Log
from hvdtrain.training.build import build_learner, connect
from hvdtrain.training.datasets import open_datasets
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.job import Job, make_job
from hvdtrain.training.loop import evaluate_and_record, train_to_sync_point
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.progress.triggers import evaluation_due
from hvdtrain.training.replicas.broadcast import broadcast_state
from hvdtrain.training.start import begin

TARGET = 0.95
FASHION_TARGET = 0.88
FASHION = (
    "data.name=fashion_mnist batch.size=256 batch.evaluate=500 model.width=256 "
    "log.every_steps=100 evaluate.every_steps=100"
)
COMMON = (
    "batch.size=64 epochs=null optim.name=sgd optim.base_lr=0.1 optim.momentum=0 "
    "log.every_steps=50 evaluate.every_steps=50"
)
WAYS = {
    "every step waits for all workers": "",
    "an average after 10 steps of each": "comm.local_steps=10",
    "at most 2 updates old": "servers.count=1 servers.bound=2",
    "at most 8 updates old": "servers.count=1 servers.bound=8",
    "of any age": "servers.count=1 servers.bound=none",
}
LONG_EPOCHS = (
    "data.name=synthetic data.samples=100000 data.val_samples=10 data.shape=[8,8,1] "
    "evaluate.every_steps=null"
)
RATES = {
    "without servers": "",
    **{
        f"bound {bound}": f"servers.count=1 servers.bound={bound}"
        for bound in (0, 1, 2, 4, 8, "none")
    },
}
PACE = {"seconds": 0.0}  # of a sample, on this rank


class Paced(torch.nn.Module):
    """A perceptron whose passes of training cost a sleep."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 64) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.Linear(math.prod(shape), width),
            torch.nn.ReLU(),
            torch.nn.Linear(width, classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(PACE["seconds"] * len(x))
        return self.layers(x)


class Counting:
    """A communicator that counts the bytes of messages and of allreduces of gradients."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self.nbytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def start_send(self, x: Buffer, *where: Any) -> Handle:
        self.nbytes += x.nbytes
        return self._communicator.start_send(x, *where)

    def start_allreduce(self, x: Buffer, name: str, op: str = "sum") -> Handle:
        # what a ring sends from a rank
        self.nbytes += round(2 * x.nbytes * (self._communicator.size - 1) / self._communicator.size)
        return self._communicator.start_allreduce(x, name, op)


class Trial:
    """A job of this rank, and what its events say."""

    def __init__(self, words: str, communicator: Any) -> None:
        config = configure(None, f"{COMMON} model.name=asynchronous:Paced {words}".split())
        datasets = open_datasets(config, communicator)
        learner = build_learner(config, datasets.task, communicator)
        broadcast_state(communicator, learner, None)
        self.ages: Counter[int] = Counter()
        self.now: TrainState = begin(config, datasets)
        self.job: Job = make_job(
            config,
            datasets,
            communicator,
            learner,
            signals=Signals(0),
            heartbeat=Heartbeat(),
            log=Log([self._record]),
            start=self.now,
            run=None,
        )

    def _record(self, event: Event) -> None:
        for of_worker in event.fields.get("staleness", {}).values():
            self.ages.update({int(age): n for age, n in of_worker.items()})

    def window(self) -> None:
        self.now = train_to_sync_point(self.job, self.now)


def accuracy(
    words: str, communicator: Any, most_steps: int, target: float = TARGET
) -> dict[str, Any]:
    """Returns seconds, steps and samples up to the first evaluation at the target; None if it is
    not reached."""
    trial = Trial(f"{words} stop.steps={most_steps} stop.target={target}", communicator)
    communicator.allgather_object(None)
    began = time.perf_counter()
    while trial.now.progress.step < most_steps:
        trial.window()
        if evaluation_due(trial.job.config, trial.now):
            trial.now = evaluate_and_record(trial.job, trial.now)
            if trial.now.at_target:
                return {
                    "seconds": round(time.perf_counter() - began, 3),
                    "steps": trial.now.progress.step,
                }
    return {"seconds": None, "steps": most_steps, "last": trial.now.last}


def rate(words: str, communicator: Any, steps: int) -> dict[str, Any]:
    """Updates a second between two sync points, the ages of gradients, and the bytes that an update
    takes."""
    counting = Counting(communicator)
    trial = Trial(f"{words} {LONG_EPOCHS} log.every_steps={steps} stop.steps={2 * steps}", counting)
    trial.window()  # the first steps of a process are slow
    trial.ages.clear()
    before = counting.nbytes
    began = time.perf_counter()
    trial.window()
    seconds = time.perf_counter() - began
    sent = sum(communicator.allgather_object(counting.nbytes - before))
    ages = trial.ages
    mean = sum(age * n for age, n in ages.items()) / max(1, ages.total())
    weights = 4 * sum(
        piece.stop - piece.start
        for piece in trial.job.learner.pieces()
        if piece.name.startswith("p.")
    )
    return {
        "updates_per_s": round(steps / seconds, 2),
        "staleness": round(mean, 2),
        "oldest": max(ages, default=0),
        "bytes_per_update": sent // steps,
        "of_weights": round(sent / steps / weights, 3),
    }


def group(world: Communicator, words: str, ranks: int) -> Communicator | None:
    """The first so many ranks; None on the others."""
    return world.split(0 if world.rank < ranks else None)


def ranks_of(words: str, workers: int) -> int:
    return workers + configure(None, words.split()).servers.count


def measure(world: Communicator, options: argparse.Namespace) -> list[dict[str, Any]]:
    from asynchronous import PACE  # of the module that the configuration names, not of this program

    workers = world.size - 1
    rows = []
    slow = options.slow if options.slow else 1.0
    for part in options.part:
        if part == "servers":
            jobs = [
                (
                    f"{count} server{'s' * (count > 1)}",
                    f"servers.count={count} servers.bound=none model.width=65000",
                    2,
                    0,
                )
                for count in (1, 2)
            ]
            jobs = [job for job in jobs if 2 + int(job[0][0]) <= world.size]
        else:
            named = RATES if part == "rate" else WAYS
            jobs = [
                (name, words, workers, seed)
                for seed in ([1] if part == "rate" else options.seeds)
                for name, words in named.items()
            ]
        for name, words, workers_of_job, seed in jobs:
            ranks = ranks_of(words, workers_of_job)
            members = group(world, words, ranks)
            found: dict[str, Any] = {}
            pace_ms = options.ms_per_sample * {"servers": 0, "fashion": 0.2}.get(part, 1)
            if members is not None:
                is_slow = members.rank == ranks - 1
                PACE["seconds"] = pace_ms / 1e3 * (slow if is_slow else 1.0)
                seeded = f"{words} seed={max(1, seed)}"
                if part == "accuracy":
                    found = accuracy(seeded, members, 50 if options.quick else 3000)
                elif part == "fashion":
                    found = accuracy(
                        f"{FASHION} {seeded} {' '.join(options.data)}",
                        members,
                        6000,
                        FASHION_TARGET,
                    )
                else:
                    found = rate(
                        f"{seeded} batch.size={8 if part == 'servers' else 64}",
                        members,
                        10 if options.quick else options.steps[part],
                    )
            row = {
                "part": part,
                "job": name,
                "workers": workers_of_job,
                "slow": slow,
                "seed": seed,
                "ms_per_sample": pace_ms,
                **found,
            }
            rows.append(row)
            if world.rank == 0:
                print(json.dumps(row), flush=True)
            world.allgather_object(None)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the table of the parts accuracy and fashion, as in benchmarks/asynchronous.md."""
    lines = ["| | gradients | updates | seconds |", "|---|---|---|---|"]
    for part, name in itertools.product(("accuracy", "fashion"), WAYS):
        of_job = [row for row in rows if row["part"] == part and row["job"] == name]
        seconds = [row["seconds"] for row in of_job if row["seconds"] is not None]
        if seconds:
            steps = [row["steps"] for row in of_job if row["seconds"] is not None]
            spread = f"{statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"
            lines.append(f"| {part} | {name} | {statistics.median(steps):.0f} | {spread} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part",
        nargs="+",
        choices=["accuracy", "fashion", "rate", "servers"],
        default=["accuracy", "rate", "servers"],
    )
    parser.add_argument(
        "--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[1, 2, 3]
    )
    parser.add_argument("--slow", type=float, default=5.0)
    parser.add_argument("--ms-per-sample", type=float, default=0.3)
    parser.add_argument("--engine", default="mpi", choices=["mpi", "torchdist"])
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--data", nargs="+", default=[], help="options of the part fashion: data.root=DIR"
    )
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.steps = {"rate": 100, "servers": 40}
    torch.set_num_threads(1)
    world, _ = connect(configure(None, [f"comm.engine={options.engine}"]), placement(os.environ))
    rows = measure(world, options)
    if world.rank == 0:
        print(table(rows))
        if options.json:
            facts = {
                "machine": platform.processor() or platform.machine(),
                "cores": os.cpu_count(),
                "torch": torch.__version__,
            }
            facts |= {"date": datetime.date.today().isoformat(), "engine": options.engine}
            with options.json.open("a") as file:
                file.writelines(json.dumps({**row, **facts}) + "\n" for row in rows)
    world.close()


if __name__ == "__main__":
    main()
