"""python -m hvdtrain check: under the launcher of the job, what would go wrong with it, and what to do; nothing is trained.

--json FILE (or - for the standard output, instead of the text) has, from rank 0: exit_code (0 or 2); engine (and why); findings, each
{level: error|warning|note, what, where, fix}; speed {engine, mpi}, each null or {latency_s, seconds, bytes_per_s} of an allreduce of 8
bytes and of 16 MiB; run {folder, bytes_free, locks} or null; ranks, a list of {rank, size, local_rank, local_size, launcher,
launcher_mpi, host, machine (boot id), container, pid, versions, code (digest), config (digest), cores, host_cores, omp_num_threads,
shared_memory_bytes [in all, free], locked_memory_bytes, open_files (-1: no limit), infiniband, engine, device {name, model, id, bytes,
visible}, libraries {mpi4py, horovod, nccl}, data {name: value}, clock_s}. What is not known is null.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from hvdtrain.cli.check import compare, job_needs, shared_resources, speed
from hvdtrain.cli.check.findings import Finding, of_error, probe, who
from hvdtrain.cli.check.rank_facts import code_digests, digest, facts_of
from hvdtrain.cli.check.table import Report, short, text, tree
from hvdtrain.cli.check.time_limit import Patience
from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.placement import LAUNCHERS, SRUN, LauncherMismatch, Placement, placement
from hvdtrain.config.plugins import check_names
from hvdtrain.config.read import Assignment, Provenance, assignments, configure, read_former
from hvdtrain.config.schema import Config
from hvdtrain.errors import DONE, USER, UserError, code_of
from hvdtrain.recipe.compose import for_ranks

ECHO_S = 1.5  # a rank that fails as rank 0 does lets rank 0 tell it: where the launcher ends the job at the first exit, it is the only one
SAME_S = 5.0  # what is the same on all ranks is for rank 0 to tell, however late it comes to it
END_S = 10  # an abort that hangs ends by SIGALRM
_UNKNOWN: dict[str, Any] = {"config": "", "engine": "", "device": None, "data": None, "clock_s": None}


class Command(NamedTuple):
    """What was typed."""

    config: str | None
    json: str | None
    limit_s: float
    words: list[str]


def check(words: Sequence[str]) -> int:
    """The command behind `check`; returns the exit code, the same on every rank."""
    command = _parse(words)
    try:
        place = placement(os.environ)
    except UserError as error:
        return _alone(command, Placement(rank := _likely_rank(), rank + 2, 0, 1, "not known"), error)
    patience = Patience(place.rank, command.limit_s)
    try:
        given = configure(command.config, command.words, None if place.rank == 0 else ())
        check_names(*given)
        patience.meet("to connect")
        from hvdtrain.train.build import connect

        communicator, why = connect(*given, place)
    except Exception as error:
        return _alone(command, place, error)
    try:
        code = _together(command, given, (communicator, why, place), patience)
        patience.over()
        communicator.close()
        return code
    except BaseException as error:  # a rank that leaves alone would let the others wait
        print(f"{traceback.format_exc().rstrip()}\nrank {communicator.rank}: the error above ends the check", file=sys.stderr, flush=True)
        signal.alarm(END_S)
        communicator.abort(code_of(error))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message, "command line of check", "python -m hvdtrain check [--json FILE|-] [--limit 180] [key=value ...]")


def _parse(words: Sequence[str]) -> Command:
    """The options of check, and all other words, which are the configuration's."""
    parser = _Parser(prog="python -m hvdtrain check", add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--json")
    parser.add_argument("--limit", type=float, default=180.0)
    asked, rest = parser.parse_known_args(words)
    return Command(asked.config, asked.json, asked.limit, rest)


def _likely_rank() -> int:
    """Of variables that contradict each other."""
    return next((int(os.environ[row.rank]) for row in (*LAUNCHERS, SRUN) if os.environ.get(row.rank, "").isdecimal()), 0)


def _alone(command: Command, place: Placement, error: Exception) -> int:
    """Without an engine a rank knows itself only: rank 0 tells all of it, the others what is their own."""
    facts = facts_of(place, os.environ) | _UNKNOWN | {"libraries": {"mpi4py": None, "horovod": None, "nccl": None}}
    finding = of_error(error, who(facts))
    if place.rank == 0:
        report = Report([facts], "none", None, {"engine": None, "mpi": None}, [finding, *shared_resources.shares([facts])])
        _tell(command, report, USER)
    else:
        time.sleep(SAME_S if isinstance(error, LauncherMismatch) else ECHO_S)
        if not isinstance(error, LauncherMismatch):
            print(f"hvdtrain check: {short(finding)}", file=sys.stderr, flush=True)
    return USER


def _together(command: Command, given: tuple[Config, Provenance], met: tuple[Communicator, str, Placement], patience: Patience) -> int:
    """Every rank looks at itself, and all meet after that."""
    communicator, why, place = met
    mine: list[Finding] = []
    facts = facts_of(place, os.environ) | _UNKNOWN | {"rank": communicator.rank, "size": communicator.size, "engine": communicator.name}
    facts |= {"local_rank": communicator.local_rank, "local_size": communicator.local_size}
    former = communicator.allgather_object(probe(mine, who(facts), lambda: _former(command)) if communicator.rank == 0 else None)[0]
    resolved = probe(mine, who(facts), lambda: for_ranks(*configure(command.config, command.words, former or ()), communicator.size))
    config, provenance = resolved or given
    patience.work("reads the data")
    run = _look(config, provenance, communicator, (facts, mine))
    patience.meet("to compare")
    speeds = _measure(communicator, facts, place)
    facts["clock_s"] = speed.clocks(communicator)[communicator.rank]
    everyone = communicator.allgather_object((facts, [tuple(finding) for finding in mine]))
    ranks = [theirs for theirs, _ in everyone]
    found = [Finding(*one) for _, theirs in everyone for one in theirs] + _same(communicator, config, ranks)
    code = DONE
    if communicator.rank == 0:
        found += [
            *compare.compare(ranks),
            *shared_resources.shares(ranks),
            *shared_resources.speed(communicator.name, speeds["engine"], speeds["mpi"]),
        ]
        found = sorted(dict.fromkeys(found), key=lambda finding: ("error", "warning", "note").index(finding.level))
        code = USER if any(finding.level == "error" for finding in found) else DONE
        code = _tell(command, Report(ranks, f"{communicator.name}: {why}", run, speeds, found), code)
    return int(communicator.allgather_object(code)[0])


def _former(command: Command) -> list[Assignment]:
    """The configuration of a run to go on from, which rank 0 alone can read."""
    return read_former(assignments(command.config, command.words))


def _look(
    config: Config, provenance: Provenance, communicator: Communicator, mine: tuple[dict[str, Any], list[Finding]]
) -> dict[str, Any] | None:
    """A rank's own part of the work, into its facts and findings; the run folder, on rank 0. No collective is inside."""
    from hvdtrain.train.build import check_batch

    facts, found = mine
    name = who(facts)
    facts |= {"config": digest(_keys(config)), "libraries": job_needs.libraries(communicator)}
    facts["data"] = probe(found, name, lambda: job_needs.data(config, provenance))
    facts["device"] = probe(found, name, lambda: job_needs.device(config, provenance, communicator))
    if communicator.local_rank == 0:
        found += probe(found, name, lambda: job_needs.cache(facts["host"])) or []
    if communicator.rank:
        return None
    probe(found, name, lambda: check_batch(config, provenance, communicator.size))
    run = probe(found, name, lambda: job_needs.run_folder(config, provenance))
    found += run[1] if run else []
    return run[0] if run else None


def _keys(config: Config) -> dict[str, str]:
    """key -> value, as text."""
    flat: dict[str, str] = {}
    for name, value in dataclasses.asdict(config).items():
        flat |= {f"{name}.{key}": f"{inner}" for key, inner in value.items()} if isinstance(value, dict) else {name: f"{value}"}
    return flat


def _measure(communicator: Communicator, facts: dict[str, Any], place: Placement) -> dict[str, Any]:
    """The speeds, on every rank; the same device on all, or the CPU."""
    device = facts["device"]["name"] if facts["device"] else "cpu"
    places = communicator.allgather_object((device, facts["machine"] or facts["host"], facts["device"] and facts["device"]["id"]))
    apart = len({place[1:] for place in places}) == len(places)  # NCCL does not take two ranks on one GPU
    device = device if apart and all(name.startswith("cuda") for name, *_ in places) and communicator.name != "mpi" else "cpu"
    if communicator.size == 1:
        return {"engine": None, "mpi": None}
    beside = speed.plain_mpi(communicator, place)
    told = {"engine": speed.measure(communicator, device)}
    return told | {"mpi": speed.measure(beside, "cpu") if beside else None}


def _same(communicator: Communicator, config: Config, ranks: Sequence[dict[str, Any]]) -> list[Finding]:
    """The code and the configuration of all ranks, file by file and key by key only where the digests differ. Every rank calls it."""
    found: list[Finding] = []
    if len({facts["code"] for facts in ranks}) > 1:
        found += compare.files(ranks, communicator.allgather_object(code_digests()))
    if len({facts["config"] for facts in ranks}) > 1:
        found += compare.configurations(ranks, communicator.allgather_object(_keys(config)))
    return found


def _tell(command: Command, report: Report, code: int) -> int:
    """On rank 0; the exit code, which a file that cannot be written changes."""
    lines = text(report) if command.json != "-" else [json.dumps(tree(report, code), indent=1)]
    print("\n".join(lines), flush=True)
    if command.json not in (None, "-"):
        try:
            Path(str(command.json)).write_text(json.dumps(tree(report, code), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            print(f"hvdtrain check: cannot write {command.json}: {error.strerror}", file=sys.stderr, flush=True)
            return USER
    return code
