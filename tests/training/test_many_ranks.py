"""Jobs of many ranks: 64 real ones on this machine, and rank 0 of 8,192 whose other ranks do not
exist."""

from __future__ import annotations

import json
import os
import signal
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from ranks import Job, mpirun, needs_mpirun
from stand_in import checkpoint_of, phases_of
from waiting import wait_until

from hvdtrain.__main__ import main
from hvdtrain.errors import DONE, REQUEUE
from hvdtrain.training.checkpoint import files
from hvdtrain.training.checkpoint.array_file import map_arrays

WORDS = [
    "framework=numpy",
    "model.name=linear",
    "speed.precision=fp64",
    "batch.size=192",
    "recipe.schedule=constant",
    "epochs=100000",
]
WORDS += ["log.every_steps=5", "guard.equal_steps=5"]


@pytest.mark.slow
@pytest.mark.clock  # so that it runs alone: 64 ranks take the cores from every other test
@needs_mpirun
def test_64_ranks_train_are_stopped_and_go_on_with_48(tmp_path: Path) -> None:
    """The last rank gets the signal; the weights equal those of one process that was never
    stopped."""
    run = tmp_path / "run"
    alone = tmp_path / "alone"
    with Job(64, ["-m", "hvdtrain", *WORDS, "comm.engine=mpi", f"run={run}"], is_warm=True) as job:
        wait_until(lambda: steps(run) >= 10 or not job.is_running(), "64 ranks train", 600)
        assert job.is_running(), job.errors()
        os.kill(job.pids()[63], signal.SIGTERM)
        stopped = job.wait()
    assert (
        stopped.returncode == REQUEUE
        and "stopped (a signal on another rank) at step" in stopped.stdout
    ), stopped
    end = steps(run) + 10
    again = mpirun(
        48, ["-m", "hvdtrain", *WORDS, "comm.engine=mpi", f"run={run}", f"stop.steps={end}"]
    )
    assert again.returncode == DONE, again
    assert main([*WORDS, f"run={alone}", f"stop.steps={end}"]) == DONE
    assert [event["ranks"] for event in events(run) if event["kind"] == "start"] == [64, 48]
    of_many = weights(run, end)
    of_one = weights(alone, end)
    assert of_many.keys() == of_one.keys() and of_one
    for name, values in of_one.items():
        np.testing.assert_allclose(of_many[name], values, rtol=1e-9, atol=1e-12, err_msg=name)


def events(run: Path) -> list[dict]:
    path = run / "events.jsonl"
    return (
        [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]
        if path.exists()
        else []
    )


def steps(run: Path) -> int:
    return max((event["step"] for event in events(run)), default=0)


def weights(run: Path, step: int) -> dict[str, np.ndarray]:
    with (run / "checkpoints" / f"step-{step:08d}" / "weights.safetensors").open("rb") as file:
        return {name: np.array(values) for name, values in map_arrays(file).items()}


def test_what_rank_0_does_grows_by_a_packet_a_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 8,191 ranks that do not exist: as many collectives as with 63, and below 512 bytes of
    each rank in a phase."""
    few = phases_of(64, tmp_path / "few")
    tracemalloc.start()
    capsys.readouterr()
    many = phases_of(8192, tmp_path / "many")
    header = capsys.readouterr().out.splitlines()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert any(
        line.startswith("ranks   8192 (host0 x 8, host1 x 8, ")
        and " and 1,008 more hosts), " in line
        for line in header
    ), header
    assert {phase: counts.collectives for phase, counts in many.items()} == {
        phase: counts.collectives for phase, counts in few.items()
    }
    assert max(counts.received_bytes for counts in many.values()) < 512 * 8192
    assert sum(counts.collectives for counts in many.values()) > 20 and peak_bytes < 20e6, (
        "7 MB; 1.1 GB with an array of all pairs"
    )


@pytest.mark.in_turn
def test_what_rank_0_gets_of_a_checkpoint_that_ranks_write_together_grows_by_a_packet_a_rank(
    tmp_path: Path,
) -> None:
    counts = checkpoint_of(8192, tmp_path / "run")
    assert 0 < counts.received_bytes < 512 * 8192, counts
    (found,) = files.finished(tmp_path / "run")
    assert sorted(os.listdir(found)) == sorted(
        ["SHA256SUMS", "progress.json", *files.ARRAYS, *(f"{file}.chunks" for file in files.ARRAYS)]
    )
    assert files.read_arrays(found, 2**20)["s.w.0"].tolist() == list(range(1000))
