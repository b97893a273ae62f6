"""Shortages for the ranks of one machine: cores, GPUs, shared and locked memory, open files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hvdtrain.comm.cores.topology import number_ranges
from hvdtrain.comm.rendezvous import files_needed
from hvdtrain.extras.check.rank_facts import (
    DeviceFacts,
    Finding,
    RankFacts,
    describe_ranks,
    group_ranks,
)

# bytes of /dev/shm for each rank of a host, used by MPI, NCCL and data loaders
SHARED_BYTES = 64 * 2**20
_MOST_MASKS = 4  # named in one finding
MANY_RANKS = 1024  # number of ranks from which a full mesh is reported
_FIX_BINDING = (
    "mpirun --bind-to none, or --map-by slot:PE=N for N cores each; srun --cpus-per-task=N"
)

_FIX_SHARED = (
    "comm.bind=gpu (each rank's share of the cores next to its GPU) or comm.bind=numa, or launch "
    "--bind gpu; where the launcher binds: mpirun --map-by numa:PE=N --bind-to core, srun "
    "--cpus-per-task=N --cpu-bind=cores"
)


def find_shortages(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Returns every finding about what ranks share; `ranks` are all ranks of the job."""
    findings: list[Finding] = []
    for on_machine in group_ranks(ranks, lambda facts: facts["machine"] or facts["host"]).values():
        findings += [
            *_cores(on_machine),
            *_shared_cores(on_machine),
            *_far_cores(on_machine),
            *_threads(on_machine),
            *_gpus(on_machine),
        ]
    for on_host in group_ranks(
        ranks, lambda facts: facts["host"]
    ).values():  # containers on one machine have separate limits
        findings += [
            *_shared_memory(on_host),
            *_locked_memory(on_host),
            *_open_files(on_host, len(ranks)),
        ]
    return [*findings, *_nccl(ranks)]


def full_mesh(engine: str, ranks: int) -> list[Finding]:
    """Returns a note if Gloo, which connects all pairs of ranks, makes very many connections;
    hvdtrain cannot change that."""
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
    """Reports groups of ranks that may use fewer cores than they have ranks, and ranks bound to one
    core of many."""
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


def _shared_cores(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Yields findings for ranks that share cores although there are enough for all; _cores()
    reports the others."""
    masks = group_ranks(ranks, lambda facts: tuple(facts["cores"]))
    crossed = [
        mask
        for mask in masks
        if any(other != mask and {*other} & {*mask} for other in masks) and len(mask) > 1
    ]
    if crossed:
        sharing = [facts for mask in crossed for facts in masks[mask]]
        listed = ", ".join(number_ranges(mask) for mask in crossed[:_MOST_MASKS])
        more = ", ..." if len(crossed) > _MOST_MASKS else ""
        what = f"ranks are bound to cores that overlap in part: {listed}{more}"
        yield Finding("warning", what, describe_ranks(sharing), _FIX_SHARED)
        return
    for mask, sharing in masks.items():
        if 1 < len(sharing) <= len(mask):
            what = (
                f"{len(sharing)} ranks share the same {_cores_text(len(mask))} "
                f"({number_ranges(mask)}): threads may move away from their memory and from "
                "each rank's GPU"
            )
            yield Finding("note", what, describe_ranks(sharing), _FIX_SHARED)


def _far_cores(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Yields findings for ranks that are bound to cores away from their GPU."""
    for facts in ranks:
        near = facts.get("gpu_cores", [])  # another version of hvdtrain does not report them
        if near and not {*near} & {*facts["cores"]}:
            what = (
                f"cores {number_ranges(facts['cores'])} are not next to the rank's GPU, which is "
                f"at {number_ranges(near)}"
            )
            fix = (
                "comm.bind=gpu, with ranks that the launcher does not bind: mpirun --bind-to none, "
                "srun --cpu-bind=none"
            )
            yield Finding("warning", what, describe_ranks([facts]), fix)


def _cores_text(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"


def _threads(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Yields a finding if OMP_NUM_THREADS overrides the number of threads with which ranks would
    share the cores fairly."""
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
    """Reports ranks of one machine that share a GPU, or some of them without a GPU."""
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
    """Returns the UUID; without one, the device's name and host."""
    identity = device["id"]
    return f"{identity} of {facts['host']}" if identity.startswith(("cuda", "xpu")) else identity


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
