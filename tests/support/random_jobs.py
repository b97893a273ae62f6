"""Random jobs in float64, on one process and on ranks of every engine, stage and mesh. Half of them
resume elsewhere from their middle.

    python tests/support/random_jobs.py --jobs 300 --seed 0          seeds 0 to 299; --engines mpi --sizes 2 --frameworks torch: fewer kinds

Each job must have the losses, rates, evaluations, weights and optimizer state of one process, or be
refused with code 2 and a key. Any other job runs again by the command itself, in new processes, and
is printed with its seed and its commands.
"""  # noqa: E501

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import io
import itertools
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from drawn_job import DrawnJob, Limits, Place, draw
from pool import end_all, on_ranks
from ranks import ROOT, Result, mpirun, mpirun_path, python

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.plugins import check_names
from hvdtrain.config.read import configure
from hvdtrain.config.schema import known_keys
from hvdtrain.data.configured.class_names import with_class_names
from hvdtrain.errors import DONE, USER, UserError
from hvdtrain.recipe.batch import resolve_batch_size
from hvdtrain.training.checkpoint import files
from hvdtrain.training.conflicts import refuse_conflicts
from hvdtrain.training.datasets import open_datasets
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.run_lock import RunLock
from hvdtrain.training.train_job import train_job

# optimizers whose steps are as exact as their gradients
LINEAR = (
    "sgd",
    "lars",
    "larc",
    "novograd",
    "torch.optim.SGD",
)
ROUNDING = 1e-12  # of these
# and similar rules: a gradient that is zero except for rounding, such as of the biases of keys, is
# divided by Adam's eps of 1e-8
OF_ADAM = 1e-10
# whose steps multiply a direction that is nearly absent by 3.4445 ** 5, and with it what it was
# rounded by
OF_MUON = 1e-8
ROOM = 2**22  # bytes of a file of a checkpoint
# of Keras, what the caller's path has as well
PATH = (str(ROOT), str(ROOT / "tests/support"), os.environ.get("PYTHONPATH"))
ENV = {"PYTHONPATH": os.pathsep.join(filter(None, PATH))}
ONE = Place("single", 1, "")
# of events
FIELDS = (
    "loss",
    "lr",
    "batch",
    "train_loss",
    "val_loss",
    "val_accuracy",
    "val_r2",
    "val_perplexity",
)
AT_A_TIME = 60  # jobs whose runs are kept, so that ranks of a kind start once for them


class Verdict(NamedTuple):
    """The outcome: equal, refused or failed. why: the key of a refusal, or what is wrong; apart:
    the largest relative difference."""

    kind: str
    why: str = ""
    apart: float = 0.0


class Part(NamedTuple):
    """A run of a job: on one process, on the ranks of its place, or where it resumes."""

    job: DrawnJob
    place: Place
    run: Path
    from_run: Path | None = None  # the run from whose checkpoint after job.steps it resumes

    @property
    def words(self) -> list[str]:
        return f"{self.job.words} {self.place.words} comm.engine={self.place.engine}".split()

    @property
    def env(self) -> dict[str, str]:
        """With several devices of a rank, on a CPU."""
        has_several = any(word.startswith("speed.devices=") for word in self.words)
        return {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"} if has_several else {}

    def command(self) -> str:
        """For a shell."""
        launcher = f"mpirun -np {self.place.ranks} " * (self.place.ranks > 1)
        command = f"{launcher}hvdtrain {shlex.join([*self.words, f'run={self.run.name}'])}"
        if self.from_run is None:
            return command
        name = files.name_of(self.job.steps)
        to = f"{self.run.name}/checkpoints"
        return f"mkdir -p {to}; cp -r {self.from_run.name}/checkpoints/{name} {to}; {command}"

    def prepare(self) -> None:
        """Creates an empty run folder, or one with the checkpoint from which the job resumes."""
        shutil.rmtree(self.run, ignore_errors=True)
        if self.from_run is not None:
            name = files.name_of(self.job.steps)
            shutil.copytree(self.from_run / "checkpoints" / name, self.run / "checkpoints" / name)


def train(communicator: Communicator, run: str, words: list[str]) -> dict[str, Any]:
    """One job as the command does it, without the watchdog: its exit code, and the text of its
    refusal. Every rank calls it."""
    config = resolve_batch_size(_configured(" ".join(words)).replace(run=run), communicator.size)
    try:
        refuse_conflicts(config, communicator.name, communicator.size)
        check_names(config)
        datasets = open_datasets(config, communicator)
        config = with_class_names(config, datasets.train)
        heartbeat = Heartbeat()
        signals = Signals(communicator.rank)
        with contextlib.redirect_stdout(io.StringIO()), RunLock(heartbeat, signals) as lock:
            return {
                "code": train_job(
                    config, datasets, communicator, "for the test", signals, heartbeat, lock
                ).code,
                "text": "",
            }
    except UserError as error:
        return {"code": error.code, "text": str(error)}


_configured = functools.cache(lambda words: configure(None, words.split()))


def run_part(part: Part, limit_s: float) -> Verdict | None:
    """Runs a part on waiting ranks or by the command. Returns None if it has trained to its end;
    otherwise the refusal or failure."""
    part.prepare()
    place = part.place
    try:
        found = on_ranks(
            place.engine,
            place.ranks,
            "random_jobs:train",
            str(part.run),
            part.words,
            env=part.env,
            limit_s=limit_s,
        )
    except AssertionError as error:
        return _by_command(part, limit_s, str(error))
    code = found[0]["code"]
    text = found[0]["text"]
    return None if code == DONE else judged(code, text) or _by_command(part, limit_s, text)


def judged(code: int, text: str) -> Verdict | None:
    """The refusal that it is, if it is one."""
    key = next(
        (key for key in re.findall(r"\b[a-z]+\.[a-z_]+\b", text) if key in known_keys()), None
    )
    return (
        Verdict("refused", f"{key}: {text.splitlines()[0]}")
        if code == USER and key and "Traceback" not in text
        else None
    )


def _by_command(part: Part, limit_s: float, before: str) -> Verdict | None:
    """Runs the part again in new processes: what it did may have ended the waiting ranks."""
    part.prepare()
    result = by_command(part, limit_s)
    if result.returncode == DONE:
        return Verdict("failed", f"on waiting ranks alone: {before[-3000:]}")
    text = result.stdout + result.stderr
    return judged(result.returncode, text) or Verdict(
        "failed", f"exit code {result.returncode}\n{text[-3000:]}"
    )


def by_command(part: Part, limit_s: float) -> Result:
    argv = ["-m", "hvdtrain", *part.words, f"run={part.run}"]
    ranks = part.place.ranks
    return (
        mpirun(ranks, argv, timeout_s=limit_s, env=ENV | part.env)
        if ranks > 1
        else python(argv, timeout_s=limit_s, env=ENV | part.env)
    )


class Left(NamedTuple):
    """What a run left: numbers of its events by kind and step, and the arrays of its last
    checkpoint."""

    events: dict[tuple[str, int], dict[str, float]]
    arrays: dict[str, np.ndarray]


def left_of(run: Path) -> Left:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    events = {
        (e["kind"], e["step"]): {key: e[key] for key in FIELDS if e.get(key) is not None}
        for e in lines
        if e["kind"] in ("step", "epoch")
    }
    return Left(events, files.read_arrays(files.finished(run)[-1], ROOM))


def compare(one: Left, other: Left, first_step: int, rounding: float) -> Verdict:
    """All numbers of the steps after first_step, and the arrays."""
    events = {key: numbers for key, numbers in one.events.items() if key[1] > first_step}
    found = {key: numbers for key, numbers in other.events.items() if key[1] > first_step}
    if events.keys() != found.keys() or one.arrays.keys() != other.arrays.keys():
        return Verdict(
            "failed",
            f"of one alone: {sorted(events.keys() ^ found.keys())} "
            f"{sorted(one.arrays.keys() ^ other.arrays.keys())}",
        )
    apart = {
        f"{kind} {step} {name}": _apart(number, found[kind, step].get(name, np.nan))
        for (kind, step), numbers in events.items()
        for name, number in numbers.items()
    }
    apart |= {
        name: _apart(_of_ranks(name, array), _of_ranks(name, other.arrays[name]))
        for name, array in one.arrays.items()
    }
    worst = max(apart, key=lambda name: apart[name])
    first = next((name for name, distance in apart.items() if distance >= rounding), None)
    if first is None:
        return Verdict("equal", apart=apart[worst])
    return Verdict(
        "failed",
        f"{first} differs by {apart[first]:.1e}, {worst} by {apart[worst]:.1e}",
        apart[worst],
    )


def _of_ranks(name: str, array: np.ndarray) -> np.ndarray:
    """Returns the sum of residuals (ranks, ...): only that matters, and a resume divides it equally
    (StrategyTensor)."""
    return array.sum(axis=0) if name.endswith("@residual") else array


def _apart(a: Any, b: Any) -> float:
    """Returns the largest difference relative to the largest number; infinite if only one of two
    numbers is finite."""
    a = np.asarray(a, float)
    b = np.asarray(b, float)
    if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return float("inf")
    a = a[np.isfinite(a)]
    b = b[np.isfinite(b)]
    return 0.0 if np.array_equal(a, b) else float(np.abs(a - b).max() / (np.abs(a).max() or 1.0))


def run_jobs(
    seeds: Sequence[int], limits: Limits, folder: Path, limit_s: float
) -> Iterator[tuple[DrawnJob, Verdict, list[Part]]]:
    """The verdict of each job, as soon as it is known. Parts on ranks of one kind run one after the
    other, so that these start once."""
    jobs = [draw(seed, limits) for seed in seeds]
    parts: dict[int, list[Part]] = {}
    for job in jobs:
        runs = [folder / f"{job.seed}-{name}" for name in ("one", "ranks", "next")]
        of_job = [Part(job, ONE, runs[0]), Part(job, job.place, runs[1])]
        parts[job.seed] = of_job + (
            [Part(job, job.next_place, runs[2], runs[1])] if job.next_place else []
        )
    over = set[int]()
    for which in range(3):
        todo = [
            parts[job.seed][which]
            for job in jobs
            if job.seed not in over and len(parts[job.seed]) > which
        ]
        for part in sorted(todo, key=lambda part: part.place[:2]):
            job = part.job
            of_job = parts[part.job.seed]
            instead = run_part(part, limit_s)
            if instead or part is of_job[-1]:
                over.add(job.seed)
                yield job, instead or compared(of_job), of_job
                for run in (part.run for part in of_job):
                    shutil.rmtree(run, ignore_errors=True)


def compared(parts: list[Part]) -> Verdict:
    """Returns the verdict of the part that is furthest from one process."""
    one = left_of(parts[0].run)
    rounding = _rounding_of(parts[0].job)
    verdicts = [
        compare(one, left_of(part.run), part.job.steps if part.from_run else 0, rounding)
        for part in parts[1:]
    ]
    return max(verdicts, key=lambda verdict: (verdict.kind == "failed", verdict.apart))


def _rounding_of(job: DrawnJob) -> float:
    (optimizer,) = re.findall(r"optim\.name=(\S+)", job.words)
    return ROUNDING if optimizer in LINEAR else OF_MUON if optimizer == "muon" else OF_ADAM


def shown(job: DrawnJob, verdict: Verdict, parts: list[Part]) -> str:
    """A line; of a failure the commands as well, and how to repeat it."""
    places = " then ".join(
        f"{place.engine} x {place.ranks} {place.words}".strip()
        for place in (job.place, job.next_place)
        if place
    )
    line = f"{job.seed:5} {verdict.kind:8} {verdict.apart:8.1e}  {places}"
    if verdict.kind == "refused":
        return f"{line}\n      {verdict.why}"
    if verdict.kind == "equal":
        return line
    commands = "\n".join(f"      {part.command()}" for part in parts)
    return (
        f"{line}\n      {verdict.why}\n      in an empty folder, with "
        f"PYTHONPATH={ROOT / 'tests/support'}:\n{commands}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Limits(
        engines=("mpi", "torchdist", "horovod") if _has_horovod() else ("mpi", "torchdist")
    )
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first job; the next ones follow"
    )
    parser.add_argument("--engines", nargs="+", default=default.engines)
    parser.add_argument("--sizes", nargs="+", type=int, default=default.sizes)
    parser.add_argument("--frameworks", nargs="+", default=default.frameworks)
    parser.add_argument(
        "--limit-s", type=float, default=120.0, help="after which a part of a job hangs"
    )
    args = parser.parse_args()
    if mpirun_path() is None:
        parser.error("no mpirun on the path")
    limits = Limits(args.engines, args.sizes, args.frameworks)
    counts = collections.Counter[str]()
    reasons = collections.Counter[str]()
    worst = 0.0
    began = time.monotonic()
    failing: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        seeds = iter(range(args.seed, args.seed + args.jobs))
        while some := list(itertools.islice(seeds, AT_A_TIME)):
            for job, verdict, parts in run_jobs(some, limits, Path(folder), args.limit_s):
                print(shown(job, verdict, parts), flush=True)
                counts[verdict.kind] += 1
                if verdict.kind == "refused":
                    reasons[verdict.why] += 1
                if verdict.kind == "failed":
                    failing.append(job.seed)
                worst = max(worst, verdict.apart if verdict.kind == "equal" else 0.0)
    end_all()
    print(
        f"{args.jobs} jobs in {time.monotonic() - began:.0f} s: {dict(counts)}, equal within "
        f"{worst:.1e}"
    )
    for reason, count in reasons.most_common():
        print(f"{count:5} refused: {reason}")
    print(f"failing seeds: {failing or 'none'}")
    return 1 if failing else 0


def _has_horovod() -> bool:
    import importlib.util

    return importlib.util.find_spec("horovod") is not None


if __name__ == "__main__":
    sys.exit(main())
