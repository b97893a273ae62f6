"""Run folders from a stranger: no command creates, changes or removes anything outside, starts a program, or ends with a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hostile_run import JOB, KINDS, clear, outside_folder, sound_run, tree
from ranks import FULL, HANG_S, ROOT, in_full_rounds, mpirun, needs_mpirun, python

SCRIPT = "tests/support/hostile_run.py"
# HVDTRAIN_TEST_ROUNDS=full PYTEST_TIMEOUT=7200 pytest -m slow --basetemp=/dev/shm/hostile tests/training/test_hostile_run.py
# tries every case, in half an hour of processor time.
# Torch's build for CUDA on PyPI starts a process where it is imported, by its package cuda-pathfinder: no doing of the folder that is read.
TORCH_STARTS_A_PROCESS = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            import subprocess

            subprocess.run(["true"], check=True)

sys.meta_path.insert(0, Finder())
"""


def check(tmp_path: Path, *arguments: str, path: str = "") -> int:
    """The number of cases, of which none went wrong; path: more folders with modules."""
    env = {"PYTHONPATH": f"{path}:{ROOT}"} if path else None
    result = python([SCRIPT, str(tmp_path), *arguments], timeout_s=7200 if FULL else HANG_S, env=env)
    *wrong, counts = [json.loads(line) for line in result.stdout.splitlines()] or [{}]
    assert (result.returncode, wrong, result.stderr) == (0, [], ""), result
    return int(counts["tried"])


@pytest.mark.parametrize("arguments", [("planted", "24"), ("swapped", "2")], ids=lambda words: words[0])
def test_a_sample_of_hostile_run_folders(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(TORCH_STARTS_A_PROCESS)
    assert check(tmp_path, *arguments, path=str(modules)) == int(arguments[1])


@needs_mpirun
@pytest.mark.parametrize(
    ("arguments", "name", "kind", "refusal"),
    [
        ([*JOB, "run=RUN", "max_steps=3"], "events.jsonl", "link to a file", "NAME is a link, not a file\n  where: run, command line"),
        (
            [*JOB, "run=RUN", "max_steps=3", "log.per_rank=true"],
            "ranks/rank-00001.log",
            "link to a file",
            "the log file of a rank: NAME: a link, not a file",
        ),
        *[(["evaluate", "RUN"], "config.yaml", "pipe", "NAME is a pipe, not a file\n  where: ")] * FULL,
    ],
    ids=["events", "log of a rank", *["configuration"] * FULL],
)
def test_two_ranks_end_together(tmp_path: Path, arguments: list[str], name: str, kind: str, refusal: str) -> None:
    """Rank 0 refuses what is planted, rank 1 its own log; one message, and both ranks have ended."""
    run, outside = tmp_path / "run", outside_folder(tmp_path)
    sound_run(run)
    clear(run / name)
    KINDS[kind](run / name, outside)
    before = tree(outside)
    words = [argument.replace("RUN", str(run)) for argument in arguments]
    result = mpirun(2, ["-m", "hvdtrain", *words, "comm.engine=mpi"])
    assert (result.returncode, result.stderr.count("hvdtrain: ")) == (2, 1), result
    assert refusal.replace("NAME", str(run / name)) in result.stderr and "do not trust this folder" in result.stderr, result
    assert "Traceback" not in result.stderr and tree(outside) == before, result


@pytest.mark.slow
@in_full_rounds
def test_every_odd_thing_under_every_name(tmp_path: Path) -> None:
    assert check(tmp_path, "planted", "0") >= 2400


@pytest.mark.slow
@in_full_rounds
def test_a_name_that_becomes_a_link_while_a_job_writes(tmp_path: Path) -> None:
    assert check(tmp_path, "swapped", "50") == 50


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    [
        "weights.safetensors",
        *["config.yaml", "SHA256SUMS", "events.jsonl", "mlflow_run.json", "optimizer.safetensors", "progress.json"] * FULL,
    ],
)
def test_damaged_files(tmp_path: Path, file: str) -> None:
    path = f"checkpoints/step-00000002/{file}" if file[0] in "wopS" else file
    count = 2000 if FULL else 50
    assert check(tmp_path, "mutated", str(count), path) == count
