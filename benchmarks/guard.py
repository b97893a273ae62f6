"""What the health checks of a job (guard.*) cost: each part in loops, whole steps with and without it in turn, and checkpoints.

mpirun -np 2 python benchmarks/guard.py [--engine mpi|horovod] [--rounds 40] [--json FILE] [--only PART ...] [--quick]

The default wide_resnet on digits; checkpoints of a perceptron with 10 million weights too. Whole steps are timed in blocks in one
process. A ratio compares two consecutive blocks; the ratio of "nothing", two equal blocks, is the
noise. If a part costs less than the noise, its share of a step is computed from its microseconds.
--quick: a linear model, and only the ratios, to try the script.
"""  # noqa: E501

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from blocks import Part, Trainer, changed, microseconds, ratio, spread

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.comm.on_all_ranks import allreduce_sums
from hvdtrain.config.read import configure
from hvdtrain.core.metrics import Sums
from hvdtrain.events.log import Event, Log
from hvdtrain.frameworks.torch import step as torch_step
from hvdtrain.training.build import connect
from hvdtrain.training.checkpoint.saver import Saver
from hvdtrain.training.data_facts import identity
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.monitor import HealthMonitor
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.health.watchdog import Watchdog
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.replicas.compare import check_equal, digest_tables

MLP = ["model.name=mlp", "model.widths=[3100,3100]"]
# of a block: short, so that other load of the machine slows down both blocks of a pair, or one pair
# of many
STEPS = 20
PARTS = (
    "nothing",
    "heartbeat, watchdog",
    "flags on the sums",
    "non-finite check",
    "nonfinite=skip",
    "digests",
    "sync_buffers",
)


class SilentHeartbeat(Heartbeat):
    """Heartbeats are dropped."""

    def beat(self, phase: str, epoch: int, step: int) -> None:
        pass


class WithoutFlags(HealthMonitor):
    """Adds to the sums only the flag that the loop needs, and ignores other ranks' flags."""

    def flags(self, step: int | None = None) -> Sums:
        return {"save": 0.0}

    def update(self, sums: Sums) -> None:
        pass


class SynchronousSaver(Saver):
    """Training waits until the checkpoint is on the disk."""

    def save(self, now: TrainState, learner: Any) -> None:
        super().save(now, learner)
        self.close()


def watchdog(trainer: Trainer) -> Watchdog:
    health = trainer.job.health
    return Watchdog(health.heartbeat, health.signals, health.guard, health.communicator.rank)


def parts(trainer: Trainer) -> dict[str, Part]:
    """By the names of PARTS. nonfinite=skip is compared with stop, digests every 100 steps with
    none."""
    job = trainer.job
    health = job.health
    learner = job.learner
    without_flags = WithoutFlags(
        **{field.name: getattr(health, field.name) for field in dataclasses.fields(health)}
    )
    never = torch.zeros((), dtype=torch.bool)
    no_check = (
        (torch_step, "any_nonfinite", lambda parameters: never),
        (torch_step, "one_or_nan", lambda loss: 1.0),
    )

    def equal_steps(steps: int | None) -> tuple[Any, str, Any]:
        return health, "guard", health.guard.replace(equal_steps=steps)

    def sync_buffers(on: bool) -> tuple[Any, str, Any]:
        return learner, "sync_buffers", learner.sync_buffers if on else lambda communicator: None

    return {
        "nothing": lambda on: changed(),
        "heartbeat, watchdog": lambda on: (
            watchdog(trainer) if on else changed((job, "heartbeat", SilentHeartbeat()))
        ),
        "flags on the sums": lambda on: changed((job, "health", health if on else without_flags)),
        "non-finite check": lambda on: changed() if on else changed(*no_check),
        "nonfinite=skip": lambda on: changed(
            (learner, "saves_buffers", on), (learner._update, "_skips_nonfinite", on)
        ),
        "digests": lambda on: changed(equal_steps(100 if on else None)),
        "sync_buffers": lambda on: changed(
            equal_steps(None), sync_buffers(on)
        ),  # without it ranks differ
    }


def calls(trainer: Trainer) -> Iterator[dict[str, Any]]:
    """{"part", "us" of one call, "calls_per_step"} of each part. Some parts are collectives, so
    every rank measures all of them."""
    job = trainer.job
    health = job.health
    communicator = job.communicator
    learner: Any = job.learner
    learner.sync_buffers(communicator)
    # per step, including epoch ends
    sync_points = 1 / job.config.log.every_steps + job.config.batch.size / job.prefetcher.samples
    parameters = learner.parameters
    for p in parameters:
        p.grad = torch.randn_like(p)
    loss = torch.ones(())
    hyper = job.recipe.at(trainer.now.progress)
    sums = {"loss": 1.0, "right": 1.0, "count": 1, "nonfinite": 0.0}
    flags = health.flags()
    size = f"{sum(piece.nbytes for piece in learner.pieces()) / 1e6:.1f} MB"
    timed: list[tuple[str, float | None, dict[str, Any]]] = [
        ("one beat", 2 + sync_points, microseconds(lambda: health.heartbeat.beat("step", 3, 70))),
        (
            "flags() and after_sync()",
            sync_points,
            microseconds(lambda: health.after_sync(sums | health.flags())),
        ),
        (
            "sum of 4 numbers over ranks",
            None,
            microseconds(lambda: allreduce_sums(communicator, sums, "train.sums")),
        ),
        (
            "sum of 4 numbers and 2 flags",
            None,
            microseconds(lambda: allreduce_sums(communicator, sums | flags, "train.sums")),
        ),
        (
            "one_or_nan() and any_nonfinite()",
            1,
            microseconds(
                lambda: (torch_step.one_or_nan(loss), torch_step.any_nonfinite(parameters)), 500
            ),
        ),
        (f"digest of {size}", None, microseconds(lambda: digest_tables(learner.pieces()), 100)),
        (
            f"comparison of digests, {size}",
            0.01,
            microseconds(lambda: check_equal(communicator, learner, hyper, job.hosts), 100),
        ),
        (
            "sync_buffers",
            sync_points,
            microseconds(lambda: learner.sync_buffers(communicator), 200),
        ),
    ]
    for p in parameters:
        p.grad = None
    for name, calls_per_step, found in timed:
        yield {"part": name, "calls_per_step": calls_per_step} | found


def watchdog_seconds(trainer: Trainer, seconds: float = 5.0) -> dict[str, Any]:
    """Processor time of the watchdog thread in one second, while the main thread sleeps."""
    found = []
    with watchdog(trainer):
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "watchdog")
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        for _ in range(5):
            before = time.clock_gettime(clock)
            time.sleep(seconds)
            found.append((time.clock_gettime(clock) - before) / seconds * 1e6)
    median, quartiles = spread(found, 1)
    return {
        "part": "watchdog thread, in a second",
        "us": median,
        "us_quartiles": quartiles,
        "loops": 5,
        "percent_of_step": median / 1e4,
    }


def saves(trainer: Trainer, every: int, rounds: int) -> Iterator[dict[str, Any]]:
    """A checkpoint every `every` steps, in the middle of a block, compared with none."""
    job = trainer.job
    events: list[Event] = []
    settings = job.config.checkpoint.replace(every_steps=every, every_minutes=None)
    trainer.block(-trainer.now.progress.step % every + every // 2)
    for name, kind in {"background": Saver, "foreground": SynchronousSaver}.items():
        with tempfile.TemporaryDirectory() as folder:

            def part(on: bool, kind: type[Saver] = kind, folder: str = folder) -> Any:
                saver = kind(
                    Path(folder),
                    settings,
                    identity(job.config, trainer.datasets),
                    Log([events.append]),
                )
                return changed(
                    (job.checkpoints, "saver", saver if on and job.communicator.rank == 0 else None)
                )

            row = {
                "part": f"checkpoint every {every} steps, {name}",
                "model": job.config.model.name,
            }
            row |= ratio(trainer, part, rounds, every)
        for which in ("with", "without"):
            row[f"{which}_images_per_s"] = round(
                1e3 * job.config.batch.size / row[f"{which}_ms_per_step"]
            )
        for key, unit in {"pause_s": "pause_ms", "write_s": "write_ms"}.items():
            row[unit], row[f"{unit}_quartiles"] = spread(
                [1e3 * event.fields[key] for event in events] or [0.0, 0.0], 2
            )
        yield row | {
            "checkpoints": len(events),
            "megabytes": events[-1].fields["megabytes"] if events else 0.0,
        }
        events.clear()


def run(
    communicator: Communicator, options: argparse.Namespace, signals: Signals
) -> Iterator[dict[str, Any]]:
    """The row of each part. A collective: every rank takes all rows."""
    trainer = Trainer(["model.name=linear"] if options.quick else [], communicator, signals)
    trainer.block(100)
    found = []
    for name, part in parts(trainer).items():
        if name in options.only:
            rounds, steps = (
                (options.rounds // 4, 100) if name == "digests" else (options.rounds, STEPS)
            )
            found.append({"part": name} | ratio(trainer, part, rounds, steps))
            yield found[-1]
    if options.quick:
        return
    step_ms = statistics.median(row["without_ms_per_step"] for row in found)
    for row in calls(trainer):
        if row["calls_per_step"]:
            row |= {
                "percent_of_step": round(row["us"] * row["calls_per_step"] / step_ms / 10, 5),
                "step_ms": step_ms,
            }
        yield row
    yield watchdog_seconds(trainer)
    if set(options.only) == set(PARTS):
        yield from saves(trainer, 40, options.rounds // 2)
        yield from saves(Trainer(MLP, communicator, signals), 20, options.rounds // 4)


def line(row: dict[str, Any]) -> str:
    """A row of the table: part, cost, (quartiles; number of measurements)."""
    text = f"{' '.join(filter(None, (row.get('model'), row['part']))):50}"
    if "us" in row:
        low, high = row["us_quartiles"]
        text += f"{row['us']:9.2f} us ({low:.2f} to {high:.2f}; {row['loops']})"
        return text + (
            f", {row['percent_of_step']:.4f} % of a step" if "percent_of_step" in row else ""
        )
    low, high = row["ratio_quartiles"]
    text += (
        f"x {row['ratio']:.4f} ({low:.4f} to {high:.4f}; {row['rounds']}) of "
        f"{row['without_ms_per_step']:.2f} ms a step"
    )
    if "megabytes" in row:
        text += (
            f"; {row['megabytes']:.1f} MB, pause {row['pause_ms']:.2f} ms, write "
            f"{row['write_ms']:.1f} ms ({row['checkpoints']})"
        )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", default="mpi", choices=["single", "mpi", "horovod"])
    parser.add_argument(
        "--rounds",
        type=int,
        default=40,
        help="pairs of blocks for a ratio; fewer for longer blocks",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="append the rows to this file as JSON lines"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        metavar="PART",
        help="measure these parts and no checkpoints",
    )
    parser.add_argument("--quick", action="store_true", help="a linear model, and only the ratios")
    options = parser.parse_args()
    place = placement(os.environ)
    communicator, _ = connect(configure(None, [f"comm.engine={options.engine}"]), place)
    machine = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    machine |= {
        "engine": communicator.name,
        "ranks": communicator.size,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    with Signals(place.rank) as signals, contextlib.ExitStack() as stack:
        file = (
            stack.enter_context(options.json.open("a"))
            if options.json and communicator.rank == 0
            else None
        )
        for row in run(communicator, options, signals):
            if communicator.rank == 0:
                print(line(row), flush=True)
            if file:
                print(
                    json.dumps(row | machine | {"load": round(os.getloadavg()[0], 1)}),
                    file=file,
                    flush=True,
                )
    communicator.close()


if __name__ == "__main__":
    main()
