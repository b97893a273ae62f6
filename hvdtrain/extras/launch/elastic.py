"""The options of `launch --elastic`: checks, and the start of the supervisor."""

from __future__ import annotations

import os
import shlex
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from hvdtrain.config.read import expand
from hvdtrain.core.lengths import parse_duration
from hvdtrain.errors import DONE, UserError, short
from hvdtrain.extras.launch import hosts
from hvdtrain.extras.launch.allocation import Allocation, read_hosts
from hvdtrain.extras.launch.hosts import PROGRAM, Offer, choose
from hvdtrain.extras.launch.mpirun import Host, LaunchRequest, MpiLauncher, mpirun_command
from hvdtrain.extras.launch.program import value_of
from hvdtrain.extras.launch.run import LauncherRun
from hvdtrain.extras.launch.supervisor import Limits, Supervisor
from hvdtrain.extras.launch.words import Program

_WHERE = "command line of launch --elastic"
# Open MPI 5 notices a lost host after time + probes x intvl seconds; without these after 8 minutes,
# or when TCP does.
_KEEPALIVE = {"time": "3", "intvl": "1", "probes": "2"}


def launch_elastic(
    options: Namespace,
    program: Program,
    command: Callable[[Namespace], list[str]],
    find: Callable[[], MpiLauncher],
    slots_here: int,
    allocation: Allocation | None,
) -> int:
    """Runs a supervisor; returns the exit code.

    command: composes launch's command line for options with hosts and ranks. find: finds this
    machine's mpirun. slots_here: number of ranks if no hosts are named and allocation is None;
    otherwise the hosts of the batch job are used. Raises UserError.
    """
    _refuse_others(options)
    run = _run_folder(program)
    limits = _limits(options)
    offer = (
        hosts.fixed(allocation.hosts) if allocation else _offer(options, limits.most or slots_here)
    )
    if options.dry_run:
        chosen = choose(offer.read(), limits.most)
        if not chosen:
            raise UserError(
                "no host is available now",
                _WHERE,
                "a host in the list, as n1:4; without --dry-run launch waits for one",
            )
        print(shlex.join(command(_with_hosts(options, offer, chosen))))
        return DONE
    for key, value in _KEEPALIVE.items():
        os.environ.setdefault(f"PRTE_MCA_oob_tcp_keepalive_{key}", value)
    launcher = find()

    def probe(name: str) -> list[str]:
        request = LaunchRequest(
            launcher.path, 1, PROGRAM, (Host(name, 1),), as_root=os.geteuid() == 0
        )
        return mpirun_command(launcher.kind, request)

    def start(hosts: Sequence[Host]) -> LauncherRun:
        return LauncherRun(command(_with_hosts(options, offer, hosts)), is_job=run is not None)

    return Supervisor(run, offer, limits, start, probe).run()


def _refuse_others(options: Namespace) -> None:
    for name, option in {
        "ranks": "-np",
        "mpi": "--mpi",
        "slurm": "--slurm",
        "inside": "--inside",
    }.items():
        if getattr(options, name):
            fix = {
                "ranks": f"--max {short(options.ranks)}",
                "slurm": "without --slurm: mpirun starts the ranks in the allocation",
            }
            raise UserError(
                f"{option} is not supported with --elastic",
                _WHERE,
                fix.get(name, f"without {option}"),
            )


def _run_folder(program: Program) -> Path | None:
    """Returns the run folder in the job's arguments, or None for a script without one. Raises
    UserError if the job would not resume in it."""
    job = program.words
    if program.is_job and job and job[0] == "check":
        raise UserError(
            "check runs only once, so --elastic has no effect on it",
            _WHERE,
            "launch ... -- check without --elastic",
        )
    run = value_of(job, "run")
    if not run:
        if not program.is_job:
            return None
        fix = "launch --elastic ... -- run=DIR ..., a folder that the first host can reach"
        raise UserError(
            "the job needs a run folder, from which each start resumes", f"{_WHERE}, after --", fix
        )
    if value_of(job, "resume") == "no":
        raise UserError(
            "resume=no would start the job from the beginning each time",
            f"{_WHERE}, after --",
            "leave it out; the job resumes in run=DIR",
        )
    return expand(f"{run}", "run")


def _limits(options: Namespace) -> Limits:
    least = _count(options.min, "--min") or 1
    most = _count(options.max, "--max")
    if most is not None and least > most:
        raise UserError(f"--min {least} is more than --max {most}", _WHERE, f"--min {most} or less")
    patience_s = parse_duration(options.patience or "10m", "--patience")
    every_s = parse_duration(options.every or "5", "--every")
    answer_s = parse_duration(options.answer or "20", "--answer")
    return Limits(least, most, patience_s, every_s, answer_s)


def _count(value: str | None, option: str) -> int | None:
    if value is None:
        return None
    if not (value.isdecimal() and 0 < int(value) < 10**7):
        raise UserError(
            f"{option} {short(value)} is not a number of ranks",
            _WHERE,
            f"1 or more, as in {option} 8",
        )
    return int(value)


def _offer(options: Namespace, slots_here: int) -> Offer:
    """Returns the source of hosts that an option names. Raises UserError if more than one option
    names hosts."""
    named = [
        name for name in ("hosts", "hostfile", "hosts_from") if getattr(options, name) is not None
    ]
    if len(named) > 1:
        raise UserError(
            "more than one option names hosts", _WHERE, "one of -H, --hostfile and --hosts-from"
        )
    if options.hosts is not None:
        return hosts.fixed(read_hosts(options.hosts))
    if options.hostfile is not None:
        return hosts.of_file(expand(options.hostfile, "--hostfile"))
    if options.hosts_from is not None:
        return hosts.of_script(expand(options.hosts_from, "--hosts-from"))
    return hosts.this_machine(slots_here)


def _with_hosts(options: Namespace, offer: Offer, hosts: Sequence[Host]) -> Namespace:
    """Returns the options of launch without --elastic for one start."""
    names = None if offer.is_local else ",".join(f"{host.name}:{host.slots}" for host in hosts)
    ranks = str(sum(host.slots for host in hosts))
    return Namespace(**{**vars(options), "hosts": names, "hostfile": None, "ranks": ranks})
