"""hvdtrain compare: what differs between two runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from ranks import needs_extra

from hvdtrain.__main__ import main

JOB = [
    *("data.name=synthetic", "data.samples=64", "framework=numpy"),
    *("model.name=linear", "batch.size=16", "max_steps=8", "log.every_steps=2"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, words in {
        "a": [],
        "b": [],
        "rate": ["optim.base_lr=0.3"],
        "seed": ["seed=2"],
    }.items():
        assert main([*JOB, f"run={folder / name}", *words]) == 0
    return folder


def compared(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main(["compare", *map(str, arguments)]) == 0
    return capsys.readouterr().out


@needs_extra("provenance")
def test_two_runs_of_one_job_are_the_same(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(capsys, runs / "a", runs / "b").splitlines() == [
        "configuration  the same",
        "environment    the same",
        "first weights  the same",
        "results        the same bits in all events up to step 8",
    ]


def test_the_first_step_that_differs_is_named(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = compared(capsys, runs / "a", runs / "rate")
    assert "configuration  1 key differs\n  optim.base_lr  0.02  0.3\n" in out
    assert (
        "first weights  the same\nresults        differ first in the event of step 2: loss " in out
    )
    result = json.loads(compared(capsys, runs / "a", runs / "rate", "--json"))
    one, other = (
        json.loads(line)["loss"]
        for name in ("a", "rate")
        for line in (runs / name / "events.jsonl").read_text().splitlines()
        if '"kind": "step", "step": 2,' in line
    )
    assert result["first_difference"] == {"step": 2, "name": "loss", "values": [one, other]}
    assert result["configuration"] == {"optim.base_lr": [0.02, 0.3]} and one != other
    # a linear model starts with zeros, whatever the seed
    assert "  seed  1  2\n" in compared(capsys, runs / "a", runs / "seed")


@needs_extra("provenance")
def test_packages_and_code_that_differ_are_listed(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs / "a", tmp_path / "other")
    events = tmp_path / "other" / "events.jsonl"
    first, *rest = events.read_text().splitlines()
    start = json.loads(first)
    start["environment"]["packages"]["numpy"] = "1.0"
    start["environment"]["command"] = ["elsewhere"]
    start["digest"] = "0123"
    events.write_text("\n".join([json.dumps(start), *rest]) + "\n")
    out = compared(capsys, runs / "a", tmp_path / "other")
    assert "environment    1 value differs\n  numpy  " in out and "first weights  differ\n" in out
    for nothing in (None, {}):  # {}: by a copy without the extra that records it
        start["environment"] = nothing
        events.write_text("\n".join([json.dumps(start), *rest]) + "\n")
        out = compared(capsys, runs / "a", tmp_path / "other")
        assert f"environment    not recorded by {tmp_path / 'other'}\n" in out


def test_what_is_wrong_is_named(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(runs / "a")]) == 2
    assert "two RUNs are needed, not 1" in capsys.readouterr().err
    assert main(["compare", str(runs / "a"), str(tmp_path / "none")]) == 2
    assert f"there is no run folder {tmp_path / 'none'}" in capsys.readouterr().err
