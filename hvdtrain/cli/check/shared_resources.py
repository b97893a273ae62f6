"""What the ranks of one machine share, and whether it is enough: cores, GPUs, shared memory, limits; and how fast they talk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hvdtrain.cli.check.findings import Facts, Finding, grouped, ranks_words, spans

SHARED_BYTES = 64 * 2**20  # of /dev/shm for each rank of a host: MPI's and NCCL's own memory between ranks, and data loaders
SLOW = 0.5  # an engine with less than this part of MPI's bytes a second
_NO_BIND = "mpirun --bind-to none, or --map-by slot:PE=N for N cores each; srun --cpus-per-task=N"


def shares(everyone: Sequence[Facts]) -> list[Finding]:
    """Every finding about one machine."""
    found: list[Finding] = []
    for ranks in grouped(everyone, lambda facts: facts["machine"] or facts["host"]).values():
        found += [*_cores(ranks), *_threads(ranks), *_gpus(ranks)]
    for ranks in grouped(everyone, lambda facts: facts["host"]).values():  # containers have limits of their own
        found += [*_shared_memory(ranks), *_limits(ranks, len(everyone))]
    return [*found, *_nccl(everyone)]


def speed(engine: str, ours: Mapping[str, float] | None, mpi: Mapping[str, float] | None) -> list[Finding]:
    """An engine that is slow where MPI is not."""
    if not (ours and mpi) or ours["bytes_per_s"] >= SLOW * mpi["bytes_per_s"]:
        return []
    what = f"the {engine} engine adds up {ours['bytes_per_s'] / 1e6:,.0f} MB/s, plain MPI {mpi['bytes_per_s'] / 1e6:,.0f} MB/s"
    fix = {
        "horovod": "a core for its own thread (more than one for each rank: --bind-to none); comm.engine=mpi for comparison",
        "torchdist": "host memory goes through Gloo and TCP here: comm.engine=horovod or mpi; on GPUs NCCL does it",
    }.get(engine, "comm.engine=mpi for comparison")
    return [Finding("warning", what, "an allreduce of 16 MiB over all ranks", fix)]


def _cores(ranks: Sequence[Facts]) -> Iterator[Finding]:
    """More ranks than cores among those that may use the same ones."""
    if len(ranks) < 2:
        return
    host_cores = max(facts["host_cores"] for facts in ranks)
    told: set[int] = set()
    for cores in sorted({tuple(facts["cores"]) for facts in ranks}, key=len):
        inside = [facts for facts in ranks if {*facts["cores"]} <= {*cores}]
        if len(inside) <= len(cores) or {facts["rank"] for facts in inside} <= told:
            continue
        told |= {facts["rank"] for facts in inside}
        what = f"{len(inside)} ranks share {_count(cores)} ({spans(cores)}) of the {host_cores} of their machine"
        fix = _NO_BIND if len(cores) < host_cores else "fewer ranks on each host; or other hosts"
        yield Finding("warning", what, ranks_words(inside), fix)
    lonely = [facts for facts in ranks if len(facts["cores"]) == 1 and facts["rank"] not in told]
    if lonely and host_cores > len(ranks):
        what = f"each rank may use 1 of {host_cores} cores: PyTorch, the engine's thread and reading of data are all on it"
        yield Finding("warning", what, ranks_words(lonely), _NO_BIND)


def _count(cores: Sequence[int]) -> str:
    return "1 core" if len(cores) == 1 else f"{len(cores)} cores"


def _threads(ranks: Sequence[Facts]) -> Iterator[Finding]:
    """OMP_NUM_THREADS wins over the fair share that a rank would take by itself."""
    asking = [facts for facts in ranks if str(facts["omp_num_threads"] or "").isdecimal() and int(facts["omp_num_threads"]) > 1]
    cores = {core for facts in ranks for core in facts["cores"]}
    threads = sum(int(facts["omp_num_threads"]) for facts in asking) + len(ranks) - len(asking)
    if asking and threads > len(cores):
        what = f"OMP_NUM_THREADS={asking[0]['omp_num_threads']} makes {threads} threads on {_count([*cores])}"
        yield Finding("warning", what, ranks_words(asking), f"unset it, or OMP_NUM_THREADS={max(1, len(cores) // len(ranks))}")


def _gpus(ranks: Sequence[Facts]) -> Iterator[Finding]:
    able = [facts for facts in ranks if facts["device"] and facts["device"]["id"]]
    for identity, users in grouped(able, _gpu).items():
        if len(users) > 1:
            refuses = any(facts["engine"] == "torchdist" or facts["libraries"]["nccl"] for facts in users)
            seen = max(facts["device"]["visible"] for facts in users)
            what = f"{len(users)} ranks train on one GPU ({users[0]['device']['model']}, {identity}){', which NCCL refuses' * refuses}"
            fix = f"as many ranks on a host as it has GPUs (each of these sees {seen}); srun --gpus-per-task=1, mpirun --map-by ppr:N:node"
            yield Finding("error" if refuses else "warning", what, ranks_words(users), fix)
    without = [facts for facts in ranks if facts["device"] and facts["device"]["name"] == "cpu"]
    if able and without:
        what = f"{len(without)} of {len(ranks)} ranks here train on the CPU, the others on GPUs"
        yield Finding(
            "warning", what, ranks_words(without), "let each rank see its GPU: CUDA_VISIBLE_DEVICES; --nv or --gpus of the container"
        )


def _gpu(facts: Facts) -> str:
    identity = str(facts["device"]["id"])
    return identity if not identity.startswith("cuda") else f"{identity} of {facts['host']}"


def _nccl(everyone: Sequence[Facts]) -> Iterator[Finding]:
    slow = [facts for facts in everyone if facts["device"] and facts["device"]["id"] and facts["libraries"]["nccl"] is False]
    if slow:
        fix = "python -m hvdtrain.cli.horovod --nccl builds it; or comm.engine=torchdist, which brings its own"
        yield Finding("warning", "Horovod was built without NCCL: gradients go through the hosts' memory", ranks_words(slow), fix)


def _shared_memory(ranks: Sequence[Facts]) -> Iterator[Finding]:
    facts = ranks[0]
    need, room = SHARED_BYTES * len(ranks), facts["shared_memory_bytes"]
    if len(ranks) > 1 and (room is None or room[1] < need):
        has = "there is none" if room is None else f"{room[1] / 2**20:,.0f} of its {room[0] / 2**20:,.0f} MiB are free"
        what = f"/dev/shm is small: {has}; {len(ranks)} ranks want {need // 2**20} MiB for MPI, NCCL and data loaders"
        fix = "docker or podman: --shm-size=8g or --ipc=host; Kubernetes: an emptyDir of medium Memory at /dev/shm; else clean it up"
        where = f"{facts['host']}, in a container ({facts['container']})" if facts["container"] else facts["host"]
        yield Finding("warning", what, where, fix)


def _limits(ranks: Sequence[Facts], size: int) -> Iterator[Finding]:
    pinned = [facts for facts in ranks if facts["infiniband"] and 0 <= facts["locked_memory_bytes"] < SHARED_BYTES]
    if pinned:
        what = f"InfiniBand ({', '.join(pinned[0]['infiniband'])}) with {pinned[0]['locked_memory_bytes'] // 1024} KiB of locked memory"
        fix = "ulimit -l unlimited: in limits.conf, for sshd and slurmd as well (LimitMEMLOCK=infinity); docker: --ulimit memlock=-1"
        yield Finding("warning", what, ranks_words(pinned), fix)
    need = 256 + 8 * size
    few = [facts for facts in ranks if 0 <= facts["open_files"] < need]
    if few:
        what = f"{few[0]['open_files']} open files are allowed; {size} ranks may need {need}"
        yield Finding("warning", what, ranks_words(few), f"ulimit -n {max(4096, 2 * need)}")
