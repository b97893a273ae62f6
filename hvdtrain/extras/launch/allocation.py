"""The hosts of a job: from -H, a hostfile, or the batch job that this process belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from hvdtrain.comm.launcher_variables import tasks_per_node
from hvdtrain.comm.rendezvous import expand_nodes
from hvdtrain.errors import UserError, short
from hvdtrain.extras.launch.mpirun import Host

LARGEST_BYTES = 2**24  # limit for a hostfile
_HOST = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?::([0-9]{1,6}))?")
_HOST_FIX = "hosts and the slots of each, as in -H n1:4,n2:4"
# a batch system, a variable of its jobs, the variable that names the file with the job's hosts
_HOSTFILES = (
    ("PBS", "PBS_JOBID", "PBS_NODEFILE"),
    ("Cobalt", "COBALT_JOBID", "COBALT_NODEFILE"),
    ("OAR", "OAR_JOB_ID", "OAR_NODEFILE"),
    ("LSF", "LSB_JOBID", "LSB_DJOB_HOSTFILE"),
    ("SGE", "PE_HOSTFILE", "PE_HOSTFILE"),
)


class Allocation(NamedTuple):
    system: str
    hosts: tuple[Host, ...]
    # Ranks that the job was submitted for; 0 if only the hosts and their slots are known.
    ranks: int = 0

    @property
    def slots(self) -> int:
        return sum(host.slots for host in self.hosts)

    def with_room_for(self, ranks: int) -> tuple[Host, ...]:
        """Returns the hosts; a single host gets as many slots as ranks are requested."""
        return (
            (self.hosts[0]._replace(slots=max(ranks, self.slots)),)
            if len(self.hosts) == 1
            else self.hosts
        )


def find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Reads the batch system's variables; None outside its jobs. Raises UserError if they name no
    readable hosts."""
    if "SLURM_JOB_ID" in environ:
        return _of_slurm(environ)
    for system, job, file in _HOSTFILES:
        if job in environ:
            return Allocation(system, _of_lsf_lists(environ) or _of_file(system, file, environ))
    tasks = environ.get("NSLOTS", "")
    if "JOB_ID" in environ and tasks.isdecimal() and int(tasks) > 1:
        raise _unreadable("SGE", f"NSLOTS={tasks}, but PE_HOSTFILE is not set")
    if "FLUX_URI" in environ:
        fix = "flux run -N 2 -n 8 python -m hvdtrain ...; or launch -np 8 ..., for this host"
        raise UserError(
            "launch does not read the hosts of this Flux instance",
            f"FLUX_URI={short(environ['FLUX_URI'])}",
            fix,
        )
    return None


def _unreadable(system: str, reason: str) -> UserError:
    fix = "name them: launch -H n1:4,n2:4 ...; or launch -np 4 ..., for this machine"
    return UserError(
        f"the hosts of this {system} job cannot be read: {reason}",
        f"the variables of {system}",
        fix,
    )


def _of_slurm(environ: Mapping[str, str]) -> Allocation:
    names = expand_nodes(environ.get("SLURM_JOB_NODELIST", environ.get("SLURM_NODELIST", "")))
    listed = environ.get("SLURM_TASKS_PER_NODE", "")
    tasks = tasks_per_node(listed, "SLURM_TASKS_PER_NODE") if listed else []
    if not names or len(names) != len(tasks):
        reason = f"{len(names)} nodes in SLURM_JOB_NODELIST, {len(tasks)} in SLURM_TASKS_PER_NODE"
        raise _unreadable("SLURM", reason)
    hosts = tuple(Host(name, count) for name, count in zip(names, tasks, strict=True))
    ranks = environ.get("SLURM_NTASKS", "")
    return Allocation("SLURM", hosts, int(ranks) if ranks.isdecimal() else 0)


def _of_lsf_lists(environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Reads LSF's hosts from variables, if it names no file: LSB_MCPU_HOSTS "n1 4 n2 4", LSB_HOSTS
    "n1 n1 n2"; none for another system."""
    if "LSB_JOBID" not in environ or "LSB_DJOB_HOSTFILE" in environ:
        return ()
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    if len(words) % 2:
        reason = f"LSB_MCPU_HOSTS={short(' '.join(words))} has no number of slots for each host"
        raise _unreadable("LSF", reason)
    pairs = [f"{name}:{slots}" for name, slots in zip(words[::2], words[1::2], strict=True)]
    named = pairs or environ.get("LSB_HOSTS", "").split()
    return _merged(_read_host(host, "LSB_MCPU_HOSTS" if pairs else "LSB_HOSTS") for host in named)


def _of_file(system: str, variable: str, environ: Mapping[str, str]) -> tuple[Host, ...]:
    path = environ.get(variable)
    if not path:
        unset = (
            f"{variable}, LSB_MCPU_HOSTS and LSB_HOSTS are not set"
            if system == "LSF"
            else f"{variable} is not set"
        )
        raise _unreadable(system, unset)
    try:
        lines = read_text(Path(path)).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(system, f"{variable}: {error}") from None
    hosts = read_hostfile(lines, f"{variable}={path}", needs_slots=system == "SGE")
    each = environ.get("PBS_NUM_PPN", "")  # for Torque, if its file lists each host once
    if system == "PBS" and each.isdecimal() and all(host.slots == 1 for host in hosts):
        return tuple(Host(host.name, max(1, int(each))) for host in hosts)
    return hosts


def read_text(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.read(LARGEST_BYTES)


def read_hosts(value: str) -> tuple[Host, ...]:
    """Parses "n1:4,n2" as 4 slots and 1; slots of a host that is named twice are added. Raises
    UserError."""
    return _merged(_read_host(host, f"-H {short(value)}") for host in value.split(","))


def read_hostfile(lines: Iterable[str], path: str, needs_slots: bool = False) -> tuple[Host, ...]:
    """Parses lines `n1 slots=4`, `n1:4` or `n1`, as in Open MPI, Hydra, PBS and Cobalt, or `n1 4
    QUEUE ...`, as in SGE.

    # begins a comment. Raises UserError.
    """
    hosts = []
    for number, line in enumerate(lines, start=1):
        name, *options = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split() or [""]
        slots = next(
            (option.partition("=")[2] for option in options if option.startswith("slots=")), None
        )
        if slots is None and options and options[0].isdecimal():
            slots = options[0]
        if name and slots is None and needs_slots:
            what = f"no number of slots after the host '{short(name)}'"
            raise UserError(what, f"{path}:{number}", "n1 4 in each line; or launch -H n1:4,n2:4")
        if name:
            hosts.append(
                _read_host(name if slots is None else f"{name}:{slots}", f"{path}:{number}")
            )
    if not hosts:
        raise UserError("no host in the file", path, "a host in each line, as in: n1 slots=4")
    return _merged(hosts)


def _read_host(value: str, where: str) -> Host:
    match = _HOST.fullmatch(value.strip())
    if not match or (match[2] is not None and not int(match[2])):
        hint = "; scontrol show hostnames expands n[1-4]" if "[" in value else ""
        raise UserError(f"cannot read the host '{short(value)}'", where, f"{_HOST_FIX}{hint}")
    return Host(match[1], int(match[2] or 1))


def _merged(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Returns each host once, with the sum of its slots."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name, count) for name, count in slots.items())
