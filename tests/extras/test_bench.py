"""hvdtrain bench: sums are checked before they are timed, measurements on real ranks, and the
tables and JSON of results."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from ranks import mpirun, needs_horovod, needs_mpirun, python

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.errors import UserError
from hvdtrain.extras.bench import allreduce
from hvdtrain.extras.bench.allreduce import (
    COPY,
    SMALL_TENSOR_SIZES,
    AllreduceRanks,
    AllreduceResult,
    BenchHost,
    Method,
    MethodTimes,
    PayloadTimes,
    bus_bytes_per_s,
    check_sum,
    count_hosts,
    measure,
    oversubscription_warning,
)
from hvdtrain.extras.bench.command import bench
from hvdtrain.extras.bench.options import format_bytes, format_seconds, read_rank_counts, read_sizes
from hvdtrain.extras.bench.trainer import median_speedup, quartiles
from hvdtrain.extras.plan.meshes.link import IN_PARTS, link_points

BENCH = ["-m", "hvdtrain.extras.bench.command"]
QUICK = ["--sizes", "3,4KiB", "--budget", "0.1", "comm.bucket_mb=0.0009765625"]


@needs_mpirun
def test_allreduce_on_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = mpirun(2, [*BENCH, "allreduce", *QUICK, "comm.engine=mpi", "--json", str(out)])
    assert result.returncode == 0, result
    tree = json.loads(out.read_text())
    assert (tree["engine"], tree["ranks"], tree["bucket_bytes"]) == ("mpi", 2, 1024)
    assert [host["ranks"] for host in tree["hosts"].values()] == [2]
    methods = {
        row["what"]: [one["method"] for one in tree["rows"] if one["what"] == row["what"]]
        for row in tree["rows"]
    }
    assert methods == {
        "3 B": ["plain MPI_Allreduce", "allreduce", "in 1 bucket", IN_PARTS, "copy of memory"],
        "4 KiB": [
            "plain MPI_Allreduce",
            "allreduce",
            "in 4 buckets",
            IN_PARTS,
            "copy of memory",
        ],  # of 1 KiB
        "160 small tensors": [
            "plain MPI_Allreduce",
            "as one bucket",
            "one allreduce each",
            "copy of memory",
        ],
    }
    for row in tree["rows"]:
        assert row["n"] == len(row["seconds"]) >= 5 and min(row["seconds"]) > 0
        assert row["quartiles_s"] == pytest.approx(np.quantile(row["seconds"], [0.25, 0.5, 0.75]))
        assert row["bytes_per_s"] == pytest.approx(row["bytes"] / np.median(row["seconds"])), (
            "2 (n - 1) / n is 1 for two ranks"
        )
    assert "4 KiB              plain MPI_Allreduce" in result.stdout
    assert [size for size, _ in link_points(tree)] == [3, 4096]


@needs_mpirun
@needs_horovod
def test_allreduce_of_horovod() -> None:
    """Beside Horovod's own grouped allreduce, and beside the MPI that it runs on."""
    result = mpirun(
        2,
        [
            *BENCH,
            "allreduce",
            "--sizes",
            "1KiB",
            "--budget",
            "0.1",
            "comm.engine=horovod",
            "--json",
            "-",
        ],
    )
    assert result.returncode == 0, result
    rows = json.loads(result.stdout)["rows"]
    assert [row["method"] for row in rows if row["what"] == "160 small tensors"] == [
        *(
            "plain MPI_Allreduce",
            "as one bucket",
            "one allreduce each",
            "hvd.grouped_allreduce",
            "copy of memory",
        ),
    ]
    assert rows[0]["method"] == "plain MPI_Allreduce" and rows[0]["bytes"] == 1024


def test_small_tensors_are_those_of_resnet50() -> None:
    """53 norms of 26,560 channels in all, a weight and a bias each; the first 54 tensors again, as
    far as 160."""
    assert (
        len(SMALL_TENSOR_SIZES) == 160
        and sum(SMALL_TENSOR_SIZES[:106]) == 2 * 26560
        and SMALL_TENSOR_SIZES[106:] == SMALL_TENSOR_SIZES[:54]
    )
    assert set(SMALL_TENSOR_SIZES) == {64, 128, 256, 512, 1024, 2048}


def test_one_process_measures_the_copy_too() -> None:
    rows = measure(AllreduceRanks(SingleProcessCommunicator(), None, 4096), [64], 0.05)
    assert [times.method for times in rows[0].methods] == [
        "allreduce",
        "in 1 bucket",
        IN_PARTS,
        "copy of memory",
    ]
    assert [row.size_bytes for row in rows] == [64, 4 * sum(SMALL_TENSOR_SIZES)]


class SecondOfThree(SingleProcessCommunicator):
    """Rank r starts with a pattern times r + 1, so the sum over all is 3 times what rank 1 starts
    with."""

    rank = 1
    size = 3


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_sums_are_checked(dtype: type) -> None:
    numbers = np.empty(20, dtype)

    def triple() -> None:
        numbers[...] = numbers * dtype(3)

    check_sum(SecondOfThree(), numbers, Method("right", triple))
    assert list(numbers[:8]) == [6, 12, 18, 24, 30, 36, 42, 6]  # (1 + 2 + 3) x (1 .. 7)
    check_sum(SecondOfThree(), numbers, Method(COPY, lambda: None))
    with pytest.raises(UserError) as error:
        check_sum(SecondOfThree(), numbers, Method("unchanged", lambda: None))
    size = numbers.nbytes
    assert (
        str(error.value)
        == f"wrong sums on ranks [0]\n  where: unchanged, comm.engine=single, {size} bytes\n  "
        "fix: hvdtrain check"
    )


def test_options_and_their_errors() -> None:
    assert read_sizes("100MB,1,1KiB,64b,1") == [1, 64, 1024, 10**8] and read_rank_counts(
        "4,1,2,2"
    ) == [1, 2, 4]
    with pytest.raises(UserError, match="cannot read the size '5 apples'"):
        read_sizes("5 apples")
    with pytest.raises(UserError, match="cannot read the size '0'"):
        read_sizes("0")
    with pytest.raises(UserError, match="cannot read the numbers of ranks '1,,2'"):
        read_rank_counts("1,,2")
    with pytest.raises(
        UserError, match="there is no bench alreduce\n.*\n  fix: did you mean allreduce?"
    ):
        bench(["alreduce"])
    with pytest.raises(UserError, match="--sizes.*expected one argument"):
        bench(["allreduce", "--sizes"])


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["--help"]) == 0 and bench([]) == 0
    usage = capsys.readouterr().out
    assert "bench allreduce [key=value ...]" in usage and "{" not in usage


def test_numbers_and_statistics() -> None:
    assert [format_seconds(seconds) for seconds in (4.2e-6, 1e-4, 1.234e-3, 0.5, 12.0)] == [
        "4.20 us",
        "100 us",
        "1.23 ms",
        "500 ms",
        "12.0 s",
    ]
    assert [format_bytes(size) for size in (1, 1000, 1024, 3 * 2**20, 10**8)] == [
        "1 B",
        "1000 B",
        "1 KiB",
        "3 MiB",
        "100 MB",
    ]
    assert quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == (2.0, 3.0, 4.0) and quartiles([7.0]) == (
        7.0,
        7.0,
        7.0,
    )
    assert median_speedup([1.0, 2.0, 4.0], [2.0, 2.0, 2.0]) == 1.0
    assert (
        bus_bytes_per_s("allreduce", 100, 4, 2.0) == 75.0
        and bus_bytes_per_s(COPY, 100, 4, 2.0) == 50.0
    )
    assert count_hosts([("n1", 2), ("n1", 2), ("n2", 4)]) == [
        BenchHost("n1", 2, 2),
        BenchHost("n2", 1, 4),
    ]
    assert oversubscription_warning([BenchHost("n1", 2, 2)]) == []
    assert "4 ranks on 2 cores" in oversubscription_warning([BenchHost("n1", 4, 2)])[0]


def test_table_of_allreduce() -> None:
    methods = [
        MethodTimes("plain MPI_Allreduce", [2e-3] * 5),
        MethodTimes("as one bucket", [1e-3] * 5),
        MethodTimes("hvd.grouped_allreduce", [4e-3] * 5),
    ]
    payloads = [PayloadTimes("160 small tensors", 1000, methods)]
    lines = allreduce.to_text(
        AllreduceResult(
            "horovod", "comm.engine=horovod", 2, 2**22, [BenchHost("n1", 2, 2)], payloads
        )
    )
    assert lines[:2] == [
        "hvdtrain bench allreduce: 2 ranks, engine horovod (comm.engine=horovod), buckets of 4 MiB",
        "n1: 2 ranks, 2 cores",
    ]
    assert lines[5].split() == [
        "as",
        "one",
        "bucket",
        "5",
        "1.00",
        "ms",
        "1.00",
        "ms",
        "..",
        "1.00",
        "ms",
        "0.001",
        "2.00",
    ]
    assert (
        lines[-1]
        == "160 small tensors, time / time of hvd.grouped_allreduce: plain MPI_Allreduce 0.50, as "
        "one bucket 0.25"
    )


STEP = [
    "data.name=synthetic",
    "data.samples=200",
    "batch.size=20",
    "model.widths=[4,4,8,8]",
    "--json",
    "-",
]


@needs_mpirun
def test_step_on_two_ranks_measures_exposed_communication() -> None:
    result = mpirun(2, [*BENCH, "step", *STEP, "--rounds", "2", "--steps", "3", "comm.engine=mpi"])
    assert result.returncode == 0, result.stderr
    tree = json.loads(result.stdout)
    assert (tree["ranks"], tree["batch"], tree["engine"], tree["rounds"]) == (2, 20, "mpi", 2)
    assert tree["samples_per_s"] == pytest.approx(20 / tree["ms_per_step"] * 1e3)
    assert list(tree["phases_ms"]) == ["data", "forward", "backward", "communication", "update"]
    # of two rounds the median is the mean
    exposed_ms = tree["ms_per_step"] - tree["alone_ms_per_step"]
    assert tree["exposed_communication_ms"] == pytest.approx(exposed_ms, abs=1e-6)
    assert tree["share_of_matmul"] == pytest.approx(
        tree["gflop_per_s_of_a_rank"] / tree["matmul_gflop_per_s"]
    )


def test_operations_are_those_of_the_formula() -> None:
    """A linear model of 48 inputs and 10 classes: 480 products and sums a sample, and again for the
    weights' gradient."""
    data = [
        "data.name=synthetic",
        "data.samples=99",
        "data.shape=[4,4,3]",
        "data.classes=10",
        "batch.size=33",
        "model.name=linear",
    ]
    result = python([*BENCH, "step", *data, "--rounds", "2", "--steps", "2", "--json", "-"])
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["gflop_per_step_of_a_rank"] * 1e9 == pytest.approx(
        2 * 2 * 33 * 48 * 10
    )


def test_data_of_each_source_against_the_need() -> None:
    words = ["data.name=synthetic", "data.samples=100", "batch.size=10", "model.name=linear"]
    result = python([*BENCH, "data", *words, "--rounds", "2", "--json", "-"])
    assert result.returncode == 0, result.stderr
    tree = json.loads(result.stdout)
    assert {"read", "prefetch", "step"} <= tree["samples_per_s"].keys() and tree["samples"] == 100
    assert all(
        low <= middle <= high and low > 0 for low, middle, high in tree["samples_per_s"].values()
    )


def test_bench_step_of_a_framework_that_counts_no_operations() -> None:
    result = python(
        [
            *BENCH,
            "step",
            "framework=numpy",
            "model.name=linear",
            "data.name=synthetic",
            "--rounds",
            "2",
            "--steps",
            "2",
        ]
    )
    assert (
        result.returncode == 0 and "images/s" in result.stdout and "GFLOP" not in result.stdout
    ), result
