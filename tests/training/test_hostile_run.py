"""Run folders from a stranger: no command creates, changes or removes anything outside, starts a program, or ends with a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hostile_run import JOB, KINDS, clear, outside_folder, sound_run, tree
from ranks import FULL, mpirun, needs_mpirun, python

SCRIPT = "tests/support/hostile_run.py"
# HVDTRAIN_TEST_ROUNDS=full PYTEST_TIMEOUT=7200 pytest -m slow --basetemp=/dev/shm/hostile tests/training/test_hostile_run.py
# tries every case, in half an hour of processor time.


def check(tmp_path: Path, *arguments: str, timeout_s: int = 120) -> int:
    """The number of cases, of which none went wrong."""
    result = python([SCRIPT, str(tmp_path), *arguments], timeout_s=timeout_s)
    *wrong, counts = [json.loads(line) for line in result.stdout.splitlines()] or [{}]
    assert (result.returncode, wrong, result.stderr) == (0, [], ""), result
    return int(counts["tried"])


@pytest.mark.parametrize("arguments", [("planted", "24"), ("swapped", "2")], ids=lambda words: words[0])
def test_a_sample_of_hostile_run_folders(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert check(tmp_path, *arguments) == int(arguments[1])


@needs_mpirun
@pytest.mark.parametrize(
    ("arguments", "name", "kind", "refusal"),
    [
        ([*JOB, "run=RUN", "max_steps=3"], "events.jsonl", "link to a file", "NAME is a link, not a file\n  where: run, command line"),
        (["evaluate", "RUN"], "config.yaml", "pipe", "NAME is a pipe, not a file\n  where: "),
        (
            [*JOB, "run=RUN", "max_steps=3", "log.per_rank=true"],
            "ranks/rank-00001.log",
            "link to a file",
            "the log file of a rank: NAME: a link, not a file",
        ),
    ],
    ids=["events", "configuration", "log of a rank"],
)
def test_two_ranks_end_within_seconds(tmp_path: Path, arguments: list[str], name: str, kind: str, refusal: str) -> None:
    """Rank 0 refuses what is planted, rank 1 its own log; one message, and both ranks have ended."""
    run, outside = tmp_path / "run", outside_folder(tmp_path)
    sound_run(run)
    clear(run / name)
    KINDS[kind](run / name, outside)
    before = tree(outside)
    words = [argument.replace("RUN", str(run)) for argument in arguments]
    result = mpirun(2, ["-m", "hvdtrain", *words, "comm.engine=mpi"], timeout_s=60)
    assert (result.returncode, result.stderr.count("hvdtrain: ")) == (2, 1) and result.seconds < 30, result
    assert refusal.replace("NAME", str(run / name)) in result.stderr and "do not trust this folder" in result.stderr, result
    assert "Traceback" not in result.stderr and tree(outside) == before, result


@pytest.mark.slow
def test_every_odd_thing_under_every_name(tmp_path: Path) -> None:
    most = 0 if FULL else 100
    assert check(tmp_path, "planted", str(most), timeout_s=3600) >= (most or 2400)


@pytest.mark.slow
def test_a_name_that_becomes_a_link_while_a_job_writes(tmp_path: Path) -> None:
    rounds = 50 if FULL else 4
    assert check(tmp_path, "swapped", str(rounds), timeout_s=1200) == rounds


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    ["config.yaml", "events.jsonl", "mlflow_run.json", "weights.safetensors", "optimizer.safetensors", "progress.json", "SHA256SUMS"],
)
def test_damaged_files(tmp_path: Path, file: str) -> None:
    path = f"checkpoints/step-00000002/{file}" if file[0] in "wopS" else file
    count = 2000 if FULL else 50
    assert check(tmp_path, "mutated", str(count), path, timeout_s=3600) == count
