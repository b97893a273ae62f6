"""The cost of watching a job: images/s of whole steps with all sinks and with none, in turn in one
process, and with each part separately.

python benchmarks/watching.py [--rounds 40] [--steps 100] [--json FILE] [--only PART ...] [key=value ...]
mpirun -np 2 python benchmarks/watching.py comm.engine=mpi ...

The default is wide_resnet on digits. "all sinks": the moving display on a terminal of 100 columns, events.jsonl, TensorBoard, MLflow and
offline Weights & Biases, and log.per_rank. A ratio is images/s of a block with the part divided by
images/s of an adjacent block without it; the ratio of "nothing", two equal blocks, is the noise.
"""  # noqa: E501

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import json
import os
import platform
import pty
import struct
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from blocks import Part, Trainer, changed, ratio

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.config.read import configure
from hvdtrain.config.sections.log import LogConfig
from hvdtrain.events.background_sink import BackgroundSink
from hvdtrain.events.log import Event, Log, Sink
from hvdtrain.events.rank_log import rank_log
from hvdtrain.events.terminal import terminal_sink
from hvdtrain.events.writers import JsonLinesWriter
from hvdtrain.extras.trackers.events.trackers import mlflow, tensorboard, wandb
from hvdtrain.frameworks.stopwatch import PHASES
from hvdtrain.training.build import connect
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.train_job import TRACKED_S

PARTS = ("nothing", "stopwatch", "step_times", "events.jsonl", "display", "trackers", "all sinks")


class IdleStopwatch:
    """Measures nothing."""

    def enter(self, phase: str) -> None:
        pass

    def read(self) -> list[dict[str, float]]:
        return [dict.fromkeys(PHASES, 0.0)]


def terminal() -> IO[str]:
    """A terminal of 100 columns, whose output a thread reads."""
    reading_end, writing_end = pty.openpty()
    fcntl.ioctl(writing_end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))

    def read() -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while os.read(reading_end, 65536):
                pass

    threading.Thread(target=read, daemon=True).start()
    return os.fdopen(writing_end, "w")


class Watching:
    """The parts, as contexts in which a block has the part or not."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self.job = trainer.job
        self.folder = folder
        self.is_rank_0 = trainer.job.communicator.rank == 0
        config = trainer.job.config
        self.trackers: list[Sink] = []
        if self.is_rank_0:
            for plugin in (tensorboard, mlflow, wandb):
                tracker = plugin.build(config, folder)  # type: ignore[attr-defined]
                self.trackers.append(
                    BackgroundSink(
                        tracker, f"log.trackers {plugin.__name__}", print, step_interval_s=TRACKED_S
                    )
                )
        self.json = JsonLinesWriter(folder / "events.jsonl")
        self.out = terminal()
        self.start = Event(
            time.time(),
            "start",
            0,
            {"lines": [], "samples": trainer.job.prefetcher.samples, "max_steps": None},
        )
        for sink in (*self.trackers, self.json):
            sink(self.start)

    def part(self, name: str) -> Part:
        parts: dict[str, Part] = {
            "nothing": lambda on: self.logging_to([]),
            "stopwatch": lambda on: changed(
                *(() if on else [(self.job.learner, "stopwatch", IdleStopwatch())])
            ),
            "step_times": self.step_times,
            "events.jsonl": lambda on: self.logging_to([self.json] if on else []),
            "display": lambda on: self.displayed([], on),
            "trackers": lambda on: self.logging_to(self.trackers if on else []),
            "all sinks": self.everything,
        }
        return parts[name]

    @contextlib.contextmanager
    def logging_to(self, sinks: list[Sink]) -> Iterator[None]:
        log = Log(sinks if self.is_rank_0 else [])
        with changed((self.job, "log", log), (self.job.telemetry, "log", log)):
            yield

    @contextlib.contextmanager
    def displayed(self, sinks: list[Sink], on: bool) -> Iterator[None]:
        display = (
            terminal_sink(self.out, LogConfig(display="live")) if on and self.is_rank_0 else None
        )
        if display:
            display(self.start)
        with self.logging_to([*sinks, *([display] if display else [])]):
            yield
        if display:
            display.close(30.0)

    @contextlib.contextmanager
    def step_times(self, on: bool) -> Iterator[None]:
        with changed((self.job.telemetry, "step_times", on)), self.logging_to([self.json]):
            yield

    @contextlib.contextmanager
    def everything(self, on: bool) -> Iterator[None]:
        path = self.folder / f"rank-{self.job.communicator.rank:05d}.log"
        with (
            rank_log(path if on else None),
            self.displayed([self.json, *self.trackers] if on else [], on),
        ):
            yield


def rows(
    communicator: Communicator, options: argparse.Namespace, overrides: list[str], signals: Signals
) -> Iterator[dict[str, Any]]:
    """The row of each part. A collective: every rank takes all rows."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(overrides, communicator, signals)
        watching = Watching(trainer, Path(folder))
        trainer.block(options.steps)
        for name in options.only:
            row = {"part": name} | ratio(
                trainer, watching.part(name), options.rounds, options.steps
            )
            seconds = row.pop("ratio")
            quartiles = row.pop("ratio_quartiles")
            yield row | {
                "images_per_s_ratio": round(1 / seconds, 4),
                "quartiles": [round(1 / x, 4) for x in reversed(quartiles)],
            }
        Log(watching.trackers).close(30.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument(
        "--steps", type=int, default=100, help="steps of a block, a multiple of log.every_steps"
    )
    parser.add_argument("--json", help="append the rows to this file")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options, overrides = parser.parse_known_args()
    os.environ.setdefault("WANDB_MODE", "offline")
    place = placement(os.environ)
    config = configure(None, overrides)
    communicator, _ = connect(config, place)
    overrides = [override for override in overrides if not override.startswith("comm.engine=")]
    about = {
        "ranks": communicator.size,
        "engine": communicator.name,
        "words": overrides,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
    with Signals(communicator.rank) as signals:
        for row in rows(communicator, options, overrides, signals):
            if communicator.rank == 0:
                low, high = row["quartiles"]
                print(
                    f"{row['part']:14} {row['images_per_s_ratio']:.4f} of the images/s (quartiles "
                    f"{low:.4f} to {high:.4f})",
                    flush=True,
                )
                if options.json:
                    stamp = {
                        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
                    }
                    with Path(options.json).open("a", encoding="utf-8") as file:
                        file.write(json.dumps(about | row | stamp) + "\n")
    communicator.close()


if __name__ == "__main__":
    main()
