"""What guard.lost=shrink costs a step if no rank is lost: jobs under mpirun with and without ULFM
and copies, block by block in turn.

python benchmarks/lost_ranks_cost.py [--ranks 2] [--rounds 24] [--seconds 1] [--out FILE.jsonl] [key=value ...]

Each variant has its own mpirun, whose ranks sleep while another variant trains a block. A block
ends at a sync point and includes the copies made there. A ratio compares a block with a block of
`stop` in the same round; each round begins with another variant. "again" is a second job like
`stop`: the noise. Besides wall time it reports the CPU time of all ranks, which other work on the
machine does not change. The default model has 1.1 million weights: digits in an mlp, adam.
"""  # noqa: E501

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from blocks import Trainer, in_turn, spread

from hvdtrain.comm.launcher_variables import placement
from hvdtrain.config.read import configure
from hvdtrain.extras.elastic.memory_copy import MemoryCopy
from hvdtrain.extras.elastic.survival import ready_for_losses
from hvdtrain.training.build import connect
from hvdtrain.training.health.signals import Signals

ULFM = ["--with-ft", "ulfm"]
WAYS: dict[str, tuple[list[str], str]] = {  # options of mpirun, guard.lost
    "stop": ([], "stop"),
    "again": ([], "stop"),
    "ulfm": (ULFM, "stop"),
    "shrink": (ULFM, "shrink"),
}
DEFAULTS = [
    "comm.engine=mpi",
    "data.name=digits",
    "model.name=mlp",
    "model.widths=[1024,1000]",
    "optim.name=adam",
    "batch.size=128",
]
ANSWER_S = 120.0
FIRST_SYNC_POINTS = 3


class Ends(NamedTuple):
    """The ends of the pipes to the ranks of a job."""

    to: list[IO[str]]
    answers: IO[str]  # of rank 0
    processor_s: list[float]  # of each block

    def block(self, steps: int) -> float:
        """Seconds of so many steps."""
        for pipe in self.to:
            print(steps, file=pipe, flush=True)
        ready, _, _ = select.select([self.answers], [], [], ANSWER_S)
        answer = self.answers.readline() if ready else ""
        if not answer:
            raise SystemExit("a job has ended, or does not answer")
        seconds, processor_s = map(float, answer.split())
        self.processor_s.append(processor_s)
        return seconds


def pipe(path: Path, mode: str) -> IO[str]:
    """Returns a FIFO that is open for both sides, so neither side waits for the other to open
    it."""
    with contextlib.suppress(FileExistsError):
        os.mkfifo(path)
    return os.fdopen(os.open(path, os.O_RDWR), mode)


@contextlib.contextmanager
def job(way: str, ranks: int, folder: Path, overrides: list[str]) -> Iterator[Ends]:
    """Ranks that wait for blocks."""
    options, lost = WAYS[way]
    ends = Ends(
        [pipe(folder / f"{way}-{rank}", "w") for rank in range(ranks)],
        pipe(folder / f"{way}-answers", "r"),
        [],
    )
    command = [
        "mpirun",
        *options,
        "-np",
        str(ranks),
        sys.executable,
        __file__,
        "--rank",
        str(folder / way),
        *overrides,
        f"guard.lost={lost}",
    ]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        yield ends
    finally:
        for to in ends.to:
            print(0, file=to, flush=True)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def be_rank(path: str, overrides: list[str]) -> None:
    """A rank of a job: trains a block of as many steps as a line says, until one says 0."""
    config = configure(None, overrides)
    place = placement(os.environ)
    communicator, _ = connect(config, place)
    asked = pipe(Path(f"{path}-{communicator.rank}"), "r")
    answers = pipe(Path(f"{path}-answers"), "w")
    overrides = [word for word in overrides if not word.startswith("comm.engine=")]
    with Signals(communicator.rank) as signals:
        trainer = Trainer(overrides, communicator, signals)
        if ready_for_losses(config, communicator):
            trainer.job.memory_copy = MemoryCopy(trainer.job.learner, communicator, trainer.now)
        while steps := int(asked.readline()):
            began_s = time.process_time()
            seconds = trainer.block(steps)
            processor_s = sum(communicator.allgather_object(time.process_time() - began_s))
            if communicator.rank == 0:
                print(seconds, processor_s, file=answers, flush=True)
        trainer.prefetcher.close()
    communicator.close()


def measure(options: argparse.Namespace, overrides: list[str]) -> list[dict[str, object]]:
    """A row for each way but the first."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        jobs = {
            way: stack.enter_context(job(way, options.ranks, Path(folder), overrides))
            for way in WAYS
        }
        every = configure(None, overrides).log.every_steps
        first = [jobs[way].block(FIRST_SYNC_POINTS * every) for way in WAYS]  # and the start
        first = [jobs[way].block(FIRST_SYNC_POINTS * every) for way in WAYS]
        steps = max(1, round(options.seconds / min(first) * FIRST_SYNC_POINTS)) * every
        times = in_turn({way: ends.block for way, ends in jobs.items()}, options.rounds, steps)
    processor = {way: ends.processor_s[-options.rounds :] for way, ends in jobs.items()}
    rows: list[dict[str, object]] = []
    for way in list(WAYS)[1:]:
        row: dict[str, object] = {"way": way, "rounds": options.rounds, "steps": steps}
        for name, of in {"": times, "processor_": processor}.items():
            row[f"{name}ratio"], row[f"{name}quartiles"] = spread(
                [a / b for a, b in zip(of[way], of["stop"], strict=True)], 4
            )
            row[f"{name}ms_per_step"], _ = spread([1e3 * seconds / steps for seconds in of[way]], 3)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a block")
    parser.add_argument("--out", help="append the rows to this file")
    parser.add_argument("--rank", help="used by the program itself")
    options, words = parser.parse_known_args()
    if options.rank:
        be_rank(options.rank, words)
        return
    began = os.getloadavg()[0]
    rows = measure(options, [*DEFAULTS, *words])
    about = {
        "ranks": options.ranks,
        "words": words,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_before": round(began, 1),
    }
    about["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    for row in rows:
        of_clock, of_processors = (
            f"{row[f'{of}ratio']} {row[f'{of}quartiles']} {row[f'{of}ms_per_step']} ms"
            for of in ("", "processor_")
        )
        print(
            f"{row['way']:8}to stop, with quartiles, and of a step: {of_clock}; of processors "
            f"{of_processors}"
        )
    if options.out:
        with open(options.out, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(about | row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
