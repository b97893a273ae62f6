"""hvdtrain check: the ranks look for problems of a job under its launcher, without training.

--json FILE (- or nothing: the standard output instead of the text) writes one object: CheckReport,
from report.py, with its exit code (0 or 2). Its ranks are RankFacts, from rank_facts.py. Unknown
values are null.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from hvdtrain.cli.options import CommandParser
from hvdtrain.cli.output import with_json_value
from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.cores.bind import usable_cores
from hvdtrain.comm.launcher_variables import (
    LAUNCHERS,
    SRUN,
    SUBMITIT,
    LauncherMismatch,
    Placement,
    placement,
)
from hvdtrain.config.plugins import check_names
from hvdtrain.config.read import Assignment, assignments, read_resumed
from hvdtrain.config.schema import Config
from hvdtrain.core.extras import modes
from hvdtrain.core.process import exit_now, print_stderr
from hvdtrain.errors import DONE, USER, Diverged, UserError
from hvdtrain.extras.check import dry_run
from hvdtrain.extras.check.differences import (
    differing_code,
    differing_configuration,
    find_differences,
)
from hvdtrain.extras.check.dry_run import (
    RunFolderFacts,
    measure_speeds,
    no_speeds,
    read_clocks,
    slow_engine,
)
from hvdtrain.extras.check.rank_facts import (
    Finding,
    RankFacts,
    apart_from,
    completed,
    count_by_level,
    describe_rank,
    finding_of_error,
    local_facts,
    most_severe_first,
    network_variables,
)
from hvdtrain.extras.check.report import CheckReport, one_line, to_json, to_text
from hvdtrain.extras.check.shortages import find_shortages, full_mesh
from hvdtrain.features.every_feature import configure
from hvdtrain.recipe.batch import resolve_batch_size
from hvdtrain.training.failure import end_every_rank
from hvdtrain.training.replicas.same_job import by_key
from hvdtrain.training.replicas.software import code_digests, digest
from hvdtrain.training.replicas.user_code import module_digests, named_modules

USAGE = """\
mpirun -np 8 ... hvdtrain check [--config FILE] [--json [FILE]] [--limit 180] [key=value ...]
  starts no training; prints a table of the ranks, what would fail on them, and how to fix it; exit code 0, or 2 where a job would fail
  --config FILE, key=value   the configuration of the job that is checked
{modes}  --json FILE                write the result as JSON too; --json or --json - prints it instead of the text
  --limit 180                seconds that one phase of the check may take, on any rank"""  # noqa: E501
# a launcher that ends the job at the first nonzero exit code may drop a part of the report that it
# has not forwarded
PASS_ON_S = 0.5
# rank 0 prints first, so that an error of all ranks is printed once if the launcher ends the job at
# the first exit
OWN_ERROR_WAIT_S = 1.5
SAME_ERROR_WAIT_S = (
    5.0  # rank 0 prints an error that is the same on all ranks, even if rank 0 is late
)


class CheckOptions(NamedTuple):
    """The command line of check."""

    config_path: str | None
    json_path: str | None  # "-" is standard output
    limit_s: float
    overrides: list[str]  # key=value


def check(arguments: Sequence[str]) -> int:
    """Runs `check`; returns the exit code, the same on every rank. Raises UserError for an unknown
    option."""
    if {"-h", "--help"} & set(arguments):
        lines = [line for mode in modes("train").values() for line in mode.usage.splitlines()[1:]]
        print(USAGE.format(modes="".join(f"{line}\n" for line in lines)))
        return DONE
    options = _parse(arguments)
    try:
        place = placement(os.environ)
    except UserError as error:
        return _report_unconnected(options, _assumed_placement(), error)
    time_limit = TimeLimit(place.rank, options.limit_s)
    try:
        config = configure(options.config_path, options.overrides, None if place.rank == 0 else ())
        check_names(config)
        time_limit.start_waiting("to connect")
        from hvdtrain.training.build import connect

        communicator, engine_reason = connect(config, place)
    except Exception as error:
        _let_go(time_limit, place.size)
        return _report_unconnected(options, place, error)
    try:
        rank = RankInspection(connected_facts(place, communicator))
        config = _resolve_on_all_ranks(options, rank, communicator) or config
        from hvdtrain.training.run_rank import bound_cores

        with bound_cores(config, communicator) as cores:
            rank.facts["cores"] = list(usable_cores())
            time_limit.start_work("reading the data")
            run_folder = inspect_job(rank, config, communicator)
            report = replace(
                compare_ranks(
                    rank, config, run_folder, communicator, engine_reason, place, time_limit
                ),
                cores=cores,
            )
        exit_code = _print(options, report) if communicator.rank == 0 else report.exit_code
        if exit_code and communicator.rank == 0 and communicator.size > 1:
            time.sleep(PASS_ON_S)
        exit_code = int(communicator.broadcast_object(exit_code))
        time_limit.cancel()
        communicator.close()
        return exit_code
    except BaseException as error:  # SystemExit too
        _let_go(time_limit, communicator.size)
        return end_every_rank(error, communicator, "check")


def _let_go(time_limit: TimeLimit, size: int) -> None:
    """Ends after an error: one process, which may be a script, does not wait; several ranks may
    wait until the limit."""
    if size == 1:
        time_limit.cancel()


def _resolve_on_all_ranks(
    options: CheckOptions, rank: RankInspection, communicator: Communicator
) -> Config | None:
    """Returns the configuration of the job on this number of ranks; None if it is wrong, which is
    then a finding. A collective.

    The configuration of a run to resume is read by rank 0, which alone may see the run folder.
    """
    read_by_rank_0: list[Assignment] | None = None
    if communicator.rank == 0:
        read_by_rank_0 = rank.attempt(
            lambda: read_resumed(assignments(options.config_path, options.overrides))
        )
    resumed: list[Assignment] = communicator.broadcast_object(read_by_rank_0) or []
    return rank.attempt(
        lambda: resolve_batch_size(
            configure(options.config_path, options.overrides, resumed), communicator.size
        )
    )


def _report_unconnected(options: CheckOptions, place: Placement, error: Exception) -> int:
    """Reports without an engine, when a rank knows only itself: rank 0 prints the whole report, any
    other rank only its error on one line."""
    facts = local_facts(place, os.environ)
    finding = finding_of_error(error, describe_rank(facts))
    if place.rank == 0:
        return _print(
            options,
            CheckReport([facts], "none", None, no_speeds(), [finding, *find_shortages([facts])]),
        )
    same_on_all_ranks = isinstance(error, LauncherMismatch)
    time.sleep(SAME_ERROR_WAIT_S if same_on_all_ranks else OWN_ERROR_WAIT_S)
    if not same_on_all_ranks:
        print_stderr(f"hvdtrain check: {one_line(finding)}")
    return USER


def _assumed_placement() -> Placement:
    """Returns a placement if the launcher's variables contradict each other: one of several ranks,
    numbered by the first variable that has a number."""
    numbers = (os.environ.get(launcher.rank, "") for launcher in (*LAUNCHERS, SRUN, SUBMITIT))
    rank = next((int(number) for number in numbers if number.isdecimal()), 0)
    return Placement(rank, rank + 2, 0, 1, "not known")


def _print(options: CheckOptions, report: CheckReport) -> int:
    """Prints the report on rank 0. Returns its exit code, or USER if the file of --json cannot be
    written."""
    as_json = json.dumps(to_json(report), indent=1)
    print(as_json if options.json_path == "-" else "\n".join(to_text(report)), flush=True)
    if options.json_path is not None and options.json_path != "-":
        try:
            Path(options.json_path).write_text(as_json + "\n", encoding="utf-8")
        except OSError as error:
            print_stderr(f"hvdtrain check: cannot write {options.json_path}: {error.strerror}")
            return USER
    return report.exit_code


def _parse(arguments: Sequence[str]) -> CheckOptions:
    """Parses the options of check; everything else belongs to the configuration."""
    parser = CommandParser("check", USAGE.partition("\n")[0])
    parser.add_argument("--config")
    parser.add_argument("--json")
    parser.add_argument("--limit", type=float, default=180.0)
    options, overrides = parser.parse_known_args(with_json_value(arguments))
    return CheckOptions(options.config, options.json, options.limit, overrides)


# time for messages of other ranks, because some launchers end the job at the first exit
_GRACE_S = 1.5
_NETWORK_FIX = (
    "look for the message of another rank; a host without this job, a firewall, or a network "
    "interface that other hosts cannot reach "
    "(--mca btl_tcp_if_include eth0, HOROVOD_GLOO_IFACE, NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"
)


class TimeLimit:
    """Limits the time of each phase of a check; the next phase ends the one before it."""

    def __init__(self, rank: int, limit_s: float) -> None:
        self._rank = rank
        self._limit_s = limit_s
        self._phase_over = threading.Event()

    def start_waiting(self, purpose: str) -> None:
        """Starts a phase in which this rank waits for others, as in `purpose="to connect"`. Rank 0
        reports for all ranks that wait."""
        message = f"rank {self._rank} waited {self._limit_s:g} s for other ranks {purpose}"
        self._start_phase(message if self._rank == 0 else None, _NETWORK_FIX)

    def start_work(self, activity: str) -> None:
        """Starts a phase in which this rank works alone, as in `activity="reading the data"`. If it
        does not end, the others wait for this rank."""
        message = f"rank {self._rank} is still {activity} after {self._limit_s:g} s"
        self._start_phase(message, "look at this host, or give a longer --limit SECONDS")

    def cancel(self) -> None:
        """Ends the last phase."""
        self._phase_over.set()

    def _start_phase(self, message: str | None, fix: str) -> None:
        self._phase_over.set()
        self._phase_over = threading.Event()
        threading.Thread(
            target=self._end_late_phase, args=(self._phase_over, message, fix), daemon=True
        ).start()

    def _end_late_phase(self, phase_over: threading.Event, message: str | None, fix: str) -> None:
        if phase_over.wait(self._limit_s):
            return
        if message is not None:
            report = (
                f"hvdtrain check: error: {message}\n  where: {socket.gethostname()}\n  fix: {fix}"
            )
            print_stderr(report)
        if not phase_over.wait(_GRACE_S):
            exit_now(USER)


T = TypeVar("T")


@dataclass
class RankInspection:
    """The facts and findings of one rank about itself."""

    facts: RankFacts
    findings: list[Finding] = field(default_factory=list)

    def attempt(self, action: Callable[[], T]) -> T | None:
        """Returns the action's result; if it raises, the error becomes a finding and the result is
        None.

        The action must not call a collective: if it raised on one rank only, the other ranks would
        wait.
        """
        try:
            return action()
        except Exception as error:
            self.findings.append(finding_of_error(error, describe_rank(self.facts)))
            return None


def connected_facts(place: Placement, communicator: Communicator) -> RankFacts:
    """Returns the facts of a rank, numbered as the engine numbers it."""
    facts = local_facts(place, os.environ)
    facts["rank"] = communicator.rank
    facts["size"] = communicator.size
    facts["local_rank"] = communicator.local_rank
    facts["local_size"] = communicator.local_size
    facts["engine"] = communicator.name
    facts["network_variables"] = network_variables(os.environ)  # the engine may have set one
    return facts


def inspect_job(
    rank: RankInspection, config: Config, communicator: Communicator
) -> RunFolderFacts | None:
    """Tries this rank's part of the job. Returns the run folder on rank 0, None on the others.
    Calls no collective."""
    from hvdtrain.training.conflicts import refuse_conflicts

    if communicator.rank == 0:
        rank.attempt(lambda: refuse_conflicts(config, communicator.name, communicator.size))
    rank.facts["config"] = digest(_texts_by_key(config))
    rank.facts["modules"] = module_digests(named_modules(config))
    rank.facts["libraries"] = dry_run.load_libraries(communicator)
    rank.facts["data"] = rank.attempt(lambda: dry_run.read_data(config))
    rank.facts["device"] = rank.attempt(lambda: dry_run.pick_device(config, communicator))
    rank.facts["gpu_cores"] = rank.attempt(lambda: dry_run.gpu_cores(config, communicator)) or []
    if communicator.local_rank == 0:
        rank.findings += rank.attempt(lambda: dry_run.try_cache_folder(rank.facts["host"])) or []
    if communicator.rank != 0:
        return None
    run_folder = rank.attempt(lambda: dry_run.try_run_folder(config))
    if run_folder is None:
        return None
    rank.findings += run_folder.findings
    return run_folder.facts


def compare_ranks(
    rank: RankInspection,
    config: Config,
    run_folder: RunFolderFacts | None,
    communicator: Communicator,
    engine_reason: str,
    place: Placement,
    time_limit: TimeLimit,
) -> CheckReport:
    """Gathers the facts and findings of all ranks and compares them. Every rank calls it and gets
    the whole report."""
    time_limit.start_waiting("to compare")
    speeds = measure_speeds(communicator, rank.facts, place)
    rank.facts["clock_s"] = read_clocks(communicator)[communicator.rank]
    first = communicator.broadcast_object(rank.facts)
    gathered = communicator.allgather_object(
        (apart_from(first, rank.facts), [tuple(finding) for finding in rank.findings])
    )
    ranks = [completed(first, sent) for sent, _ in gathered]
    findings = [Finding(*finding) for _, rank_findings in gathered for finding in rank_findings]
    findings += _compare_code_and_configuration(communicator, config, ranks)
    findings += [
        *find_differences(ranks),
        *find_shortages(ranks),
        *slow_engine(communicator.name, speeds),
    ]
    findings += full_mesh(communicator.name, communicator.size)
    if communicator.size > 1 and not count_by_level(findings)["error"]:
        time_limit.start_work("comparing the outputs of the model")
        findings += _compare_outputs(communicator, config, ranks)
    return CheckReport(
        ranks,
        f"{communicator.name}: {engine_reason}",
        run_folder,
        speeds,
        most_severe_first(findings),
    )


def _compare_code_and_configuration(
    communicator: Communicator, config: Config, ranks: Sequence[RankFacts]
) -> list[Finding]:
    """Compares file by file and key by key, but only if the digests differ. Every rank calls it,
    with the same `ranks`."""
    findings: list[Finding] = []
    if len({facts["code"] for facts in ranks}) > 1:
        digests = [facts["code"] for facts in ranks]
        findings += differing_code(ranks, _of_each_kind(communicator, digests, code_digests()))
    if len({facts["config"] for facts in ranks}) > 1:
        digests = [facts["config"] for facts in ranks]
        findings += differing_configuration(
            ranks, _of_each_kind(communicator, digests, _texts_by_key(config))
        )
    return findings


def _of_each_kind(
    communicator: Communicator, digests: Sequence[str], own: dict[str, str]
) -> list[dict[str, str]]:
    """Gathers what each rank has; only the first rank with each digest sends it, because 27 kB of
    code from each rank are 221 MB for 8,192."""
    firsts = {digest: rank for rank, digest in reversed(list(enumerate(digests)))}
    sent = communicator.allgather_object(
        own if firsts[digests[communicator.rank]] == communicator.rank else None
    )
    return [sent[firsts[digest]] for digest in digests]


def _compare_outputs(
    communicator: Communicator, config: Config, ranks: Sequence[RankFacts]
) -> list[Finding]:
    """Runs the model of each rank, with the same weights, on one fixed batch: the same findings on
    all ranks. Every rank calls it."""
    from hvdtrain.frameworks.learner import Learner
    from hvdtrain.training.build import build_learner, restore_task
    from hvdtrain.training.data_facts import facts_of_task
    from hvdtrain.training.replicas.broadcast import broadcast_state
    from hvdtrain.training.replicas.probe import Probe

    facts = ranks[communicator.rank]
    data = facts["data"]
    assert data is not None, "an error was found before"
    task = restore_task(config, facts_of_task(data))
    learner: Learner | None = None
    failure: Finding | None = None
    try:
        learner = build_learner(config, task, communicator)
    except Exception as error:
        failure = finding_of_error(error, describe_rank(facts))
    failures = [
        Finding(*found)
        for found in communicator.allgather_object(failure and tuple(failure))
        if found
    ]
    if failures or learner is None:
        return failures
    broadcast_state(communicator, learner, None)
    try:
        Probe(config, task).compare(
            communicator, learner, [rank["host"] for rank in ranks], "before the first step"
        )
    except Diverged as error:
        return [Finding("error", error.what, error.where, error.fix)]
    return []


def _texts_by_key(config: Config) -> dict[str, str]:
    return {name: str(value) for name, value in by_key(config).items()}
