"""The standard output of the command line: a full disk is an error with a fix, a reader that goes
away is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import environment, needs_extra

JOB = ["framework=numpy", "model.name=linear", "max_steps=3"]


def hvdtrain(arguments: list[str], **streams: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hvdtrain", *arguments]
    return subprocess.run(command, env=environment(), text=True, check=False, **streams)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--print-config"],
        pytest.param(["report", "--help"], marks=needs_extra("report")),
        pytest.param(["export"], marks=needs_extra("export")),
    ],
    ids=" ".join,
)
def test_a_full_disk(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = hvdtrain(arguments, stdout=full, stderr=subprocess.PIPE)
    message = (
        "hvdtrain: cannot write to the standard output: No space left on device\n  where: "
        "/dev/full\n"
        "  fix: another file, or room on its disk\n"
    )
    assert (done.returncode, done.stderr) == (2, message)


def test_full_disks_everywhere() -> None:
    with open("/dev/full", "w") as full:
        assert hvdtrain(["--help"], stdout=full, stderr=full).returncode == 2


def test_a_job_needs_no_standard_output(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = hvdtrain([*JOB, f"run={tmp_path / 'run'}"], stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, "")
    assert '"kind": "end"' in (tmp_path / "run" / "events.jsonl").read_text()


MODEL = """
import torch

class Talkative(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 10)

    def forward(self, x):
        print("x" * 10_000)
        return self.linear(x.flatten(1))
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        JOB,
        pytest.param(["model.name=talk:Talkative", "max_steps=3"], marks=pytest.mark.slow),
    ],
    ids=["help", "job", "printing model"],
)
def test_a_reader_that_goes_away_ends_only_the_printing(
    arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "talk.py").write_text(MODEL)
    reader, writer = os.pipe()
    os.close(reader)
    run = tmp_path / "run"
    words = arguments if arguments == ["--help"] else [*arguments, f"run={run}"]
    env = environment({"PYTHONPATH": f"{tmp_path}:{environment()['PYTHONPATH']}"})
    command = [sys.executable, "-m", "hvdtrain", *words]
    done = subprocess.run(
        command, env=env, stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    told = "hvdtrain: the standard output: its reader is gone; training continues without it\n"
    assert (done.returncode, done.stderr) == (0, "" if arguments == ["--help"] else told)
    if arguments != ["--help"]:
        assert '"kind": "end"' in (run / "events.jsonl").read_text()
