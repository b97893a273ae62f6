"""hvdtrain check: what would go wrong with a job, found by its ranks under its launcher; nothing is trained.

--json FILE (- or nothing: the standard output instead of the text) writes one object: Report, of report.py, with its exit code (0 or 2).
Its ranks are RankFacts, of rank_facts.py. What is not known is null.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hvdtrain.cli.check.findings import describe_rank, finding_of_error
from hvdtrain.cli.check.inspection import RankInspection, compare_ranks, connected_facts, inspect_job
from hvdtrain.cli.check.rank_facts import local_facts
from hvdtrain.cli.check.report import Report, one_line, to_json, to_text
from hvdtrain.cli.check.shared_resources import find_shortages
from hvdtrain.cli.check.speed import no_speeds
from hvdtrain.cli.check.time_limit import TimeLimit
from hvdtrain.cli.json_output import with_json_value
from hvdtrain.cli.options import CommandParser
from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.placement import LAUNCHERS, SRUN, SUBMITIT, LauncherMismatch, Placement, placement
from hvdtrain.config.plugins import check_names
from hvdtrain.config.read import Assignment, assignments, configure, read_resumed
from hvdtrain.config.schema import Config
from hvdtrain.core.stderr import print_stderr
from hvdtrain.errors import DONE, USER, UserError
from hvdtrain.recipe.batch_size import resolve_batch_size
from hvdtrain.training.failure import end_every_rank

USAGE = """\
mpirun -np 8 ... hvdtrain check [--config FILE] [--json [FILE]] [--limit 180] [key=value ...]
  starts no training; prints a table of the ranks, what would fail on them, and how to fix it; exit code 0, or 2 where a job would fail
  --config FILE, key=value   the configuration of the job that is checked
  --num-nodes 2 --node-id 0 --num-gpus 4 comm.address=n1:29500   without a launcher: on each host, with its --node-id
  --json FILE                write the result as JSON too; --json or --json - prints it instead of the text
  --limit 180                seconds that one phase of the check may take, on any rank"""
PASS_ON_S = 0.5  # a launcher that ends the job at the first exit code above 0 may drop what it has not passed on of the report
OWN_ERROR_WAIT_S = 1.5  # rank 0 prints first: where the launcher ends the job at the first exit, an error of all ranks is printed once
SAME_ERROR_WAIT_S = 5.0  # an error that is the same on all ranks is for rank 0 to print, even where rank 0 is late


class Options(NamedTuple):
    """The command line of check."""

    config_path: str | None
    json_path: str | None  # "-" is standard output
    limit_s: float
    overrides: list[str]  # key=value


def check(arguments: Sequence[str]) -> int:
    """The command behind `check`; returns the exit code, the same on every rank. Raises UserError for an unknown option."""
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
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
        time_limit.start_work("reading the data")
        run_folder = inspect_job(rank, config, communicator)
        report = compare_ranks(rank, config, run_folder, communicator, engine_reason, place, time_limit)
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
    """One process, which may be a script's own, waits for nobody after an error; several ranks may, until the limit."""
    if size == 1:
        time_limit.cancel()


def _resolve_on_all_ranks(options: Options, rank: RankInspection, communicator: Communicator) -> Config | None:
    """The configuration of the job on this number of ranks; None where it is wrong, which is then a finding. A collective.

    The configuration of a run to resume is read by rank 0, which alone may see the run folder.
    """
    read_by_rank_0: list[Assignment] | None = None
    if communicator.rank == 0:
        read_by_rank_0 = rank.attempt(lambda: read_resumed(assignments(options.config_path, options.overrides)))
    resumed: list[Assignment] = communicator.broadcast_object(read_by_rank_0) or []
    return rank.attempt(lambda: resolve_batch_size(configure(options.config_path, options.overrides, resumed), communicator.size))


def _report_unconnected(options: Options, place: Placement, error: Exception) -> int:
    """Without an engine a rank knows only itself: rank 0 prints the whole report, another rank its own error on one line."""
    facts = local_facts(place, os.environ)
    finding = finding_of_error(error, describe_rank(facts))
    if place.rank == 0:
        return _print(options, Report([facts], "none", None, no_speeds(), [finding, *find_shortages([facts])]))
    same_on_all_ranks = isinstance(error, LauncherMismatch)
    time.sleep(SAME_ERROR_WAIT_S if same_on_all_ranks else OWN_ERROR_WAIT_S)
    if not same_on_all_ranks:
        print_stderr(f"hvdtrain check: {one_line(finding)}")
    return USER


def _assumed_placement() -> Placement:
    """Where the launcher's variables contradict each other: one of several ranks, numbered by the first variable that has a number."""
    numbers = (os.environ.get(launcher.rank, "") for launcher in (*LAUNCHERS, SRUN, SUBMITIT))
    rank = next((int(number) for number in numbers if number.isdecimal()), 0)
    return Placement(rank, rank + 2, 0, 1, "not known")


def _print(options: Options, report: Report) -> int:
    """On rank 0. Returns the exit code: the report's, or USER where the file of --json cannot be written."""
    as_json = json.dumps(to_json(report), indent=1)
    print(as_json if options.json_path == "-" else "\n".join(to_text(report)), flush=True)
    if options.json_path is not None and options.json_path != "-":
        try:
            Path(options.json_path).write_text(as_json + "\n", encoding="utf-8")
        except OSError as error:
            print_stderr(f"hvdtrain check: cannot write {options.json_path}: {error.strerror}")
            return USER
    return report.exit_code


def _parse(arguments: Sequence[str]) -> Options:
    """The options of check; everything else belongs to the configuration."""
    parser = CommandParser("check", USAGE.partition("\n")[0])
    parser.add_argument("--config")
    parser.add_argument("--json")
    parser.add_argument("--limit", type=float, default=180.0)
    options, overrides = parser.parse_known_args(with_json_value(arguments))
    return Options(options.config, options.json, options.limit, overrides)
