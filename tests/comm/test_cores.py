"""Which cores each rank gets (comm.bind), on simulated /sys trees: two sockets, 4 and 8 GPUs, and
LUMI's numbering; and how this process is bound."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest
from rank_threads import ThreadRank, in_threads

from hvdtrain.comm.cores import bind as binding
from hvdtrain.comm.cores.bind import NO_GPU, bind_alone, bound, lines_of_seats, usable_cores
from hvdtrain.comm.cores.shares import KEPT, Share, Usable, divide, split_cores
from hvdtrain.comm.cores.topology import Topology, number_ranges, read_ranges
from hvdtrain.comm.driver_files import DriverFiles
from hvdtrain.comm.launcher_variables import Placement

# GPU 0 to 7 of a LUMI node: the NUMA node of each, where NUMA nodes 0 to 3 have GPUs 4 5, 2 3, 6 7,
# 0 1 (LUMI's documentation, "GPU nodes - LUMI-G")
LUMI = (3, 3, 1, 1, 0, 0, 2, 2)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def address(gpu: int) -> str:
    return f"0000:{0x10 + gpu:02x}:00.0"


def tree(root: Path, nodes: Mapping[int, str], gpus: Sequence[int], threads: int = 0) -> Path:
    """/sys and /proc of a host with these cores in NUMA nodes, and GPUs at these nodes; -1: /sys
    does not know the node. threads: core i and core i + threads are one physical core."""
    system = root / "sys/devices/system"
    every = {core for cores in nodes.values() for core in read_ranges(cores)}
    for node, cores in nodes.items():
        write(system / f"node/node{node}/cpulist", f"{cores}\n")
    for core in every:
        siblings = {core % threads, core % threads + threads} if threads else {core}
        write(
            system / f"cpu/cpu{core}/topology/thread_siblings_list", f"{number_ranges(siblings)}\n"
        )
    for gpu, node in enumerate(gpus):
        device = root / "sys/bus/pci/devices" / address(gpu)
        write(device / "numa_node", f"{node}\n")
        write(device / "local_cpulist", f"{nodes.get(node, number_ranges(every))}\n")
        facts = f"Model: \t\t H100\nGPU UUID: \t GPU-{gpu}{gpu}\nDevice Minor: \t {gpu}\n"
        write(root / "proc/driver/nvidia/gpus" / address(gpu) / "information", facts)
        write(root / f"dev/nvidia{gpu}", "")
    return root


def divided(root: Path, mask: str, ranks: int, bind: str = "gpu") -> list[str]:
    """The cores of each rank, and no note: rank i has GPU i."""
    host = Topology(root)
    cores = read_ranges(mask)
    files = DriverFiles.under(root)
    near = [host.near(files.address_of(rank, {}) or "") * (bind == "gpu") for rank in range(ranks)]
    shares = divide([Usable(cores, each) for each in near], host)
    assert all(share.is_bound and not share.note for share in shares), shares
    parts = [set(share.cores) for share in shares]
    assert len(set().union(*parts)) == sum(map(len, parts)), "no core has two ranks"
    return [number_ranges(share.cores) for share in shares]


def test_two_sockets_with_four_gpus(tmp_path: Path) -> None:
    """Cores 0 to 15, of two threads each; GPUs 0 and 1 are at socket 1, 2 and 3 at socket 0."""
    root = tree(tmp_path, {0: "0-7,16-23", 1: "8-15,24-31"}, [1, 1, 0, 0], threads=16)
    assert divided(root, "0-31", 4) == ["8-11,24-27", "12-15,28-31", "0-3,16-19", "4-7,20-23"]
    assert divided(root, "0-31", 4, "numa") == ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"]  # noqa: E501  # fmt: skip
    # a cgroup of two threads of the same core, and one of each other core
    assert divided(root, "0-3,8-11,16", 4) == ["8-9", "10-11", "0-1,16", "2-3"]
    assert divided(root, "0-31", 2, "numa") == ["0-7,16-23", "8-15,24-31"]
    # 16 threads of 8 cores, for 16 ranks: by threads
    assert divided(root, "0-7,16-23", 16, "numa")[:3] == ["0", "16", "1"]


def test_cores_numbered_alternately(tmp_path: Path) -> None:
    """As some BIOSes number them: even cores at socket 0, odd ones at socket 1."""
    root = tree(tmp_path, {0: "0,2,4,6", 1: "1,3,5,7"}, [0, 0, 1, 1])
    assert divided(root, "0-7", 4, "numa") == ["0,2", "4,6", "1,3", "5,7"]
    assert divided(root, "0-7", 4) == ["0,2", "4,6", "1,3", "5,7"]
    assert [*map(len, map(read_ranges, divided(root, "0-7", 3, "numa")))] == [2, 3, 3]


def test_eight_gpus_as_lumi_numbers_them(tmp_path: Path) -> None:
    """Without the first core of each 8, which LUMI keeps for the system: the map of its
    documentation, c49-55 for GPU 0, c57-63, c17-23, c25-31, c1-7, c9-15, c33-39, c41-47."""
    nodes = {node: f"{16 * node}-{16 * node + 15},{64 + 16 * node}-{79 + 16 * node}" for node in range(4)}  # noqa: E501  # fmt: skip
    root = tree(tmp_path, nodes, LUMI, threads=64)
    mask = "1-7,9-15,17-23,25-31,33-39,41-47,49-55,57-63"
    assert divided(root, mask, 8) == [
        *("49-55", "57-63", "17-23", "25-31", "1-7", "9-15", "33-39", "41-47"),
    ]
    # by the order of ranks alone, GPU 0 would be far away
    assert divided(root, mask, 8, "numa")[0] == "1-7"
    assert divided(root, "0-127", 8)[0] == "48-55,112-119"


def test_eight_numa_nodes_in_lumis_order(tmp_path: Path) -> None:
    """Node n is next to GPU (4, 5, 2, 3, 6, 7, 0, 1)[n]."""
    order = (4, 5, 2, 3, 6, 7, 0, 1)
    nodes = {node: f"{8 * node}-{8 * node + 7}" for node in range(8)}
    root = tree(tmp_path, nodes, [order.index(gpu) for gpu in range(8)])
    found = divided(root, "0-63", 8)
    assert [found[gpu] for gpu in order] == [nodes[node] for node in range(8)]


def test_masks_that_the_launcher_gave_are_never_widened(tmp_path: Path) -> None:
    root = tree(tmp_path, {0: "0-7", 1: "8-15"}, [0, 1])
    host = Topology(root)
    near = [host.near(address(gpu)) for gpu in range(2)]
    own = [Usable((0, 1), near[0]), Usable((2, 3), near[1])]
    assert divide(own, host) == [
        Share((0, 1), KEPT),
        Share((2, 3), f"{KEPT}, but 2-3 are not next to its GPU, which is at 8-15"),
    ]
    crossing = divide([Usable((0, 1)), Usable((1, 2)), Usable((4,))], host)
    assert [share.is_bound for share in crossing] == [False, False, True]
    assert crossing[0] == Share((0, 1), "not bound: the launcher gave ranks cores that overlap, 0-1 and 1-2", is_bound=False)  # noqa: E501  # fmt: skip
    # two ranks on each socket, as `mpirun --map-by socket` binds them
    by_socket = [Usable(tuple(range(8)))] * 2 + [Usable(tuple(range(8, 16)))] * 2
    assert [number_ranges(share.cores) for share in divide(by_socket, host)] == [
        *("0-3", "4-7", "8-11", "12-15"),
    ]
    # the mask of both ranks has no core at GPU 1
    one_socket = divide([Usable((0, 1, 2, 3), each) for each in near], host)
    assert [share.cores for share in one_socket] == [(0, 1), (2, 3)]
    assert one_socket[1].note == "the cores next to its GPU (8-15) are not among those that it may use; it has a share of 0-3"  # noqa: E501  # fmt: skip


def test_what_cannot_be_divided_is_left_and_said(tmp_path: Path) -> None:
    host = Topology(tree(tmp_path, {0: "0-1"}, [-1]))
    three = divide([Usable((0, 1))] * 3, host)
    assert three == [Share((0, 1), "not bound: 3 ranks share 2 cores", is_bound=False)] * 3
    assert divide([Usable((0, 1), (), NO_GPU)], host) == [
        Share((0, 1), f"{NO_GPU}; it has a share of 0-1")
    ]
    assert host.near(address(0)) == () and host.near("../../etc/passwd") == ()
    # three GPUs beside one of 4 cores' worth: all ranks divide all cores
    near_one = divide([Usable((0, 1, 2, 3), (0,))] * 2, Topology(tmp_path / "nothing"))
    assert [share.cores for share in near_one] == [(0, 1), (2, 3)]
    assert near_one[0].note == "too few cores are next to a GPU; it has a share of 0-3"
    # one rank has a GPU, the other gets what it leaves
    mixed = divide([Usable((0, 1, 2, 3), (0, 1)), Usable((0, 1, 2, 3))], Topology(tmp_path))
    assert [share.cores for share in mixed] == [(0, 1), (2, 3)]
    assert split_cores(frozenset(), 1, host) == []


def test_the_gpu_of_a_local_rank(tmp_path: Path) -> None:
    root = tree(tmp_path, {0: "0-3"}, [0, 0, 0])
    visible = "CUDA_VISIBLE_DEVICES"
    for listed, rank, expected in (
        (None, 1, address(1)),
        (None, 4, address(1)),
        ("2,0", 0, address(2)),
        ("GPU-11,GPU-0", 0, address(1)),
        ("GPU-11", 3, address(1)),
        ("MIG-1", 0, None),
        ("7", 0, None),
        ("-1", 0, None),
    ):
        environ = {} if listed is None else {visible: listed}
        assert DriverFiles.under(root).address_of(rank, environ) == expected, listed
    # of a batch system that shows all GPUs and permits one, which CUDA then numbers 0
    for gpu in (0, 2):
        (root / f"dev/nvidia{gpu}").unlink()
    assert DriverFiles.under(root).address_of(0, {visible: "0"}) == address(1)
    assert DriverFiles.under(tmp_path / "no GPU").address_of(0, {}) is None


def test_amds_gpus_in_the_order_of_their_driver(tmp_path: Path) -> None:
    """Node 0 is a processor; nodes 1 and 2 are at c1:00.0 and at 0001:05:02.0."""
    for node, simds, domain, place, minor in ((0, 0, 0, 0, 0), (1, 440, 0, 0xC100, 128), (2, 440, 1, 0x0510, 129)):  # noqa: E501  # fmt: skip
        facts = f"simd_count {simds}\nlocation_id {place}\ndomain {domain}\ndrm_render_minor {minor}\n"  # noqa: E501  # fmt: skip
        write(tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}/properties", facts)
        write(tmp_path / f"dev/dri/renderD{minor}", "")
    files = DriverFiles.under(tmp_path)
    assert files.amd() == files.visible_amd({}) == 2
    assert files.address_of(0, {}) == "0000:c1:00.0"
    assert files.address_of(1, {}) == "0001:05:02.0"
    assert files.address_of(0, {"ROCR_VISIBLE_DEVICES": "1"}) == "0001:05:02.0"
    assert files.address_of(0, {"HIP_VISIBLE_DEVICES": "1"}) == "0001:05:02.0"


class Kernel:
    """A stand-in for the kernel's affinity of processes, each of which is a thread here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cores: str) -> None:
        self._first = set(read_ranges(cores))
        self._of_process = threading.local()
        self.refuses = threading.local()
        monkeypatch.setattr(os, "sched_getaffinity", self.get)
        monkeypatch.setattr(os, "sched_setaffinity", self.set)

    def get(self, thread: int) -> set[int]:
        return set(getattr(self._of_process, "cores", self._first)) if thread == 0 else set()

    def set(self, thread: int, cores: Collection[int]) -> None:
        assert thread == 0 and {*cores} <= self._first, "never wider than the launcher's mask"
        if getattr(self.refuses, "now", False):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._of_process.cores = set(cores)


def test_ranks_agree_on_their_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks of one host: each has its own part inside, and the former cores after it."""
    root = tree(tmp_path, {0: "0-3", 1: "4-7"}, [1, 0, 1, 0])
    kernel = Kernel(monkeypatch, "0-7")

    def rank(own: ThreadRank) -> tuple[list[str], str, str]:
        kernel.refuses.now = own.rank == 3
        with bound("gpu", own, lambda: address(own.rank), Topology(root)) as seats:
            inside = number_ranges(usable_cores())
        return lines_of_seats("gpu", seats), inside, number_ranges(usable_cores())

    found = in_threads(4, rank)
    assert [inside for _, inside, _ in found] == ["4-5", "0-1", "6-7", "0-7"]
    assert {after for *_, after in found} == {"0-7"}
    (lines, *_), *others = found
    host = os.uname().nodename
    assert lines == [
        f"comm.bind=gpu: {host}: rank 0 on cores 4-5, rank 1 on cores 0-1, rank 2 on cores 6-7",
        "comm.bind=gpu: rank 3: not bound: Invalid argument, cores 2-3",
    ]
    assert all(other[0] == lines for other in others)


def test_threads_of_this_process_move_and_return() -> None:
    """In the kernel: a thread that started before, and one that started inside; one with a mask of
    its own stays."""
    cores = usable_cores()
    if len(cores) < 2:
        pytest.skip("one core: nothing to bind to")
    first, *others = cores
    started, go_on = threading.Barrier(3), threading.Event()
    masks: dict[str, set[int]] = {}

    def wait(name: str, own: set[int] | None = None) -> None:
        if own:
            os.sched_setaffinity(0, own)
        started.wait()
        go_on.wait()
        masks[name] = os.sched_getaffinity(0)

    threads = [
        threading.Thread(target=wait, args=("before",)),
        threading.Thread(target=wait, args=("chosen", {others[0]})),
    ]
    for thread in threads:
        thread.start()
    started.wait()
    try:
        assert binding._move_threads(cores, {first}) == ""
        inside = threading.Thread(target=lambda: masks.update(inside=os.sched_getaffinity(0)))
        inside.start()
        inside.join()
        go_on.set()
        for thread in threads:
            thread.join()
    finally:
        go_on.set()
        assert binding._move_threads({first}, cores) == ""
    assert masks == {"before": {first}, "inside": {first}, "chosen": {others[0]}}
    assert usable_cores() == cores
    assert "cores 99999" in binding._move_threads(cores, {99999})


def test_a_script_is_bound_without_the_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree(tmp_path, {0: "0-3", 1: "4-7"}, [1, 0])
    kernel = Kernel(monkeypatch, "0-7")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    place = Placement(0, 4, 0, 2, "mpirun")
    host = os.uname().nodename
    assert bind_alone("none", place, root) == []
    assert bind_alone("gpu", place, root) == [
        f"comm.bind=gpu: {host}: rank 0 on cores 4-7, rank 1 on cores 0-3"
    ]
    assert usable_cores() == (4, 5, 6, 7)
    kernel.set(0, range(8))
    assert bind_alone("numa", Placement(1, 4, 1, 2, "mpirun"), root) == []
    assert usable_cores() == (4, 5, 6, 7)


def test_lines_name_what_differs() -> None:
    def seat(cores: str, nodes: int = 1, note: str = "", host: str = "n1") -> binding.Seat:
        return binding.Seat(host, cores, nodes, note, True)

    assert lines_of_seats("none", []) == []
    seats = [seat("0-4"), seat("5-9", 2), seat("10-15"), seat("0-4", host="n2")]
    assert lines_of_seats("numa", seats) == [
        "comm.bind=numa: n1: rank 0 on cores 0-4, rank 1 on cores 5-9, rank 2 on cores 10-15, "
        "and 1 more ranks",
        "comm.bind=numa: rank 1: cores of several NUMA nodes, which the ranks do not divide evenly",
    ]
    assert lines_of_seats("numa", [seat("0", note=KEPT), seat("1", note=KEPT)])[1:] == [
        f"comm.bind=numa: {KEPT}"
    ]


def test_lists_of_the_kernel() -> None:
    assert read_ranges("0-3,8\n") == (0, 1, 2, 3, 8) and read_ranges("") == ()
    with pytest.raises(ValueError, match="invalid literal"):
        read_ranges("all")
