"""The main job under a real mpirun: what it prints and writes, resume on another number of ranks,
and refusals."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from ranks import FULL, Result, mpirun, needs_extra, needs_horovod, needs_mpirun, python

from hvdtrain.config.read import configure
from hvdtrain.training.datasets import open_datasets

WORDS = [
    "-m",
    "hvdtrain",
    "model.widths=[4,4,8,8]",
    "batch.size=33",
    "speed.precision=fp64",
    "optim.base_lr=0.03",
]


def job(size: int, run: Path, *words: str) -> Result:
    argv = [*WORDS, *words, f"run={run}"]
    result = mpirun(size, argv) if size else python(argv)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result


def epochs(run: Path) -> list[dict]:
    return [
        e
        for e in map(json.loads, (run / "events.jsonl").read_text().splitlines())
        if e["kind"] == "epoch"
    ]


@pytest.mark.parametrize(
    ("engine", "how"),
    [
        pytest.param("horovod", "hvd.DistributedOptimizer", marks=needs_horovod),
        *[pytest.param("mpi", "gradients in 1 bucket", marks=pytest.mark.slow)] * FULL,
    ],
)
def test_two_ranks_train_and_one_resumes(tmp_path: Path, engine: str, how: str) -> None:
    run = tmp_path / "run"
    words = ["epochs=2", "data.sampling=partition", "comm.bind=numa"]
    first = job(2, run, f"comm.engine={engine}", *words)
    lines = first.stdout.splitlines()
    (bound,) = [line for line in lines if "comm.bind=numa: " in line]
    cores = sorted(os.sched_getaffinity(0))
    expected = {
        1: "each rank: not bound: 2 ranks share 1 core",
        2: f"rank 0 on cores {cores[0]}, rank 1 on cores {cores[-1]}",
    }
    assert expected.get(len(cores), ", rank 1 on cores ") in bound
    assert re.match(rf"ranks   2 \(.* x 2\), engine {engine}: comm.engine={engine}", lines[0]), (
        lines
    )
    assert "batch   33 over all ranks, 16 or 17 on each" in lines
    assert [how in line for line in lines if line.startswith("model ")] == [True]
    assert lines[-1] == f"run folder: {run}"
    assert len([line for line in lines if re.match(r" +\d+ +\d", line)]) == 2, (
        "rank 0 speaks, the other is silent"
    )
    second = job(0, run, "epochs=3", f"resume={run}")
    assert "resume  from step 88" in second.stdout
    rows = epochs(run)
    assert [(e["epoch"], e["step"], e["val_count"]) for e in rows] == [
        (1, 44, 360),
        (2, 88, 360),
        (3, 131, 360),
    ]
    assert rows[2]["val_accuracy"] > 0.6  # 0.1 is chance


ELSEWHERE = """
import os, sys
os.chdir(sys.argv[1 + int(os.environ["OMPI_COMM_WORLD_RANK"])])
os.execv(sys.executable, [sys.executable, "-m", "hvdtrain", *sys.argv[3:]])
"""


@pytest.mark.slow
@needs_mpirun
def test_only_rank_0_sees_the_run_folder(tmp_path: Path) -> None:
    """No shared file system: the other rank has a disk of its own, where nothing is read or
    written."""
    here = tmp_path / "here"
    there = tmp_path / "there"
    here.mkdir()
    there.mkdir()
    start = ["-c", ELSEWHERE, f"{here}", f"{there}"]
    words = ["framework=numpy", "model.name=linear", "comm.engine=mpi", "batch.size=33"]
    for arguments in (
        [*words, "run=run", "max_steps=10"],
        [*words, "run=run", "max_steps=20"],
        ["resume=run", "comm.engine=mpi", "max_steps=30"],
    ):
        result = mpirun(2, [*start, *arguments])
        assert (result.returncode, result.stderr) == (0, ""), result
    assert "resume  from step 20" in result.stdout
    assert [path.name for path in here.iterdir()] == ["run"] and not list(there.iterdir())


@needs_horovod
@pytest.mark.slow
def test_auto_takes_horovod_under_mpirun() -> None:
    result = mpirun(2, ["-m", "hvdtrain", "batch.size=1"])
    assert result.returncode == 2
    assert (
        result.stderr.count("batch 1 does not split over 2 ranks: some would have no sample") == 1
    ), result.stderr
    code = (
        "import os; from hvdtrain.training.build import connect; from hvdtrain.config.read import "
        "configure\n"
        "from hvdtrain.comm.launcher_variables import placement\n"
        "engine, why = connect(configure(None, []), placement(os.environ))\n"
        "print(engine.name, engine.size, why)"
    )
    found = mpirun(2, ["-c", code])
    note = "comm.engine=mpi is faster for small models (0.8 of the step time)"
    line = f"horovod 2 started by Open MPI's mpirun, Horovod is installed; {note}"
    assert found.stdout.splitlines() == [line] * 2


def test_single_is_refused_under_mpirun() -> None:
    result = mpirun(2, ["-m", "hvdtrain", "comm.engine=single"])
    assert result.returncode == 2
    message = "comm.engine=single runs one process, but the job has 2 ranks"
    assert result.stderr.count(message) == 1, result.stderr


@pytest.mark.in_turn
@needs_extra("noise_scale")
@pytest.mark.parametrize(
    ("engine", "more"),
    [
        pytest.param("horovod", ["batch.micro=9"], marks=needs_horovod),
        pytest.param("mpi", ["comm.bucket_mb=0.001"], marks=pytest.mark.slow),
    ],
)
def test_the_noise_scale_is_that_of_the_samples_own_gradients(
    tmp_path: Path, engine: str, more: list[str]
) -> None:
    """At rest (lr 0) from zero weights a sample's gradient of the squared error is -(one-hot label)
    x, so |G|^2 and S are sums by hand."""
    run = tmp_path / "run"
    words = [
        "model.name=linear",
        "model.loss=squared_error",
        "optim.base_lr=0",
        "log.noise_scale=true",
        "epochs=8",
        "log.every_steps=20",
    ]
    result = mpirun(
        2, ["-m", "hvdtrain", *words, "batch.size=33", f"comm.engine={engine}", *more, f"run={run}"]
    )
    assert result.returncode == 0, result.stderr
    config = configure(None, [])
    parts = open_datasets(config)
    data = parts.train.read(np.arange(len(parts.train)))
    x = ((data["x"] / 255.0 - parts.task.mean) / parts.task.std).reshape(len(data["x"]), -1)
    x = np.concatenate([x, np.ones((len(x), 1))], 1)  # the bias
    mean = np.eye(10)[data["y"]].T @ x / len(x)
    signal = np.square(mean).sum()
    noise = np.square(x).sum() / len(x) - signal
    measured = epochs(run)[-1]["noise_scale"]
    assert measured == pytest.approx(noise / signal, rel=0.1)
    assert 10 < measured < 30
    assert (
        f"noise scale {measured:.0f}: batches far above that many samples save few steps"
        in result.stdout
    )
