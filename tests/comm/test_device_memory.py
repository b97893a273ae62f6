"""comm.device_memory: what MPI libraries say of GPU memory, what ranks make of it, and the order of
copies and collectives."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from pathlib import Path

import pytest
import torch
from late_gpu import HOST, LateGpu
from pool import alone, on_ranks
from rank_threads import ThreadRank, in_threads
from ranks import needs_mpirun, python

from hvdtrain.comm.device_memory import Answer, DeviceMemoryChoice, ask, choose
from hvdtrain.comm.staging import Direct, Staged, Ways
from hvdtrain.errors import UserError

OPEN_MPI = "Open MPI v5.0.11, package: x, ident: 5.0.11\0"
MPICH = "MPICH Version:      4.2.3\nMPICH Release date: x"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.28.2 (ANL base 3.4a2)"
MVAPICH = "MVAPICH2 Version      :\t2.3.7\n"
INTEL = "Intel(R) MPI Library 2021.18 for Linux* OS\n"
NOTHING = "int MPI_Init(void) { return 0; }"
QUERY = "int MPIX_Query_{}_support(void) {{ return {}; }}"
BY_KIND = "int MPIX_GPU_query_support(int kind, int *found) { *found = kind == %d; return %d; }"
NOT_CALLED = "#include <stdlib.h>\nint MPIX_Query_cuda_support(void) { abort(); }"

_numbers = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("libraries")


def library(folder: Path, code: str) -> ctypes.CDLL:
    """A real one, of this machine's C compiler."""
    path = folder / f"libmpi{next(_numbers)}.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-o", path, "-"], input=code, text=True, check=True
    )
    return ctypes.CDLL(str(path))


@pytest.mark.parametrize(
    ("code", "version", "environ", "kind", "takes_it", "how"),
    [
        (
            QUERY.format("cuda", 1),
            OPEN_MPI,
            {},
            "cuda",
            True,
            "MPIX_Query_cuda_support() of Open MPI v5.0.11 says yes",
        ),
        (
            QUERY.format("cuda", 0),
            OPEN_MPI,
            {},
            "cuda",
            False,
            "MPIX_Query_cuda_support() of Open MPI v5.0.11 says no",
        ),
        (
            QUERY.format("cuda", 1),
            OPEN_MPI,
            {},
            "rocm",
            None,
            "Open MPI v5.0.11 does not report whether it takes GPU memory",
        ),
        (
            QUERY.format("rocm", 1),
            OPEN_MPI,
            {},
            "rocm",
            True,
            "MPIX_Query_rocm_support() of Open MPI v5.0.11 says yes",
        ),
        (
            NOTHING,
            OPEN_MPI,
            {"MPICH_GPU_SUPPORT_ENABLED": "1"},
            "cuda",
            None,
            "Open MPI v5.0.11 does not report whether it takes GPU memory",
        ),
        (
            BY_KIND % (0, 0),
            MPICH,
            {},
            "cuda",
            True,
            "MPIX_GPU_query_support() of MPICH Version: 4.2.3 says yes",
        ),
        (
            BY_KIND % (0, 0),
            MPICH,
            {},
            "rocm",
            False,
            "MPIX_GPU_query_support() of MPICH Version: 4.2.3 says no",
        ),
        (
            BY_KIND % (2, 0),
            MPICH,
            {},
            "rocm",
            True,
            "MPIX_GPU_query_support() of MPICH Version: 4.2.3 says yes",
        ),
        (
            BY_KIND % (0, 1),
            MPICH,
            {},
            "cuda",
            False,
            "MPIX_GPU_query_support() of MPICH Version: 4.2.3 says no",
        ),
        (
            NOT_CALLED,
            CRAY,
            {"MPICH_GPU_SUPPORT_ENABLED": "1"},
            "cuda",
            True,
            "with MPICH_GPU_SUPPORT_ENABLED=1",
        ),
        (
            NOT_CALLED,
            CRAY,
            {"MPICH_GPU_SUPPORT_ENABLED": "1"},
            "rocm",
            True,
            "with MPICH_GPU_SUPPORT_ENABLED=1",
        ),
        (
            NOT_CALLED,
            CRAY,
            {"MPICH_GPU_SUPPORT_ENABLED": "0"},
            "cuda",
            False,
            "without MPICH_GPU_SUPPORT_ENABLED=1",
        ),
        (
            QUERY.format("cuda", 1),
            MVAPICH,
            {},
            "cuda",
            False,
            "MVAPICH2 Version : 2.3.7 without MVP_USE_CUDA=1",
        ),
        (
            QUERY.format("cuda", 1),
            MVAPICH,
            {"MV2_USE_CUDA": "1"},
            "cuda",
            True,
            "MPIX_Query_cuda_support() of MVAPICH2",
        ),
        (
            QUERY.format("cuda", 0),
            MVAPICH,
            {"MVP_USE_CUDA": "1"},
            "cuda",
            False,
            "MPIX_Query_cuda_support() of MVAPICH2",
        ),
        (
            BY_KIND % (1, 0),
            MPICH,
            {},
            "ze",
            True,
            "MPIX_GPU_query_support() of MPICH Version: 4.2.3 says yes",
        ),
        (
            QUERY.format("ze", 1),
            INTEL,
            {"I_MPI_OFFLOAD": "1"},
            "ze",
            True,
            "MPIX_Query_ze_support() of Intel(R) MPI Library 2021.18",
        ),
        (
            NOT_CALLED,
            INTEL,
            {},
            "ze",
            False,
            "Intel(R) MPI Library 2021.18 for Linux* OS without I_MPI_OFFLOAD=1",
        ),
        (
            NOTHING,
            MVAPICH,
            {"MVP_USE_CUDA": "1"},
            "cuda",
            True,
            "MVAPICH2 Version : 2.3.7 with MVP_USE_CUDA=1",
        ),
    ],
)
def test_what_a_library_says(
    folder: Path,
    code: str,
    version: str,
    environ: dict[str, str],
    kind: str,
    takes_it: bool | None,
    how: str,
) -> None:
    found = ask(library(folder, code), version, environ, kind)  # type: ignore[arg-type]
    assert found.takes_it is takes_it and how in found.how, found


YES = Answer(True, "it says yes")
NO = Answer(False, "it says no")
SILENT = Answer(None, "it says nothing")
DIRECT = "GPU tensors are handed to MPI as they are: "
COPIES = "GPU tensors go through page-locked host memory: "


@pytest.mark.parametrize(
    ("answers", "wish", "expected"),
    [
        ([YES, YES], "auto", [DeviceMemoryChoice("device", f"{DIRECT}it says yes")] * 2),
        (
            [YES, NO],
            "auto",
            [
                DeviceMemoryChoice("host", f"{COPIES}the MPI of another rank"),
                DeviceMemoryChoice("host", f"{COPIES}it says no"),
            ],
        ),
        (
            [SILENT, YES],
            "auto",
            [
                DeviceMemoryChoice("host", f"{COPIES}it says nothing"),
                DeviceMemoryChoice("host", f"{COPIES}the MPI of another rank"),
            ],
        ),
        (
            [YES, None],
            "auto",
            [DeviceMemoryChoice("host", f"{COPIES}a rank computes on a CPU")] * 2,
        ),
        ([YES, YES], "host", [DeviceMemoryChoice("host", f"{COPIES}comm.device_memory=host")] * 2),
        (
            [SILENT, SILENT],
            "device",
            [DeviceMemoryChoice("device", f"{DIRECT}comm.device_memory=device; it says nothing")]
            * 2,
        ),
        (
            [NO, YES],
            "device",
            [
                "comm.device_memory=device: it says no",
                "comm.device_memory=device: the MPI of another rank",
            ],
        ),
        (
            [YES, None],
            "device",
            [
                "comm.device_memory=device: a rank computes on a CPU, so that MPI would get "
                "memory of both kinds"
            ]
            * 2,
        ),
        ([None, None], "auto", [DeviceMemoryChoice(None, "")] * 2),
        (
            [None, None],
            "host",
            [
                DeviceMemoryChoice(
                    None, "comm.device_memory=host does nothing: no rank computes on a GPU"
                )
            ]
            * 2,
        ),
    ],
)
def test_ranks_choose_alike(
    answers: list[Answer | None], wish: str, expected: list[DeviceMemoryChoice | str]
) -> None:
    def of_rank(communicator: ThreadRank) -> DeviceMemoryChoice | str:
        try:
            return choose(communicator, answers[communicator.rank], wish, "a test")  # type: ignore[arg-type]
        except UserError as error:
            return error.what

    for found, one in zip(in_threads(2, of_rank), expected, strict=True):
        assert (
            found == one if isinstance(one, DeviceMemoryChoice) else str(found).startswith(one)
        ), found


@needs_mpirun
@pytest.mark.parametrize(
    ("wish", "on_gpu", "error", "note"),
    [
        (
            "auto",
            [True, True],
            "",
            "go through page-locked host memory: MPIX_Query_cuda_support() of Open MPI v",
        ),
        ("auto", [False, True], "", "go through page-locked host memory: a rank computes on a CPU"),
        (
            "device",
            [True, True],
            "comm.device_memory=device: MPIX_Query_cuda_support() of Open MPI v",
            "",
        ),
        ("auto", [False, False], "", ""),
    ],
)
def test_the_mpi_that_is_here_is_asked(
    wish: str, on_gpu: list[bool], error: str, note: str
) -> None:
    """It was built without CUDA. A thread reduces, on one host too, where any rank has a GPU: the
    same on all ranks."""
    added = ["asynchronous", "device_memory"] * (any(on_gpu) and not error)
    for raised, notes, features, groups_too in on_ranks(
        "mpi", 2, "device_memory_on_ranks:asked", wish, on_gpu
    ):
        assert error in raised and bool(error) == bool(raised)
        assert len(notes) == bool(note) and all(note in one for one in notes)
        assert features == added and groups_too


@needs_mpirun
@pytest.mark.parametrize("is_own_loop", [False, True])
def test_a_line_of_the_header_says_what_the_key_does(is_own_loop: bool, tmp_path: Path) -> None:
    """On a GPU the line is another one."""
    words = ["comm.engine=mpi", "comm.device_memory=host", f"run={tmp_path / 'run'}"]
    own_loop = alone("own_loop_on_ranks:main", str(tmp_path / "out.json"), *words)
    result = python(own_loop if is_own_loop else ["-m", "hvdtrain", "stop.steps=1", *words])
    assert result.returncode == 0, result.stderr
    lines = [
        line.strip() for line in result.stdout.splitlines() if "comm.device_memory=host" in line
    ]
    assert len(lines) == 1 and lines[0].startswith(
        ("comm.device_memory=host does nothing: no rank", "GPU tensors go through")
    ), lines


@pytest.mark.in_turn
@needs_mpirun
@pytest.mark.parametrize("way", ["host", "device"])
@pytest.mark.parametrize("size", [2, 3])
def test_collectives_of_tensors_on_gpus_conform(size: int, way: str) -> None:
    """By copies, and by the addresses of the tensors."""
    for checks, failures in on_ranks("mpi", size, "device_memory_on_ranks:failures", way):
        assert checks > 70 and failures == {}


@needs_mpirun
@pytest.mark.parametrize("way", ["host", "device"])
def test_mpi_gets_a_tensor_once_it_is_filled(way: str) -> None:
    for wrong in on_ranks("mpi", 2, "device_memory_on_ranks:late", way):
        assert wrong == []


@needs_mpirun
@pytest.mark.parametrize("way", ["host", "device"])
@pytest.mark.parametrize(("stage", "summary"), [(0, "overlapped bucket"), (2, "ZeRO stage 2")])
def test_training_on_gpus_is_that_in_host_memory(stage: int, summary: str, way: str) -> None:
    """With 2 ranks, whose sums have one order, a thread reduces buckets while backward
    continues."""
    for found, farthest in on_ranks("mpi", 2, "device_memory_on_ranks:farthest_weight", way, stage):
        assert summary in found and farthest == 0


@needs_mpirun
def test_a_rank_with_a_gpu_and_one_without_reduce_together() -> None:
    assert on_ranks("mpi", 2, "device_memory_on_ranks:mixed") == [[3.0] * 6] * 2


def test_sums_of_16_bits_are_made_in_host_memory() -> None:
    """By functions of ours, which read it; MPI moves such numbers wherever they are."""
    ways = Ways(LateGpu(), "device")
    for dtype in (torch.float16, torch.bfloat16):
        assert isinstance(ways.begin(torch.zeros(3, dtype=dtype), reduces=True), Staged)
        assert isinstance(ways.begin(torch.zeros(3, dtype=dtype)), Direct)
    assert isinstance(ways.begin(torch.zeros(3), reduces=True), Direct)


def test_streams_of_a_copy_wait_for_each_other() -> None:
    """The host waits for nothing before run(), which the thread that calls MPI makes."""
    gpus = LateGpu()
    x = torch.zeros(3)
    gpus.present(HOST).give(lambda: x.fill_(2.0))
    moving = Ways(gpus, "host").begin(x)
    assert gpus.log == ["side stream 1 waits for stream of MainThread", "side stream 1 keeps (3,)"]
    result = moving.run(lambda host: host.mul_(10))
    assert gpus.log[2:] == ["side stream 2 keeps (3,)"]
    assert moving.finish(result) is x and x.tolist() == [20.0] * 3
    assert gpus.log[3:] == [
        "stream of MainThread waits for side stream 2",
        "stream of MainThread keeps (3,)",
    ]
