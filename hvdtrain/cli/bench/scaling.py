"""bench scaling: real jobs on more and more ranks, what each step took, and from that a prediction for ranks that are not here."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.cli.bench import scaling_table, tables
from hvdtrain.cli.bench.on_ranks import Parser
from hvdtrain.cli.bench.predict import Fleet, Link, Measured, cut, fit_link, fit_step, link_errors, read_links, ring_s, step_errors
from hvdtrain.cli.bench.scaling_table import Study, Trial
from hvdtrain.cli.bench.tables import quartiles
from hvdtrain.cli.launch.launcher_commands import Kind, Start, mpi_words
from hvdtrain.cli.launch.machine import cores, launcher_of, library_of
from hvdtrain.comm.placement import placement
from hvdtrain.config import plugins
from hvdtrain.config.read import Provenance, configure
from hvdtrain.config.schema import Config
from hvdtrain.errors import DONE, UserError
from hvdtrain.frameworks.learner import Task
from hvdtrain.report.figures import scaling_curve
from hvdtrain.train.build import build_source, unstaged

_MEETINGS = 6  # of a job: the first is warm-up
_LINK_SIZES = "4KiB,64KiB,1MiB,4MiB,16MiB"
_OURS = ("batch.size", "batch.per_rank", "run", "resume", "max_steps", "epochs", "log.every_steps")  # of the job's words
_END_S = 10
_ENDLESS = 10**6  # epochs: max_steps ends the job


class Jobs(NamedTuple):
    """What all jobs of the study have in common."""

    config: str | None
    words: list[str]
    steps: int
    limit_s: float
    threads: str  # OMP_NUM_THREADS: the same in all jobs, or one rank alone would have the cores of all
    launcher: tuple[str, Kind]


def bench_scaling(words: Sequence[str]) -> int:
    """The command behind `bench scaling`; returns the exit code."""
    asked, rest = _parse(words)
    if (here := placement(os.environ)).size > 1:
        what = f"this is already rank {here.rank} of {here.size}, and bench scaling starts ranks itself"
        raise UserError(what, f"command line of bench scaling, under {here.launcher}", "outside of it")
    config, provenance = configure(asked.config, rest)
    plugins.check_names(config, provenance)
    if config.comm.local_steps > 1:
        raise UserError("the fit knows one allreduce of the gradients a step", provenance.where("comm.local_steps"), "comm.local_steps=1")
    gradient_bytes = _gradient_bytes(config, provenance)
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores() // max(asked.ranks)))
    ours = [word for word in rest if word.partition("=")[0] not in _OURS]
    jobs = Jobs(asked.config, ours, asked.steps, asked.limit, threads, launcher_of(library_of([sys.executable])))
    kinds = [kind for kind in ("weak", "strong") if getattr(asked, kind)] or ["weak", "strong"]
    trials = _trials(jobs, wanted(kinds, asked.ranks, config.batch.per_rank or config.batch.size), asked.repeat)
    link, link_points = _link(jobs, asked.ranks)
    inside, between = asked.links or (link, link)
    buckets = cut(gradient_bytes, config.comm.bucket_mb * 2**20)
    points = list(dict.fromkeys(_measured(trial, buckets, link) for trial in trials))  # one job may be of two kinds
    study = Study(
        trials=trials,
        points=points,
        model=fit_step(points),
        step_errors=step_errors(points),
        link=link,
        link_errors=link_errors(link_points, _pair(asked.ranks)) if len(link_points) > 2 else [],
        fleet=Fleet(inside, between, asked.per_node),
        buckets=buckets,
        cores=cores(),
        threads=threads,
    )
    tables.tell(asked.json, scaling_table.text(study), scaling_table.tree(study))
    if asked.png:
        print(scaling_curve.draw(Path(asked.png), *scaling_table.curves(study, config.model.name)), file=sys.stderr)
    return DONE


def wanted(kinds: Sequence[str], ranks: Sequence[int], batch: int) -> list[tuple[str, int, int]]:
    """(kind, ranks, samples of a step): `batch` on the fewest ranks; and one rank alone with each share of a strong step."""
    fewest = min(ranks)
    each = batch // fewest
    if not each:
        raise UserError(f"batch {batch} has no sample for each of {fewest} ranks", "batch.size", f"{fewest} or more, or fewer --ranks")
    jobs = [(kind, n, each * (n if kind == "weak" else fewest)) for kind in kinds for n in ranks if kind == "weak" or n <= batch]
    return jobs + [("alone", 1, batch // n) for n in ranks if batch >= n > 1] * (fewest == 1)


def _trials(jobs: Jobs, asked: Sequence[tuple[str, int, int]], repeat: int) -> list[Trial]:
    """A job that is of two kinds is done once."""
    known: dict[tuple[int, int], list[float]] = {(ranks, total): [] for _, ranks, total in asked}
    for turn in range(repeat):  # all jobs in turn: a machine that slows down slows all of them down
        for ranks, total in known:
            words = f"{ranks} rank{'s' * (ranks > 1)}, batch {total}, {turn + 1} of {repeat}"
            print(f"bench scaling: {words}", file=sys.stderr, flush=True)
            known[ranks, total] += _train(jobs, ranks, total)
    return [Trial(kind, ranks, total, known[ranks, total]) for kind, ranks, total in asked]


def _train(jobs: Jobs, ranks: int, batch: int) -> list[float]:
    """Seconds of a step, as each meeting but the first tells them."""
    every = max(1, jobs.steps // _MEETINGS)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-scaling-") as folder:
        run = Path(folder) / "run"
        words = ["train", *(["--config", jobs.config] if jobs.config else []), *jobs.words, f"run={run}", "resume=no"]
        words += [f"batch.size={batch}", f"max_steps={jobs.steps}", f"epochs={_ENDLESS}", f"log.every_steps={every}"]
        _start(ranks, ["-m", "hvdtrain", *words], jobs)
        return step_seconds((run / "events.jsonl").read_text(encoding="utf-8").splitlines())


def step_seconds(lines: Sequence[str]) -> list[float]:
    """Seconds of a step between two meetings, from a job's events; the first meeting is of warm-up."""
    events = [event for line in lines if (event := json.loads(line))["kind"] == "step"]
    seconds = [event["batch"] / event["images_per_s"] for event in events[1:]]
    if not seconds:
        raise UserError(f"{len(events)} meeting of the job's ranks, and the first is warm-up", "bench scaling --steps", "more steps")
    return seconds


def _start(ranks: int, program: Sequence[str], jobs: Jobs) -> None:
    """Runs a Python program on ranks, to its end; what it said is told only where it fails."""
    path, kind = jobs.launcher
    start = Start(path, ranks, (sys.executable, *program), root=os.geteuid() == 0, oversubscribe=ranks > cores())
    command, environ = mpi_words(kind, start), {**os.environ, "OMP_NUM_THREADS": jobs.threads}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environ) as job:
        try:
            told, _ = job.communicate(timeout=jobs.limit_s)
        except subprocess.TimeoutExpired:
            _end(job)
            what = f"the job on {ranks} rank{'s' * (ranks > 1)} did not end within {jobs.limit_s:g} s"
            raise UserError(what, " ".join(program), "fewer --steps, a smaller job, or a longer --limit") from None
        except BaseException:
            _end(job)
            raise
    if job.returncode:
        last = "\n".join(told.strip().splitlines()[-20:])
        raise UserError(
            f"the job on {ranks} rank{'s' * (ranks > 1)} ended with code {job.returncode}:\n{last}",
            " ".join(program),
            "mend it, and start anew",
        )


def _end(job: subprocess.Popen[str]) -> None:
    """mpirun ends its ranks when it is told to stop, and leaves them alone when it is killed."""
    job.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(_END_S)
    job.kill()


def _pair(ranks: Sequence[int]) -> int:
    """Ranks that the link is measured with: the most that have a core each, at least two."""
    return max([n for n in ranks if 2 <= n <= cores()], default=2)


def _link(jobs: Jobs, ranks: Sequence[int]) -> tuple[Link, list[tuple[float, float]]]:
    """What bench allreduce finds for the engine's own allreduce: the link, and the (bytes, seconds) that it is fitted to."""
    if max(ranks) == 1:
        return Link("none", 0.0, math.inf), []
    print(f"bench scaling: the link between {_pair(ranks)} ranks", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-scaling-") as folder:
        told = Path(folder) / "allreduce.json"
        words = ["--sizes", _LINK_SIZES, "--budget", "3", "--json", str(told)]
        words += ["--config", jobs.config] if jobs.config else []
        _start(_pair(ranks), ["-m", "hvdtrain.cli.bench.command", "allreduce", *words, *jobs.words], jobs)
        points = link_points(json.loads(told.read_text(encoding="utf-8")))
    return fit_link(points, _pair(ranks)), points


def link_points(tree: Mapping[str, Any]) -> list[tuple[float, float]]:
    """(bytes, median seconds) of the engine's allreduce of one vector."""
    return [(row["bytes"], row["quartiles_s"][1]) for row in tree["rows"] if row["way"] == "allreduce"]


def _measured(trial: Trial, buckets: Sequence[float], link: Link) -> Measured:
    comm = sum(ring_s(trial.ranks, size, link) for size in buckets) if trial.ranks > 1 else 0.0
    return Measured(trial.batch / trial.ranks, max(1.0, trial.ranks / cores()), comm, quartiles(trial.seconds)[1])


def _gradient_bytes(config: Config, provenance: Provenance) -> int:
    """Of all parameters; the model is not built."""
    source = build_source(unstaged(config), provenance, "train")
    channels = np.zeros(source.shape[2])
    shapes = plugins.load("frameworks", config.framework, provenance.where("framework")).shapes(
        config, provenance, Task(source.shape, source.classes, channels, channels + 1)
    )
    return int(sum(math.prod(shape) for shape in shapes.values()) * _width(config))


def _width(config: Config) -> int:
    """Bytes of a number of the gradient on its way."""
    return 2 if config.comm.compression != "none" else 8 if config.speed.precision == "fp64" else 4


def _parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser("scaling")
    parser.add_argument("--png")
    for option in ("--weak", "--strong"):
        parser.add_argument(option, action="store_true")
    parser.add_argument("--ranks", type=read_ranks, default="1,2,4")
    parser.add_argument("--links", type=read_links)
    for option, count in {"--steps": 60, "--repeat": 1, "--per-node": 8}.items():
        parser.add_argument(option, type=_count, default=count)
    parser.add_argument("--limit", type=float, default=300.0)
    return parser.parse_known_args(words)


def read_ranks(text: str) -> list[int]:
    """ "4,1,2" -> [1, 2, 4]"""
    if not re.fullmatch("[1-9][0-9]{0,4}(,[1-9][0-9]{0,4})*", text):
        raise UserError(f"cannot read the numbers of ranks {text!r}", "--ranks", "give them as in --ranks 1,2,4")
    return sorted({int(part) for part in text.split(",")})


def _count(text: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise UserError(f"{text!r} is no count", "--steps, --repeat, --per-node", "1 or more")
    return int(text)
