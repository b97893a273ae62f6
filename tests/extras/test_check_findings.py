"""The findings of check from made-up facts: GPUs, cores, containers and clocks that the test
machine does not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from rank_threads import ThreadRank, in_threads

from hvdtrain.comm.cores.topology import number_ranges
from hvdtrain.comm.rendezvous import interfaces
from hvdtrain.comm.threads import ThreadRanks
from hvdtrain.errors import UserError
from hvdtrain.extras.check.command import RankInspection, _of_each_kind
from hvdtrain.extras.check.differences import differing_code, find_differences
from hvdtrain.extras.check.dry_run import AllreduceSpeed, slow_engine
from hvdtrain.extras.check.rank_facts import (
    Finding,
    RankFacts,
    apart_from,
    completed,
    container,
    describe_ranks,
    finding_of_error,
    launcher_mpi,
    most_severe_first,
)
from hvdtrain.extras.check.report import network_lines
from hvdtrain.extras.check.shortages import find_shortages, full_mesh

MIB = 2**20


def gpu(identity: str, visible: int = 4) -> dict[str, Any]:
    return {
        "name": "cuda:0",
        "model": "H100",
        "id": identity,
        "bytes": 80 * 10**9,
        "visible": visible,
    }


CPU = {"name": "cpu", "model": "", "id": "", "bytes": 0, "visible": 0}


def rank(number: int, host: str = "n1", **other: Any) -> RankFacts:
    """A faultless rank of four, two on each host; `other` facts replace the usual ones."""
    usual: dict[str, Any] = {
        "rank": number, "size": 4, "local_rank": number % 2, "local_size": 2, "launcher": "srun", "launcher_mpi": "Open MPI 5.0.11",  # noqa: E501
        "host": host, "machine": f"boot of {host}", "container": "", "pid": 100 + number, "versions": {"torch": "2.13"}, "code": "c",  # noqa: E501
        "config": "d", "cores": [number % 2], "gpu_cores": [], "host_cores": 2, "omp_num_threads": None, "shared_memory_bytes": [9**9, 9**9],  # noqa: E501
        "locked_memory_bytes": -1, "open_files": -1, "infiniband": [], "networks": {"lo": "127.0.0.1"}, "network_variables": {},  # noqa: E501
        "engine": "horovod", "device": CPU, "data": None,
        "libraries": {"mpi4py": "Open MPI v5.0.11", "horovod": "Open MPI v5.0.11", "nccl": True}, "clock_s": 1e9,  # noqa: E501
    }  # fmt: skip
    assert set(other) <= set(usual)
    return cast(RankFacts, usual | other)


def four(**of_rank_3: Any) -> list[RankFacts]:
    """Ranks 0 and 1 on n1, 2 and 3 on n2; facts of the last one are given."""
    return [rank(0), rank(1), rank(2, "n2"), rank(3, "n2", **of_rank_3)]


NO_HOROVOD = {"mpi4py": "Open MPI v5.0.11", "horovod": None, "nccl": None}


def test_the_networks_of_hosts_and_what_chooses_among_them() -> None:
    on = {"lo": "127.0.0.1", "ib0": "10.0.0.1"}
    ranks = [
        rank(0, networks=on),
        rank(1, networks=on),
        rank(2, "n2", networks={"lo": "127.0.0.1", "ib0": "10.0.0.2"}),
    ]
    choose = "the engine chooses (docs/clusters.md, Which network)"
    assert [*network_lines(ranks)] == [
        f"networks  n1 and 1 more hosts: lo 127.0.0.1, ib0 10.0.0.1; {choose}"
    ]
    other = rank(3, "n3", networks={}, network_variables={"GLOO_SOCKET_IFNAME": "eth1"})
    assert [*network_lines([*ranks, other])][1:] == [
        "networks  n3: none with an address; GLOO_SOCKET_IFNAME=eth1"
    ]
    assert interfaces()["lo"] == "127.0.0.1"


def test_four_faultless_ranks_have_no_findings() -> None:
    assert find_differences(four()) == [] and find_shortages(four()) == []


@pytest.mark.parametrize(
    ("ranks", "level", "what", "where", "fix"),
    [
        (
            four(versions={"torch": "2.12"}),
            "error",
            "torch is 2.12; other ranks: 2.13",
            "rank 3 on n2",
            "install the same environment",
        ),
        (
            four(versions={}),
            "error",
            "torch is not installed; other ranks: 2.13",
            "rank 3 on n2",
            "install the same environment",
        ),
        (
            four(libraries={"mpi4py": "MPICH 5", "horovod": "Open MPI v5.0.11", "nccl": True}),
            *(
                "error",
                "MPI of mpi4py is MPICH 5; other ranks: Open MPI v5.0.11",
                "rank 3 on n2",
                "install the same environment",
            ),
        ),
        (
            four(container="docker"),
            *(
                "warning",
                "some ranks run in a container (docker), the others outside of containers",
                "rank 3 on n2",
                "start all ranks",
            ),
        ),
        (
            [
                rank(
                    number,
                    f"n{number // 2}",
                    data={"training samples": 9 - number // 3, "seconds": number},
                )
                for number in range(4)
            ],
            *(
                "error",
                "training samples: 8 instead of 9",
                "rank 3 on n1",
                "copy the same data to every host",
            ),
        ),
        (
            [rank(0, machine="a"), rank(1, machine="b")],
            *(
                "warning",
                "2 machines have the host name n1",
                "rank 0; rank 1",
                "give each machine or container its own host name",
            ),
        ),
        (
            [rank(number, f"n{number // 2}", machine="one", cores=[number]) for number in range(4)],
            *(
                "note",
                "hosts n0, n1 are one machine (same boot id)",
                "ranks 0-1 on n0, 2-3 on n1",
                "none needed where",
            ),
        ),
        (
            [rank(0), rank(1, local_rank=0)],
            *(
                "warning",
                "the local ranks on n1 are 0, 0, not 0 to 1",
                "ranks 0-1 on n1",
                "start all ranks of a host with one launcher",
            ),
        ),
        (
            [
                rank(number, container="apptainer", launcher_mpi="Open MPI 4 or older")
                for number in range(2)
            ],
            *(
                "warning",
                "Open MPI 4 or older started ranks that use Open MPI v5.0.11 in a container",
                "ranks 0-1 on n1",
            ),
            "use the same major version on both sides: an image with Open MPI 4",
        ),
        (
            four(clock_s=1e9 + 7),
            "warning",
            "the clocks of the hosts differ by 7.0 s",
            "rank 3 on n2",
            "run a time service",
        ),
    ],
)
def test_differences_between_ranks(
    ranks: list[RankFacts], level: str, what: str, where: str, fix: str
) -> None:
    expect(find_differences(ranks), level, what, where, fix)


@pytest.mark.parametrize(
    ("ranks", "level", "what", "where", "fix"),
    [
        (
            [rank(0), rank(1, cores=[0])],
            "warning",
            "2 ranks share 1 core (0) of the machine's 2",
            "ranks 0-1 on n1",
            "mpirun --bind-to none",
        ),
        (
            [rank(number, cores=[0, 1]) for number in range(3)],
            *(
                "warning",
                "3 ranks share 2 cores (0-1) of the machine's 2",
                "ranks 0-2 on n1",
                "start fewer ranks on each host",
            ),
        ),
        (
            [rank(number, host_cores=64) for number in range(2)],
            *(
                "warning",
                "each rank may use 1 of 64 cores",
                "ranks 0-1 on n1",
                "mpirun --bind-to none",
            ),
        ),
        (
            [rank(number, cores=[0, 1, 2, 3], host_cores=4) for number in range(2)],
            "note",
            "2 ranks share the same 4 cores (0-3)",
            "ranks 0-1 on n1",
            "comm.bind=gpu",
        ),
        (
            [rank(0, cores=[0, 1]), rank(1, cores=[1, 2]), rank(2, "n2", cores=[1, 2])],
            "warning",
            "ranks are bound to cores that overlap in part: 0-1, 1-2",
            "ranks 0-1 on n1",
            "comm.bind=gpu",
        ),
        (
            [
                rank(0, cores=[0, 1], gpu_cores=[0, 1, 2, 3]),
                rank(1, cores=[2, 3], gpu_cores=[4, 5]),
            ],
            "warning",
            "cores 2-3 are not next to the rank's GPU, which is at 4-5",
            "rank 1 on n1",
            "comm.bind=gpu, with ranks that the launcher does not bind",
        ),
        (
            [
                rank(number, omp_num_threads="4", cores=[2 * number, 2 * number + 1], host_cores=4)
                for number in range(2)
            ],
            *(
                "warning",
                "OMP_NUM_THREADS=4 starts 8 threads on 4 cores",
                "ranks 0-1 on n1",
                "unset it, or OMP_NUM_THREADS=2",
            ),
        ),
        (
            [rank(number, device=gpu("GPU-1", visible=1)) for number in range(2)],
            *(
                "error",
                "2 ranks train on one GPU (H100, GPU-1), which NCCL refuses",
                "ranks 0-1 on n1",
            ),
            "start as many ranks on a host as it has GPUs (each of these ranks sees 1)",
        ),
        (
            [
                rank(number, device=gpu("GPU-1"), engine="mpi", libraries=NO_HOROVOD)
                for number in range(2)
            ],
            *(
                "warning",
                "2 ranks train on one GPU (H100, GPU-1)",
                "ranks 0-1 on n1",
                "start as many ranks",
            ),
        ),
        (
            [rank(0, device=gpu("GPU-1")), rank(1)],
            *(
                "warning",
                "1 of 2 ranks of this machine train on the CPU, the others on GPUs",
                "rank 1 on n1",
                "make a GPU visible to each rank",
            ),
        ),
        (
            [
                rank(
                    number,
                    device=gpu(f"GPU-{number}"),
                    libraries={"mpi4py": "", "horovod": "x", "nccl": False},
                )
                for number in range(2)
            ],
            *(
                "warning",
                "Horovod was built without NCCL",
                "ranks 0-1 on n1",
                "python -m hvdtrain.cli.horovod --nccl",
            ),
        ),
        (
            [
                rank(number, container="docker", shared_memory_bytes=[64 * MIB, 60 * MIB])
                for number in range(2)
            ],
            *(
                "warning",
                "/dev/shm is small: 60 of its 64 MiB are free; 2 ranks need 128 MiB",
                "n1, in a container (docker)",
            ),
            "docker or podman: --shm",
        ),
        (
            four(infiniband=["mlx5_0"], locked_memory_bytes=65536),
            *(
                "warning",
                "InfiniBand (mlx5_0) with a limit of 64 KiB of locked memory",
                "rank 3 on n2",
                "ulimit -l unlimited",
            ),
        ),
        (
            four(open_files=256),
            "warning",
            "the limit of open files is 256; 4 ranks may need 288",
            "rank 3 on n2",
            "ulimit -n 4096",
        ),
    ],
)
def test_shortages_of_shared_resources(
    ranks: list[RankFacts], level: str, what: str, where: str, fix: str
) -> None:
    expect(find_shortages(ranks), level, what, where, fix)


def expect(found: list[Finding], level: str, what: str, where: str, fix: str) -> None:
    """One finding, and no other."""
    assert len(found) == 1, found
    assert found[0].level == level and found[0].where == where
    assert found[0].what.startswith(what) and found[0].fix.startswith(fix), found


def test_gpus_of_two_hosts_without_uuids_are_two() -> None:
    assert (
        find_shortages([rank(0, device=gpu("cuda:0")), rank(2, "n2", device=gpu("cuda:0"))]) == []
    )


def of_speed(bytes_per_s: float) -> AllreduceSpeed:
    return {"latency_s": 1.0, "seconds": 1.0, "bytes_per_s": bytes_per_s}


def test_an_engine_slower_than_half_of_mpi() -> None:
    fast = of_speed(10e6)
    slow = of_speed(4.9e6)
    what = "the horovod engine reduces 5 MB/s, plain MPI 10 MB/s"
    where = "an allreduce of 16 MiB over all ranks"
    expect(
        slow_engine("horovod", {"engine": slow, "mpi": fast}),
        "warning",
        what,
        where,
        "give Horovod's thread a core",
    )
    assert slow_engine("horovod", {"engine": fast, "mpi": slow}) == []
    assert (
        slow_engine("mpi", {"engine": slow, "mpi": None})
        == slow_engine("single", {"engine": None, "mpi": None})
        == []
    )


def test_gloos_full_mesh_is_said_where_there_are_many_ranks() -> None:
    what = (
        "Gloo connects each of 8,192 ranks with each: 33,550,336 connections, 8,191 of each rank, "
        "for each group"
    )
    expect(
        full_mesh("torchdist", 8192),
        "note",
        what,
        "comm.engine=torchdist",
        "comm.engine=mpi or horovod",
    )
    assert full_mesh("torchdist", 1023) == full_mesh("mpi", 8192) == []


class CountsSent(ThreadRank):
    """Notes what this rank gives."""

    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        super().__init__(ranks, rank)
        self.sent = list[Any]()

    def allgather_object(self, thing: Any) -> list[Any]:
        self.sent.append(thing)
        return super().allgather_object(thing)


def test_the_first_rank_of_each_kind_alone_sends_what_it_has() -> None:
    digests = ["a", "b", "a", "b", "c"]

    def of_rank(rank: ThreadRank) -> tuple[list[dict[str, str]], list[Any]]:
        communicator = CountsSent(rank._ranks, rank.rank)
        return _of_each_kind(communicator, digests, {"file": digests[rank.rank]}), communicator.sent

    found = in_threads(5, of_rank)
    assert [of_all for of_all, _ in found] == [[{"file": digest} for digest in digests]] * 5
    assert [sent for _, sent in found] == [
        [{"file": "a"}],
        [{"file": "b"}],
        [None],
        [None],
        [{"file": "c"}],
    ]


def test_code_that_differs_is_named_by_file() -> None:
    usual = {"core/progress.py": "a", "training/loop.py": "b"}
    other = {"core/progress.py": "c", "mine.py": "d"}
    expect(
        differing_code(four(), [usual, usual, usual, other]),
        *(
            "error",
            "hvdtrain's code differs: core/progress.py, mine.py (only there), training/loop.py "
            "(missing)",
        ),
        *("rank 3 on n2; 3 other ranks agree", "use one installation"),
    )
    many = [{f"{number}.py": "a" for number in range(6)} | {"mine.py": "b"}] * 3 + [{}]
    assert differing_code(four(), many)[0].what.endswith("3.py (missing) and 3 more")


def test_a_failed_attempt_is_a_finding_of_its_rank() -> None:
    inspection = RankInspection(rank(3, "n2"))

    def refuse() -> None:
        raise UserError("no data", "data.root, default", "give data.root=")

    assert inspection.attempt(refuse) is None and inspection.attempt(lambda: 7) == 7
    inspection.attempt(lambda: int("x"))
    user_error, unexpected = inspection.findings
    assert user_error == Finding(
        "error", "no data", "rank 3 on n2; data.root, default", "give data.root="
    )
    assert unexpected.what == "ValueError: invalid literal for int() with base 10: 'x'"
    assert unexpected.where.startswith(f"rank 3 on n2, {__file__}:")
    assert finding_of_error(UserError("only what"), "rank 0 on n1") == Finding(
        "error", "only what", "rank 0 on n1", ""
    )


def test_a_rank_sends_what_of_its_facts_is_not_rank_0s() -> None:
    first = rank(0, data={"training samples": 9, "seconds": 1.5})
    others = [
        rank(1, data={"training samples": 9, "seconds": 0.1}),
        rank(2, data=None, versions={}, libraries=NO_HOROVOD),  # without names that rank 0 has
        rank(
            3,
            data={"training samples": 8, "seconds": 2, "more": [1, {"x": 2}]},
            versions={"torch": "2.13", "jax": "0.5"},
            infiniband=["ib0"],
        ),
    ]
    for other in others:
        sent = json.loads(json.dumps(apart_from(first, other)))
        assert completed(first, sent) == other
    assert apart_from(first, first) == {}
    assert apart_from(first, others[0]) == {
        "rank": [1],
        "local_rank": [1],
        "pid": [101],
        "cores": [[1]],
        "data": {"seconds": [0.1]},
    }


def test_errors_come_first_and_once() -> None:
    note = Finding("note", "n", "", "")
    warning = Finding("warning", "w", "", "")
    error = Finding("error", "e", "", "")
    assert most_severe_first([note, error, warning, error]) == [error, warning, note]


def test_ranks_are_named_by_ranges_and_hosts() -> None:
    assert number_ranges([5, 0, 1, 2, 9, 8]) == "0-2,5,8-9"
    assert (
        describe_ranks([rank(0), rank(1), rank(4), rank(2, "n2")]) == "ranks 0-1,4 on n1, 2 on n2"
    )
    assert describe_ranks(rank(number, f"n{number}") for number in range(10)).endswith(
        "7 on n7 and 2 more hosts"
    )


def test_containers_are_recognized(tmp_path: Path) -> None:
    assert container({}, tmp_path) == ""
    assert container({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path) == "kubernetes"
    (tmp_path / ".dockerenv").touch()
    assert container({}, tmp_path) == "docker"
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.containerenv").touch()
    assert container({}, tmp_path) == "podman"
    assert container({"SINGULARITY_CONTAINER": "/x.sif"}, tmp_path) == "singularity"
    assert (
        container({"APPTAINER_CONTAINER": "/x.sif", "SINGULARITY_CONTAINER": "/x.sif"}, tmp_path)
        == "apptainer"
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(
            ("openmpi4", "Open MPI 4 or older"),
            ("openmpi5", "Open MPI 5.0.11"),
            ("mpich4", "MPICH"),
            ("mpich5", "MPICH"),
        ),
        *(
            ("intelmpi", "Intel MPI"),
            ("srun-none", "srun without PMI"),
            ("srun-pmi2", "srun with PMI2"),
            ("srun-pmix", "srun with PMIx"),
        ),
        *(
            ("sbatch-mpirun", "Open MPI 5.0.11"),
            ("sbatch-mpich5", "MPICH"),
            ("sbatch-intelmpi", "Intel MPI"),
            ("torchrun", ""),
        ),
        ("horovodrun", ""),
    ],
)
def test_the_mpi_of_a_recorded_launcher(name: str, expected: str) -> None:
    recorded = json.loads(
        (Path(__file__).parents[1] / "support" / f"launchers/{name}.json").read_text()
    )
    assert {
        launcher_mpi({**recorded["environ"], **process["environ"]})
        for process in recorded["processes"]
    } == {expected}
