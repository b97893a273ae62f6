"""hvdtrain bench: sums are checked before they are timed, measurements on real ranks, and the
tables and JSON of results."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from ranks import mpirun, needs_horovod, needs_mpirun, python

from hvdtrain.cli.bench import allreduce, scaling_report
from hvdtrain.cli.bench.allreduce import (
    COPY,
    IN_PARTS,
    SMALL_TENSOR_SIZES,
    AllreduceResult,
    Host,
    Method,
    MethodTimes,
    PayloadTimes,
    Ranks,
    bus_bytes_per_s,
    check_sum,
    count_hosts,
    measure,
    oversubscription_warning,
)
from hvdtrain.cli.bench.command import bench
from hvdtrain.cli.bench.cost_model import Cluster, Link, StepModel
from hvdtrain.cli.bench.scaling import link_points, plan_jobs, step_seconds
from hvdtrain.cli.bench.scaling_report import Study, Trial, curves, efficiency, predictions
from hvdtrain.cli.bench.trainer import median_speedup, quartiles
from hvdtrain.cli.options import read_rank_counts, read_sizes
from hvdtrain.cli.output import format_bytes, format_seconds
from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.errors import UserError
from hvdtrain.report.figures.commands import draw_scaling

BENCH = ["-m", "hvdtrain.cli.bench.command"]
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
    rows = measure(Ranks(SingleProcessCommunicator(), None, 4096), [64], 0.05)
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
        UserError, match="there is no bench scalling\n.*\n  fix: did you mean scaling?"
    ):
        bench(["scalling"])
    with pytest.raises(UserError, match="'0' is not a count"):
        bench(["scaling", "--steps", "0"])
    with pytest.raises(UserError, match="cannot read the link 'fast'"):
        bench(["scaling", "--links", "fast"])
    with pytest.raises(UserError, match="--sizes.*expected one argument"):
        bench(["allreduce", "--sizes"])


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["--help"]) == 0 and bench([]) == 0
    usage = capsys.readouterr().out
    assert "bench allreduce [key=value ...]" in usage and "--per-node 8" in usage


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
    assert count_hosts([("n1", 2), ("n1", 2), ("n2", 4)]) == [Host("n1", 2, 2), Host("n2", 1, 4)]
    assert oversubscription_warning([Host("n1", 2, 2)]) == []
    assert "4 ranks on 2 cores" in oversubscription_warning([Host("n1", 4, 2)])[0]


def test_table_of_allreduce() -> None:
    methods = [
        MethodTimes("plain MPI_Allreduce", [2e-3] * 5),
        MethodTimes("as one bucket", [1e-3] * 5),
        MethodTimes("hvd.grouped_allreduce", [4e-3] * 5),
    ]
    payloads = [PayloadTimes("160 small tensors", 1000, methods)]
    lines = allreduce.to_text(
        AllreduceResult("horovod", "comm.engine=horovod", 2, 2**22, [Host("n1", 2, 2)], payloads)
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


def test_seconds_of_steps() -> None:
    """100 images at 50/s are 2 s a step; the first sync point and other events are dropped."""
    events = [
        {"kind": "start"},
        *({"kind": "step", "batch": 100, "samples_per_s": rate} for rate in (1, 50, 25)),
        {"kind": "end"},
    ]
    assert step_seconds([json.dumps(event) for event in events]) == [2.0, 4.0]
    with pytest.raises(
        UserError, match="the job has 1 sync point, and the steps before the first one are warm-up"
    ):
        step_seconds([json.dumps(event) for event in events[:2]])


def study(cores: int = 2) -> Study:
    """Half a second for 8 samples, on two ranks 0.625 s; nothing hidden of a link of 0.05 s a
    message and no end of bandwidth."""
    trials = [
        Trial("weak", 1, 8, [0.4, 0.5, 0.6]),
        Trial("weak", 2, 16, [0.625] * 3),
        Trial("strong", 1, 8, [0.5]),
        Trial("strong", 4, 8, [0.25]),
    ]
    link = Link("lan", 0.05, 1e12)
    model = StepModel(0.1, 0.05, 0.0, 1.0)
    return Study(
        trials=trials,
        model=model,
        step_errors=[0.01, -0.03],
        link=link,
        link_errors=[],
        cluster=Cluster(link, link, 8),
        buckets=[8.0],
        cores=cores,
        threads="1",
    )


def test_efficiency_and_prediction() -> None:
    found = study()
    assert [efficiency(trial, found.trials) for trial in found.trials] == pytest.approx(
        [1.0, 0.8, 1.0, 0.5]
    )
    rows = {(row.kind, row.algorithm, row.ranks): row for row in predictions(found, [8, 16])}
    assert ("strong", "ring", 8) in rows and ("strong", "ring", 16) not in rows, (
        "16 ranks have no 8 samples"
    )
    weak = rows["weak", "ring", 8]
    assert weak.step_s == pytest.approx(0.5 + 14 * 0.05) and weak.efficiency == pytest.approx(
        0.5 / 1.2
    )
    tree8 = rows["strong", "tree", 8]
    assert tree8.step_s == pytest.approx(0.15 + 6 * 0.05) and tree8.efficiency == pytest.approx(
        0.5 / 8 / 0.45
    )


def test_text_and_json_of_scaling() -> None:
    lines = scaling_report.to_text(study())
    assert lines[4].split() == [
        "weak",
        "2",
        "16",
        "3",
        "625",
        "ms",
        "625",
        "ms",
        "..",
        "625",
        "ms",
        "26",
        "80.0%",
    ]
    assert any("OVERSUBSCRIBED" in line for line in lines) and any(
        "4 ranks on 2 cores" in line for line in lines
    )
    assert not any("OVERSUBSCRIBED" in line for line in scaling_report.to_text(study(cores=4)))
    assert "error   steps left out of the fit: median 2.0%, largest 3.0%, n = 2" in lines
    assert "error   allreduces: unknown, there are too few points to leave one out" in lines
    result = json.loads(json.dumps(scaling_report.to_json(study())))
    assert [trial["efficiency"] for trial in result["trials"]] == pytest.approx(
        [1.0, 0.8, 1.0, 0.5]
    )
    assert result["predictions"][0]["ranks"] == 8 and result["fleet"]["per_node"] == 8


def test_a_link_whose_times_give_no_latency_is_said_to_be_too_noisy() -> None:
    def warned(link: Link) -> bool:
        return any(
            "too noisy for a latency" in line
            for line in scaling_report.to_text(study()._replace(link=link))
        )

    assert warned(Link("measured", 0.0, 1e9))
    assert not warned(Link("measured", 1e-6, 1e9)) and not warned(Link("none", 0.0, math.inf)), (
        "none: one rank"
    )


def test_picture(tmp_path: Path) -> None:
    title, lines = curves(study(), "mlp")
    assert [line.label for line in lines if line.panel == "weak"][:2] == [
        "measured",
        "ring",
    ] and title.startswith("mlp: lan 50.0 ms")
    assert lines[0].ranks == [1, 2] and lines[0].efficiency == pytest.approx([1.0, 0.8])
    assert draw_scaling(tmp_path / "a.png", title, lines) == f"picture: {tmp_path}/a.png"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="cannot write the picture"):
        draw_scaling(tmp_path / "none/a.png", title, lines)


@needs_mpirun
@pytest.mark.slow
def test_scaling_of_real_jobs(tmp_path: Path) -> None:
    words = [
        "framework=numpy",
        "model.name=linear",
        "data.name=synthetic",
        "data.shape=[4,4,1]",
        "data.samples=200",
        "data.val_samples=20",
    ]
    words += ["batch.size=8", "comm.engine=mpi", f"run={tmp_path}/never"]
    result = python(
        [
            *BENCH,
            "scaling",
            "--ranks",
            "2",
            "--weak",
            "--steps",
            "12",
            "--repeat",
            "2",
            "--json",
            f"{tmp_path}/study.json",
            *words,
        ]
    )
    assert result.returncode == 0, result
    study = json.loads((tmp_path / "study.json").read_text())
    assert [(trial["kind"], trial["ranks"], trial["batch"]) for trial in study["trials"]] == [
        ("weak", 2, 8)
    ]
    assert all(
        len(trial["seconds"]) == 10 and min(trial["seconds"]) > 0 for trial in study["trials"]
    ), "twice six sync points, less the first"
    assert study["buckets"] == [170 * 4.0], "16 x 10 weights and 10 biases"
    assert study["link"]["latency_s"] >= 0, (
        "0 where the times of a busy machine are too noisy for a latency"
    )
    assert study["link"]["bytes_per_s"] > 0
    assert ("too noisy for a latency" in result.stdout) == (study["link"]["latency_s"] == 0)
    assert not (tmp_path / "never").exists()


def test_planned_jobs() -> None:
    """Weak: 8 for each rank; strong: 8 in all; alone: the share of a rank of 2 and of 4. No job
    where a rank would have no sample."""
    assert plan_jobs(["weak", "strong"], [1, 2, 4], 8) == [
        *(("weak", 1, 8), ("weak", 2, 16), ("weak", 4, 32)),
        *(("strong", 1, 8), ("strong", 2, 8), ("strong", 4, 8)),
        *(("alone", 1, 4), ("alone", 1, 2)),
    ]
    assert plan_jobs(["strong"], [1, 16], 8) == [("strong", 1, 8)]
    assert plan_jobs(["weak"], [2, 4], 9) == [("weak", 2, 8), ("weak", 4, 16)], (
        "4 for each of two; alone only where a job has one rank"
    )
    with pytest.raises(UserError, match="batch 3 has no sample for each of 4 ranks"):
        plan_jobs(["weak"], [4], 3)


@needs_mpirun
def test_scaling_reports_a_job_that_fails() -> None:
    words = [
        "framework=numpy",
        "model.name=linear",
        "data.root=/nowhere",
        "data.name=mnist",
        "data.download=false",
    ]
    result = python([*BENCH, "scaling", "--ranks", "1", *words])
    assert result.returncode != 0 and "/nowhere" in result.stderr
    result = python(
        [*BENCH, "scaling"],
        env={"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    )
    assert (
        result.returncode != 0
        and "this is already rank 1 of 2, and bench scaling starts ranks itself" in result.stderr
    )
    result = python(
        [
            *BENCH,
            "scaling",
            "--ranks",
            "1",
            "--limit",
            "0.3",
            "framework=numpy",
            "model.name=linear",
            "data.name=digits",
        ]
    )
    assert result.returncode != 0 and "the job on 1 rank did not end within 0.3 s" in result.stderr


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
