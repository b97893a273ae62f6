"""The facts of all ranks side by side: what differs, contradicts itself, or is not enough for the
ranks of one machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from hvdtrain.cli.check.rank_facts import (
    DeviceFacts,
    Finding,
    RankFacts,
    describe_ranks,
    group_ranks,
    number_ranges,
)
from hvdtrain.comm.rendezvous import files_needed
from hvdtrain.errors import short
from hvdtrain.training.replicas.software import FIXES

Value = TypeVar("Value")
# largest difference that is no finding: lines of logs and time limits of hosts are then still in
# order
CLOCKS_S = 2.0
MOST_DIFFERENCES = 4  # files or keys named in one finding


class DifferingRanks(NamedTuple, Generic[Value]):
    """Ranks whose value is not the most frequent one."""

    value: Value
    majority_value: Value
    ranks: list[RankFacts]


def find_differences(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Every finding from comparing ranks, apart from what they share (shared_resources.py)."""
    return [
        *_versions(ranks),
        *_modules(ranks),
        *_environment(ranks),
        *_containers(ranks),
        *_data(ranks),
        *_host_names(ranks),
        *_local_ranks(ranks),
        *_launchers(ranks),
        *_clocks(ranks),
    ]


def differing_code(
    ranks: Sequence[RankFacts], digests: Sequence[Mapping[str, str]]
) -> list[Finding]:
    """Which files of hvdtrain differ; `digests` are those of each rank, in rank order."""
    return list(
        _differing_items(ranks, digests, _differing_file, "hvdtrain's code differs", FIXES["code"])
    )


def differing_configuration(
    ranks: Sequence[RankFacts], values: Sequence[Mapping[str, str]]
) -> list[Finding]:
    """Which keys of the configuration differ; `values` are those of each rank, in rank order."""
    return list(
        _differing_items(
            ranks, values, _differing_key, "the configuration differs", FIXES["configuration"]
        )
    )


def _differing_items(
    ranks: Sequence[RankFacts],
    items: Sequence[Mapping[str, str]],
    describe: Callable[[str, Mapping[str, str], Mapping[str, str]], str],
    title: str,
    fix: str,
) -> Iterator[Finding]:
    """A finding for each group of ranks that differs from the largest group."""
    groups = list(
        group_ranks(ranks, lambda facts: tuple(sorted(items[facts["rank"]].items()))).items()
    )
    majority_items, majority = groups[0]
    expected = dict(majority_items)
    for group_items, group in groups[1:]:
        found = dict(group_items)
        names = sorted(name for name in expected | found if expected.get(name) != found.get(name))
        details = ", ".join(describe(name, found, expected) for name in names[:MOST_DIFFERENCES])
        if len(names) > MOST_DIFFERENCES:
            details += f" and {len(names) - MOST_DIFFERENCES} more"
        where = (
            f"{describe_ranks(group)}; {len(majority)} other ranks agree"
            if len(majority) > 1
            else describe_ranks(group)
        )
        yield Finding("error", f"{title}: {details}", where, fix)


def _differing_file(name: str, found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    if name not in found:
        return f"{name} (missing)"
    return name if name in expected else f"{name} (only there)"


def _differing_key(name: str, found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    return f"{name} is {found.get(name)} instead of {expected.get(name)}"


def _minorities(
    ranks: Sequence[RankFacts], key: Callable[[RankFacts], Value]
) -> Iterator[DifferingRanks[Value]]:
    """The groups of ranks whose value differs from the most frequent one."""
    groups = list(group_ranks(ranks, key).items())
    for value, group in groups[1:]:
        yield DifferingRanks(value, groups[0][0], group)


def _differing(
    ranks: Sequence[RankFacts],
    items_of: Callable[[RankFacts], Mapping[str, Any]],
    absent: str,
    describe: Callable[[str, str, str], str],
    fix: str,
) -> Iterator[Finding]:
    """A finding for each name and each group of ranks whose item of this name is not the most
    frequent one. describe(name, item there, most frequent item)."""
    items = {facts["rank"]: items_of(facts) for facts in ranks}
    for name in dict.fromkeys(name for of_rank in items.values() for name in of_rank):

        def item(facts: RankFacts, name: str = name) -> str:
            return str(items[facts["rank"]].get(name, absent))

        for found, usual, group in _minorities(ranks, item):
            yield Finding("error", describe(name, found, usual), describe_ranks(group), fix)


def _versions(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    return _differing(
        ranks,
        _installed,
        "not installed",
        lambda name, found, usual: f"{name} is {found}; other ranks: {usual}",
        FIXES["versions"],
    )


def _installed(facts: RankFacts) -> dict[str, str]:
    """Versions of packages, and of the MPI libraries under them."""
    found = dict(facts["versions"])
    if facts["libraries"]["mpi4py"]:
        found["MPI of mpi4py"] = facts["libraries"]["mpi4py"]
    if facts["libraries"]["horovod"]:
        found["MPI of Horovod"] = facts["libraries"]["horovod"]
    return found


def _modules(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    return _differing(
        ranks,
        lambda facts: facts.get("modules", {}),
        "not there",
        lambda name, found, usual: f"the code of {name} differs: {found}; other ranks: {usual}",
        FIXES["code"],
    )


def _environment(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    return _differing(
        ranks,
        lambda facts: facts.get("environment", {}),
        "not set",
        lambda name, found, usual: f"{name} is {short(found)}; other ranks: {short(usual)}",
        FIXES["environment"],
    )


def _containers(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for kind, usual, group in _minorities(ranks, lambda facts: facts["container"]):
        what = f"some ranks run {_container(kind)}, the others {_container(usual)}"
        yield Finding("warning", what, describe_ranks(group), "start all ranks the same way")


def _container(kind: str) -> str:
    return f"in a container ({kind})" if kind else "outside of containers"


def _data(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    return _differing(
        [facts for facts in ranks if facts["data"]],
        lambda facts: {
            name: value for name, value in (facts["data"] or {}).items() if name != "seconds"
        },
        "None",
        lambda name, found, usual: f"{name}: {found} instead of {usual}",
        FIXES["data"],
    )


def _host_names(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Machines that share a host name, and host names that share a machine."""
    for host, on_host in group_ranks(ranks, lambda facts: facts["host"]).items():
        machines = group_ranks(on_host, lambda facts: facts["machine"])
        if len(machines) > 1:
            where = "; ".join(
                f"ranks {_number_list(group)}" if len(group) > 1 else f"rank {_number_list(group)}"
                for group in machines.values()
            )
            fix = (
                "give each machine or container its own host name: MPI and local ranks depend on it"
            )
            yield Finding(
                "warning", f"{len(machines)} machines have the host name {host}", where, fix
            )
    for machine, on_machine in group_ranks(ranks, lambda facts: facts["machine"]).items():
        hosts = {facts["host"] for facts in on_machine}
        if machine and len(hosts) > 1:
            what = (
                f"hosts {', '.join(sorted(hosts))} are one machine (same boot id): their ranks "
                "share its cores, memory and GPUs"
            )
            yield Finding(
                "note",
                what,
                describe_ranks(on_machine),
                "none needed where they are containers or a test",
            )


def _number_list(ranks: Sequence[RankFacts]) -> str:
    """0, 1, 5"""
    return ", ".join(str(facts["rank"]) for facts in ranks)


def _local_ranks(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for host, on_host in group_ranks(ranks, lambda facts: facts["host"]).items():
        found = sorted(facts["local_rank"] for facts in on_host)
        expected = list(range(len(on_host)))
        if found != expected or any(facts["local_size"] != len(on_host) for facts in on_host):
            numbers = ", ".join(map(str, found))
            what = (
                f"the local ranks on {host} are {numbers}, not 0 to {expected[-1]}: they choose "
                "GPUs and numbers of threads"
            )
            fix = (
                "start all ranks of a host with one launcher, with host names on which the "
                "launcher and the hosts agree"
            )
            yield Finding("warning", what, describe_ranks(on_host), fix)


class _MpiPair(NamedTuple):
    """The MPI that started a rank, and the one that the rank uses."""

    launcher: str
    library: str
    container: str


def _launchers(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Open MPI that started the ranks has another major version than Open MPI in them. With two
    makes of MPI no engine starts."""
    for pair, group in group_ranks(ranks, _mpi_pair).items():
        launcher_version = _open_mpi_major(pair.launcher)
        library_version = _open_mpi_major(pair.library)
        if (
            launcher_version is None
            or library_version is None
            or launcher_version == library_version
        ):
            continue
        if launcher_version == 4 and library_version < 4:  # "Open MPI 4 or older"
            continue
        what = (
            f"{pair.launcher} started ranks that use "
            f"{pair.library}{' in a container' if pair.container else ''}"
        )
        fix = (
            f"use the same major version on both sides: an image with Open MPI {launcher_version}, "
            f"or the host's module of Open MPI {library_version}"
        )
        yield Finding("warning", what, describe_ranks(group), fix)


def _mpi_pair(facts: RankFacts) -> _MpiPair:
    library = (
        facts["libraries"]["horovod"]
        if facts["engine"] == "horovod"
        else facts["libraries"]["mpi4py"]
    )
    return _MpiPair(facts["launcher_mpi"], library or "", facts["container"])


def _open_mpi_major(name: str) -> int | None:
    """ "Open MPI v5.0.11" -> 5"""
    found = re.search(r"Open MPI v?(\d+)", name)
    return int(found[1]) if found else None


def _clocks(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    times = {facts["rank"]: facts["clock_s"] for facts in ranks if facts["clock_s"] is not None}
    if not times:
        return
    earliest = min(times.values())
    difference_s = max(times.values()) - earliest
    if difference_s > CLOCKS_S:
        late = [
            facts for facts in ranks if times.get(facts["rank"], earliest) - earliest > CLOCKS_S
        ]
        fix = "run a time service (chrony) on every host; time limits use the clock of rank 0"
        yield Finding(
            "warning",
            f"the clocks of the hosts differ by {difference_s:.1f} s",
            describe_ranks(late),
            fix,
        )


# of /dev/shm for each rank of a host: MPI's and NCCL's memory between ranks, and data loaders
SHARED_BYTES = 64 * 2**20
MANY_RANKS = 1024  # from which on a full mesh is said
_FIX_BINDING = (
    "mpirun --bind-to none, or --map-by slot:PE=N for N cores each; srun --cpus-per-task=N"
)


def find_shortages(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Every finding about what ranks share; `ranks` are all ranks of the job."""
    found: list[Finding] = []
    for on_machine in group_ranks(ranks, lambda facts: facts["machine"] or facts["host"]).values():
        found += [*_cores(on_machine), *_threads(on_machine), *_gpus(on_machine)]
    for on_host in group_ranks(
        ranks, lambda facts: facts["host"]
    ).values():  # containers of one machine have limits of their own
        found += [
            *_shared_memory(on_host),
            *_locked_memory(on_host),
            *_open_files(on_host, len(ranks)),
        ]
    return [*found, *_nccl(ranks)]


def full_mesh(engine: str, ranks: int) -> list[Finding]:
    """A note where Gloo, which connects each rank with each, makes very many connections; hvdtrain
    cannot have it make fewer."""
    if engine != "torchdist" or ranks < MANY_RANKS:
        return []
    connections = (
        f"{ranks * (ranks - 1) // 2:,} connections, {ranks - 1:,} of each rank, for each group"
    )
    what = f"Gloo connects each of {ranks:,} ranks with each: {connections}"
    fix = (
        "comm.engine=mpi or horovod, which connect ranks that have something to send; or one rank "
        "for each GPU, not for each core"
    )
    return [Finding("note", what, "comm.engine=torchdist", fix)]


def _cores(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """More ranks than cores among those that may use the same cores; and ranks bound to one core of
    many."""
    if len(ranks) < 2:
        return
    host_cores = max(facts["host_cores"] for facts in ranks)
    reported: set[int] = set()
    for cores in sorted({tuple(facts["cores"]) for facts in ranks}, key=len):
        sharing = [facts for facts in ranks if set(facts["cores"]) <= set(cores)]
        sharing_ranks = {facts["rank"] for facts in sharing}
        if len(sharing) <= len(cores) or sharing_ranks <= reported:
            continue
        reported |= sharing_ranks
        what = (
            f"{len(sharing)} ranks share {_cores_text(len(cores))} ({number_ranges(cores)}) of "
            f"the machine's {host_cores}"
        )
        fix = (
            _FIX_BINDING
            if len(cores) < host_cores
            else "start fewer ranks on each host, or use more hosts"
        )
        yield Finding("warning", what, describe_ranks(sharing), fix)
    bound = [facts for facts in ranks if len(facts["cores"]) == 1 and facts["rank"] not in reported]
    if bound and host_cores > len(ranks):
        what = (
            f"each rank may use 1 of {host_cores} cores, for PyTorch, the engine's thread and "
            "reading data together"
        )
        yield Finding("warning", what, describe_ranks(bound), _FIX_BINDING)


def _cores_text(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"


def _threads(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """OMP_NUM_THREADS overrides the number of threads that a rank would choose to share the cores
    fairly."""
    threads_of = {
        facts["rank"]: int(facts["omp_num_threads"] or 1)
        for facts in ranks
        if (facts["omp_num_threads"] or "").isdecimal()
    }
    setting = [facts for facts in ranks if threads_of.get(facts["rank"], 1) > 1]
    cores = {core for facts in ranks for core in facts["cores"]}
    threads = sum(threads_of[facts["rank"]] for facts in setting) + len(ranks) - len(setting)
    if setting and threads > len(cores):
        what = (
            f"OMP_NUM_THREADS={setting[0]['omp_num_threads']} starts {threads} threads on "
            f"{_cores_text(len(cores))}"
        )
        fix = f"unset it, or OMP_NUM_THREADS={max(1, len(cores) // len(ranks))}"
        yield Finding("warning", what, describe_ranks(setting), fix)


def _gpus(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Ranks of one machine that share a GPU, or of which some have none."""
    devices = {facts["rank"]: facts["device"] for facts in ranks if facts["device"] is not None}
    on_gpus = [
        facts for facts in ranks if facts["rank"] in devices and devices[facts["rank"]]["id"]
    ]
    for identity, sharing in group_ranks(
        on_gpus, lambda facts: _gpu_identity(facts, devices[facts["rank"]])
    ).items():
        if len(sharing) < 2:
            continue
        nccl_refuses = any(
            facts["engine"] == "torchdist" or facts["libraries"]["nccl"] for facts in sharing
        )
        visible = max(devices[facts["rank"]]["visible"] for facts in sharing)
        what = (
            f"{len(sharing)} ranks train on one GPU ({devices[sharing[0]['rank']]['model']}, "
            f"{identity})"
        )
        if nccl_refuses:
            what += ", which NCCL refuses"
        fix = (
            f"start as many ranks on a host as it has GPUs (each of these ranks sees {visible}): "
            "srun --gpus-per-task=1, mpirun --map-by ppr:N:node"
        )
        yield Finding("error" if nccl_refuses else "warning", what, describe_ranks(sharing), fix)
    on_cpu = [
        facts
        for facts in ranks
        if facts["rank"] in devices and devices[facts["rank"]]["name"] == "cpu"
    ]
    if on_gpus and on_cpu:
        what = (
            f"{len(on_cpu)} of {len(ranks)} ranks of this machine train on the CPU, the others on "
            "GPUs"
        )
        fix = (
            "make a GPU visible to each rank: CUDA_VISIBLE_DEVICES; --nv or --gpus of the container"
        )
        yield Finding("warning", what, describe_ranks(on_cpu), fix)


def _gpu_identity(facts: RankFacts, device: DeviceFacts) -> str:
    """The UUID; without one, the device's name and host."""
    identity = device["id"]
    return f"{identity} of {facts['host']}" if identity.startswith("cuda") else identity


def _nccl(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    without = [
        facts
        for facts in ranks
        if facts["device"] and facts["device"]["id"] and facts["libraries"]["nccl"] is False
    ]
    if without:
        what = "Horovod was built without NCCL: gradients on GPUs are copied through host memory"
        fix = (
            "python -m hvdtrain.cli.horovod --nccl builds it; or comm.engine=torchdist, which "
            "includes NCCL"
        )
        yield Finding("warning", what, describe_ranks(without), fix)


def _shared_memory(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    facts = ranks[0]
    needed = SHARED_BYTES * len(ranks)
    room = facts["shared_memory_bytes"]
    if len(ranks) == 1 or (room is not None and room[1] >= needed):
        return
    found = (
        "there is none"
        if room is None
        else f"{room[1] / 2**20:,.0f} of its {room[0] / 2**20:,.0f} MiB are free"
    )
    what = (
        f"/dev/shm is small: {found}; {len(ranks)} ranks need {needed // 2**20} MiB for MPI, NCCL "
        "and data loaders"
    )
    fix = (
        "docker or podman: --shm-size=8g or --ipc=host; Kubernetes: an emptyDir of medium Memory "
        "at /dev/shm; else delete old files there"
    )
    where = (
        f"{facts['host']}, in a container ({facts['container']})"
        if facts["container"]
        else facts["host"]
    )
    yield Finding("warning", what, where, fix)


def _locked_memory(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    limited = [
        facts
        for facts in ranks
        if facts["infiniband"] and 0 <= facts["locked_memory_bytes"] < SHARED_BYTES
    ]
    if limited:
        adapters = ", ".join(limited[0]["infiniband"])
        kib = limited[0]["locked_memory_bytes"] // 1024
        what = f"InfiniBand ({adapters}) with a limit of {kib} KiB of locked memory"
        fix = (
            "ulimit -l unlimited: in limits.conf, for sshd and slurmd too "
            "(LimitMEMLOCK=infinity); docker: --ulimit memlock=-1"
        )
        yield Finding("warning", what, describe_ranks(limited), fix)


def _open_files(ranks: Sequence[RankFacts], size: int) -> Iterator[Finding]:
    needed = files_needed(size)
    limited = [facts for facts in ranks if 0 <= facts["open_files"] < needed]
    if limited:
        what = (
            f"the limit of open files is {limited[0]['open_files']}; {size} ranks may need {needed}"
        )
        yield Finding(
            "warning", what, describe_ranks(limited), f"ulimit -n {max(4096, 2 * needed)}"
        )
