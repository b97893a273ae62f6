"""Facts that a rank knows without communication, and findings (what, where, fix) that name ranks by
their facts."""

from __future__ import annotations

import os
import resource
import socket
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar

from hvdtrain.comm.cores.bind import usable_cores
from hvdtrain.comm.cores.topology import number_ranges
from hvdtrain.comm.launcher_variables import Placement
from hvdtrain.comm.rendezvous import interfaces
from hvdtrain.errors import UserError
from hvdtrain.training.replicas.software import code_digests, digest, variables, versions

UNLIMITED = -1
NETWORK_VARIABLES = (
    *(
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "NCCL_IB_HCA",
        "HOROVOD_GLOO_IFACE",
        "UCX_NET_DEVICES",
    ),
    *(
        "OMPI_MCA_btl_tcp_if_include",
        "PRTE_MCA_prte_if_include",
        "I_MPI_HYDRA_IFACE",
        "FI_TCP_IFACE",
    ),
)


class DeviceFacts(TypedDict):
    """The device of a rank."""

    name: str  # cpu, cuda:0, ...
    model: str  # "" for a CPU
    id: str  # UUID of a GPU, or its name if torch does not report one; "" for a CPU
    bytes: int
    visible: int  # GPUs that the process sees


class LibraryFacts(TypedDict):
    """The MPI libraries in this process; None if there is none or it is unknown."""

    mpi4py: str | None
    horovod: str | None
    nccl: bool | None  # whether Horovod was built with NCCL


class RankFacts(TypedDict):
    """The facts of one rank, as they are compared and as `--json` prints them.

    Plain objects: ranks exchange them, and a rank with another version of hvdtrain must be able to
    read them.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str
    launcher_mpi: str  # "" if no MPI started the process
    host: str
    machine: str  # boot id; "" if unknown
    container: str  # kind of container; "" on a host
    pid: int
    versions: dict[str, str]
    code: str  # digest of hvdtrain's files
    config: str  # digest of the configuration; "" until it is known
    modules: dict[str, str]  # digests of the user's modules that the configuration names
    environment: dict[str, str]  # the variables that change results
    cores: list[int]  # cores that the process may use, with comm.bind
    gpu_cores: list[int]  # cores next to its GPU; empty on the CPU, and if /sys does not list them
    host_cores: int
    omp_num_threads: str | None
    shared_memory_bytes: list[int] | None  # [total, free] of /dev/shm
    locked_memory_bytes: int  # UNLIMITED: no limit
    open_files: int  # UNLIMITED: no limit
    infiniband: list[str]
    networks: dict[str, str]  # {interface: IPv4 address}
    # variables that select the networks that libraries use; torchdist sets Gloo's
    network_variables: dict[str, str]
    engine: str  # "" until the ranks are connected
    device: DeviceFacts | None
    libraries: LibraryFacts
    data: dict[str, Any] | None
    clock_s: float | None  # time of day, read at the same moment on all ranks


def local_facts(place: Placement, environ: Mapping[str, str]) -> RankFacts:
    """Returns all facts that need neither an engine nor a configuration; the others are unknown."""
    return {
        "rank": place.rank,
        "size": place.size,
        "local_rank": place.local_rank,
        "local_size": place.local_size,
        "launcher": place.launcher,
        "launcher_mpi": launcher_mpi(environ),
        "host": socket.gethostname(),
        "machine": _read("/proc/sys/kernel/random/boot_id"),
        "container": container(environ),
        "pid": os.getpid(),
        "versions": versions(),
        "code": digest(code_digests()),
        "config": "",
        "modules": {},
        "environment": variables(environ),
        "cores": list(usable_cores()),
        "gpu_cores": [],
        "host_cores": os.cpu_count() or 1,
        "omp_num_threads": environ.get("OMP_NUM_THREADS"),
        "shared_memory_bytes": _file_system_bytes("/dev/shm"),
        "locked_memory_bytes": _soft_limit(resource.RLIMIT_MEMLOCK),
        "open_files": _soft_limit(resource.RLIMIT_NOFILE),
        "infiniband": _file_names("/sys/class/infiniband"),
        "networks": interfaces(),
        "network_variables": network_variables(environ),
        "engine": "",
        "device": None,
        "libraries": {"mpi4py": None, "horovod": None, "nccl": None},
        "data": None,
        "clock_s": None,
    }


def apart_from(first: Any, own: Any) -> Any:
    """Returns the facts of a rank that differ from rank 0's, as a message; completed() restores all
    facts.

    For objects {name: value} with all names in `first`, returns a dict of the differences; for
    anything else, a list with the object.
    """
    if isinstance(first, dict) and isinstance(own, dict) and first.keys() <= own.keys():
        return {
            name: apart_from(first.get(name), value)
            for name, value in own.items()
            if name not in first or first[name] != value
        }
    return [own]


def completed(first: Any, sent: Any) -> Any:
    if isinstance(sent, dict):
        return {**first, **{name: completed(first.get(name), part) for name, part in sent.items()}}
    return sent[0]


def launcher_mpi(environ: Mapping[str, str]) -> str:
    """Returns the MPI that started this process, by the variables it sets; empty if none did."""
    if "OMPI_COMM_WORLD_RANK" in environ:
        version = environ.get("OMPI_VERSION")  # since Open MPI 5
        if version:
            return f"Open MPI {version}"
        return (
            "Open MPI 4 or older"
            if any(key.startswith("OMPI_MCA_orte_") for key in environ)
            else "Open MPI"
        )
    if "MPI_LOCALRANKID" in environ and "PMI_RANK" in environ:
        return "Intel MPI" if any(key.startswith("I_MPI_HYDRA") for key in environ) else "MPICH"
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        return (
            "srun with PMIx"
            if "PMIX_RANK" in environ
            else "srun with PMI2"
            if "PMI_RANK" in environ
            else "srun without PMI"
        )
    return ""


def network_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that select network interfaces."""
    return {name: environ[name] for name in NETWORK_VARIABLES if name in environ}


def container(environ: Mapping[str, str], root: Path = Path("/")) -> str:
    """Returns the kind of container this process runs in; empty on a host."""
    if "APPTAINER_CONTAINER" in environ:
        return "apptainer"
    if "SINGULARITY_CONTAINER" in environ:
        return "singularity"
    if "CH_RUNNING" in environ:
        return "charliecloud"
    if (root / "run/.containerenv").exists():
        return "podman"
    if (root / ".dockerenv").exists():
        return "docker"
    return "kubernetes" if "KUBERNETES_SERVICE_HOST" in environ else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _file_system_bytes(path: str) -> list[int] | None:
    """Returns [total, free]; None if the path does not exist."""
    try:
        statistics = os.statvfs(path)
    except OSError:
        return None
    return [statistics.f_frsize * statistics.f_blocks, statistics.f_frsize * statistics.f_bavail]


def _soft_limit(kind: int) -> int:
    soft = resource.getrlimit(kind)[0]
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _file_names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


Key = TypeVar("Key")
Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")
MOST_HOSTS = 8  # named in one finding


class Finding(NamedTuple):
    """One problem or fact. An error keeps the job from running correctly; a note needs no
    action."""

    level: Level
    what: str
    where: str
    fix: str


def finding_of_error(error: Exception, rank_name: str) -> Finding:
    """Returns an exception of a rank as a finding of level error."""
    if isinstance(error, UserError):
        where = f"{rank_name}; {error.where}" if error.where else rank_name
        return Finding("error", error.what, where, error.fix)
    where = rank_name
    if frames := traceback.extract_tb(error.__traceback__):
        where += f", {frames[-1].filename}:{frames[-1].lineno}"
    return Finding(
        "error",
        f"{type(error).__name__}: {error}",
        where,
        "an unexpected error: training would stop at it, too",
    )


def describe_rank(facts: RankFacts) -> str:
    """Formats a rank: rank 3 on n2."""
    return f"rank {facts['rank']} on {facts['host']}"


def describe_ranks(group: Iterable[RankFacts]) -> str:
    """Formats ranks: ranks 0-2 on n1, 4 on n2."""
    ranks_of_host: dict[str, list[int]] = {}
    for facts in group:
        ranks_of_host.setdefault(facts["host"], []).append(facts["rank"])
    named = ", ".join(
        f"{number_ranges(ranks)} on {host}"
        for host, ranks in list(ranks_of_host.items())[:MOST_HOSTS]
    )
    more = (
        f" and {len(ranks_of_host) - MOST_HOSTS} more hosts"
        if len(ranks_of_host) > MOST_HOSTS
        else ""
    )
    count = sum(len(ranks) for ranks in ranks_of_host.values())
    return f"{'ranks' if count > 1 else 'rank'} {named}{more}"


def group_ranks(
    ranks: Iterable[RankFacts], key: Callable[[RankFacts], Key]
) -> dict[Key, list[RankFacts]]:
    """Groups ranks by a value: the largest group first; of equally large ones, the group with the
    lowest rank."""
    groups: dict[Key, list[RankFacts]] = {}
    for facts in ranks:
        groups.setdefault(key(facts), []).append(facts)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def most_severe_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sorts findings: errors, then warnings, then notes; each finding once."""
    return sorted(dict.fromkeys(findings), key=lambda finding: LEVELS.index(finding.level))


def count_by_level(findings: Sequence[Finding]) -> dict[Level, int]:
    return {level: sum(finding.level == level for finding in findings) for level in LEVELS}
