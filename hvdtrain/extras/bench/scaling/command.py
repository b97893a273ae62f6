"""bench scaling: runs jobs on increasing numbers of ranks, measures their steps, and predicts more
ranks."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hvdtrain.cli.output import plural, print_result
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.core.folder import Folder
from hvdtrain.data.configured.unwritten import unstaged
from hvdtrain.errors import DONE, UserError
from hvdtrain.extras.bench.cost_model import (
    Cluster,
    MeasuredStep,
    fit_step,
    link_errors,
    read_links,
    ring_s,
    split_buckets,
    step_errors,
)
from hvdtrain.extras.bench.options import BenchParser, one_or_more, read_rank_counts
from hvdtrain.extras.bench.scaling.figure import draw_scaling
from hvdtrain.extras.bench.scaling.report import (
    SCALING_KINDS,
    ScalingTrial,
    Study,
    curves,
    to_json,
    to_text,
)
from hvdtrain.extras.bench.trainer import quartiles
from hvdtrain.extras.launch.mpirun import (
    LaunchRequest,
    MpiKind,
    available_cores,
    find_launcher,
    mpi_library_version,
    mpirun_command,
)
from hvdtrain.extras.plan.meshes.link import Link, MeasuredAllreduce, fit_link, link_points
from hvdtrain.features.every_feature import configure
from hvdtrain.training.build import planned_task
from hvdtrain.training.datasets import build_source

_SYNC_POINTS = 6  # sync points of a job; the steps before the first are warm-up
_LINK_SIZES = "4KiB,64KiB,1MiB,4MiB,16MiB"
_SET_BY_BENCH = (
    "batch.size",
    "batch.per_rank",
    "run",
    "resume",
    "max_steps",
    "stop.steps",
    "stop.time",
    "epochs",
    "stop.epochs",
    "log.every_steps",
)
_END_S = 10
_MOST_BYTES = 2**30  # limit for files of a job that are read here
_MANY_EPOCHS = 10**6  # stop.steps ends the job


class JobSettings(NamedTuple):
    """The settings that all jobs of the study share."""

    config_path: str | None
    overrides: list[str]  # key=value
    steps: int
    limit_s: float
    threads: (
        # OMP_NUM_THREADS, the same in all jobs; otherwise a single rank would use the cores of all
        str
    )
    launcher: str  # path of mpirun
    launcher_kind: MpiKind

    @property
    def config_arguments(self) -> list[str]:
        return ["--config", self.config_path] if self.config_path else []


class ScalingJob(NamedTuple):
    kind: str  # see ScalingTrial.kind
    ranks: int
    batch: int  # samples of a step


class LinkMeasurement(NamedTuple):
    link: Link
    points: list[MeasuredAllreduce]  # the link is fitted to these points


def bench_scaling(arguments: Sequence[str]) -> int:
    """Runs `bench scaling`; returns the exit code. Raises UserError, also if a job fails."""
    parser = BenchParser("scaling")
    parser.add_argument("--png")
    parser.add_argument("--weak", action="store_true")
    parser.add_argument("--strong", action="store_true")
    parser.add_argument("--ranks", type=read_rank_counts, default="1,2,4")
    parser.add_argument("--links", type=read_links)
    parser.add_argument("--steps", type=one_or_more, default=60)
    parser.add_argument("--repeat", type=one_or_more, default=1)
    parser.add_argument("--per-node", type=one_or_more, default=8)
    parser.add_argument("--limit", type=float, default=300.0)
    options, overrides = parser.parse_known_args(arguments)
    _refuse_launcher()
    config = configure(options.config, overrides)
    plugins.check_names(config)
    if config.comm.local_steps > 1:
        what = "bench scaling models one allreduce of the gradients in each step"
        raise UserError(what, config.where("comm.local_steps"), "comm.local_steps=1")
    gradient_bytes = _gradient_bytes(config)
    launcher, launcher_kind = find_launcher(mpi_library_version([sys.executable]))
    settings = JobSettings(
        config_path=options.config,
        overrides=[word for word in overrides if word.partition("=")[0] not in _SET_BY_BENCH],
        steps=options.steps,
        limit_s=options.limit,
        threads=os.environ.get("OMP_NUM_THREADS")
        or str(max(1, available_cores() // max(options.ranks))),
        launcher=launcher,
        launcher_kind=launcher_kind,
    )
    kinds = [kind for kind in SCALING_KINDS if getattr(options, kind)] or list(SCALING_KINDS)
    jobs = plan_jobs(kinds, options.ranks, config.batch.per_rank or config.batch.size)
    trials = _run_trials(settings, jobs, options.repeat)
    measured_link = _measure_link(settings, options.ranks)
    inside, between = options.links or (measured_link.link, measured_link.link)
    buckets = split_buckets(gradient_bytes, config.comm.bucket_bytes())
    # a job may be of two kinds
    steps = list(
        dict.fromkeys(_measured_step(trial, buckets, measured_link.link) for trial in trials)
    )
    study = Study(
        trials=trials,
        model=fit_step(steps),
        step_errors=step_errors(steps),
        link=measured_link.link,
        link_errors=link_errors(measured_link.points, _link_ranks(options.ranks))
        if len(measured_link.points) > 2
        else [],
        cluster=Cluster(inside, between, options.per_node),
        buckets=buckets,
        cores=available_cores(),
        threads=settings.threads,
    )
    print_result(options.json, to_text(study), to_json(study))
    if options.png:
        print(draw_scaling(Path(options.png), *curves(study, config.model.name)), file=sys.stderr)
    return DONE


def _refuse_launcher() -> None:
    """Raises UserError if a launcher has started this process as one of several ranks."""
    place = placement(os.environ)
    if place.size > 1:
        what = (
            f"this is already rank {place.rank} of {place.size}, and bench scaling starts ranks "
            "itself"
        )
        raise UserError(
            what,
            f"command line of bench scaling, under {place.launcher}",
            "start it without a launcher",
        )


def plan_jobs(kinds: Sequence[str], rank_counts: Sequence[int], batch: int) -> list[ScalingJob]:
    """Returns the jobs to run. A step has `batch` samples on the fewest ranks. For strong scaling,
    a single rank also runs with each rank's share of the batch.

    Raises UserError if a rank would have no sample.
    """
    fewest = min(rank_counts)
    batch_of_a_rank = batch // fewest
    if not batch_of_a_rank:
        raise UserError(
            f"batch {batch} has no sample for each of {fewest} ranks",
            "batch.size",
            f"{fewest} or more, or fewer --ranks",
        )
    jobs = []
    for kind in kinds:
        for ranks in rank_counts:
            if kind == "weak":
                jobs.append(ScalingJob(kind, ranks, batch_of_a_rank * ranks))
            elif ranks <= batch:
                jobs.append(ScalingJob(kind, ranks, batch_of_a_rank * fewest))
    if fewest == 1:
        jobs += [
            ScalingJob("alone", 1, batch // ranks) for ranks in rank_counts if 1 < ranks <= batch
        ]
    return jobs


def _run_trials(
    settings: JobSettings, jobs: Sequence[ScalingJob], repeat: int
) -> list[ScalingTrial]:
    """Runs each job `repeat` times; jobs of two kinds with the same ranks and batch run once."""
    seconds: dict[tuple[int, int], list[float]] = {(job.ranks, job.batch): [] for job in jobs}
    for number in range(
        1, repeat + 1
    ):  # all jobs in turn: a machine that slows down slows all of them down
        for ranks, batch in seconds:
            print(
                f"bench scaling: {plural(ranks, 'rank')}, batch {batch}, {number} of {repeat}",
                file=sys.stderr,
                flush=True,
            )
            seconds[ranks, batch] += _run_job(settings, ranks, batch)
    return [
        ScalingTrial(job.kind, job.ranks, job.batch, seconds[job.ranks, job.batch]) for job in jobs
    ]


def _run_job(settings: JobSettings, ranks: int, batch: int) -> list[float]:
    """Returns the seconds of a step between each two sync points of the job."""
    with tempfile.TemporaryDirectory(prefix="hvdtrain-scaling-") as folder:
        run = Path(folder) / "run"
        own_overrides = [
            f"run={run}",
            "resume=no",
            f"batch.size={batch}",
            f"stop.steps={settings.steps}",
            f"epochs={_MANY_EPOCHS}",
            f"log.every_steps={max(1, settings.steps // _SYNC_POINTS)}",
        ]
        program = [
            "-m",
            "hvdtrain",
            "train",
            *settings.config_arguments,
            *settings.overrides,
            *own_overrides,
        ]
        _run_on_ranks(settings, ranks, program)
        with Folder.open(run) as opened:
            return step_seconds(opened.read("events.jsonl", _MOST_BYTES).decode().splitlines())


def step_seconds(lines: Sequence[str]) -> list[float]:
    """Returns seconds of a step between two sync points, from the lines of a job's events.jsonl;
    steps before the first one are warm-up.

    Raises UserError if the job has no second sync point.
    """
    events = [json.loads(line) for line in lines]
    step_events = [event for event in events if event["kind"] == "step"]
    seconds = [event["batch"] / event["samples_per_s"] for event in step_events[1:]]
    if not seconds:
        what = (
            f"the job has {plural(len(step_events), 'sync point')}, and the steps before the "
            "first one are warm-up"
        )
        raise UserError(what, "bench scaling --steps", "give more steps")
    return seconds


def _run_on_ranks(settings: JobSettings, ranks: int, program: Sequence[str]) -> None:
    """Runs a Python program on ranks until it ends. Raises UserError with its last lines if it
    fails or exceeds the limit."""
    oversubscribe = ranks > available_cores()
    request = LaunchRequest(
        settings.launcher,
        ranks,
        (sys.executable, *program),
        as_root=os.geteuid() == 0,
        oversubscribe=oversubscribe,
    )
    command = mpirun_command(settings.launcher_kind, request)
    environ = {**os.environ, "OMP_NUM_THREADS": settings.threads}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environ,
    ) as job:
        try:
            output, _ = job.communicate(timeout=settings.limit_s)
        except subprocess.TimeoutExpired:
            _end(job)
            what = f"the job on {plural(ranks, 'rank')} did not end within {settings.limit_s:g} s"
            raise UserError(
                what, " ".join(program), "fewer --steps, a smaller job, or a longer --limit"
            ) from None
        except BaseException:
            _end(job)
            raise
    if job.returncode:
        last_lines = "\n".join(output.strip().splitlines()[-20:])
        what = f"the job on {plural(ranks, 'rank')} ended with code {job.returncode}:\n{last_lines}"
        raise UserError(
            what,
            " ".join(program),
            "correct what the lines above report, and start bench scaling again",
        )


def _end(job: subprocess.Popen[str]) -> None:
    """Ends a job: terminates mpirun, which ends its ranks; a killed mpirun would not."""
    job.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(_END_S)
    job.kill()


def _link_ranks(rank_counts: Sequence[int]) -> int:
    """Returns the number of ranks to measure the link with: as many as have a core each, at least
    two."""
    return max([ranks for ranks in rank_counts if 2 <= ranks <= available_cores()], default=2)


def _measure_link(settings: JobSettings, rank_counts: Sequence[int]) -> LinkMeasurement:
    """Returns the link between ranks on this machine, fitted to the engine's allreduce of one
    vector in bench allreduce."""
    if max(rank_counts) == 1:
        return LinkMeasurement(Link("none", 0.0, math.inf), [])
    ranks = _link_ranks(rank_counts)
    print(f"bench scaling: the link between {ranks} ranks", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-scaling-") as folder:
        path = Path(folder) / "allreduce.json"
        options = ["--sizes", _LINK_SIZES, "--budget", "3", "--json", str(path)]
        program = [
            "-m",
            "hvdtrain.extras.bench.command",
            "allreduce",
            *options,
            *settings.config_arguments,
            *settings.overrides,
        ]
        _run_on_ranks(settings, ranks, program)
        with Folder.open(path.parent) as opened:
            points = link_points(json.loads(opened.read(path.name, _MOST_BYTES)))
    return LinkMeasurement(fit_link(points, ranks), points)


def _measured_step(trial: ScalingTrial, bucket_bytes: Sequence[float], link: Link) -> MeasuredStep:
    return MeasuredStep(
        samples=trial.batch / trial.ranks,
        oversubscription=max(1.0, trial.ranks / available_cores()),
        comm_s=sum(ring_s(trial.ranks, size, link) for size in bucket_bytes)
        if trial.ranks > 1
        else 0.0,
        step_s=quartiles(trial.seconds).median,
    )


def _gradient_bytes(config: Config) -> int:
    """Returns bytes of all gradients as they are reduced; the model is not built."""
    source = build_source(unstaged(config), "train")
    task = planned_task(config, source)
    shapes = plugins.load("frameworks", config.framework, config.where("framework")).shapes(
        config, task
    )
    return int(sum(math.prod(shape) for shape in shapes.values()) * _gradient_element_bytes(config))


def _gradient_element_bytes(config: Config) -> int:
    if config.comm.compression != "none":
        return 2
    return 8 if config.speed.precision == "fp64" else 4
