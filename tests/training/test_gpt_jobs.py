"""Jobs of an image GPT in 16-bit types, and with recomputed blocks on several ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import in_full_rounds, mpirun, needs_mpirun

from hvdtrain.__main__ import main
from hvdtrain.errors import DONE

IMAGES = [
    "data.name=digit_tokens:windows",
    "data.levels=8",
    "data.side=4",
    "task.name=language",
    "optim.name=adamw",
    "optim.base_lr=3e-3",
]
IMAGES += [
    "model.name=gpt",
    "model.layers=2",
    "model.heads=2",
    "model.width=16",
    "optim.clip_norm=1",
    "batch.size=64",
    "max_steps=24",
]
TYPES = {"fp32": "float32", "bf16": "float32 and bfloat16", "fp16": "float32 and float16"}


def last(run: Path, kind: str) -> dict[str, Any]:
    return [
        event
        for event in map(json.loads, (run / "events.jsonl").read_text().splitlines())
        if event["kind"] == kind
    ][-1]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The job in each type in one process."""
    runs = {name: tmp_path_factory.mktemp(name) / "run" for name in TYPES}
    for name, run in runs.items():
        assert main([*IMAGES, f"speed.precision={name}", f"run={run}"]) == DONE
    return runs


def check(runs: dict[str, Path]) -> None:
    exact = last(runs["fp32"], "epoch")["val_loss"]
    assert 1.0 < exact < 1.9, "it has learned: log(8) is 2.08"
    for name, run in runs.items():
        assert f" torch {TYPES[name]} on cpu" in last(run, "start")["model"]
        assert last(run, "epoch")["val_loss"] == pytest.approx(exact, rel=0.01)
        assert (name == "fp32") == (last(run, "epoch")["val_loss"] == exact)


@pytest.mark.in_turn
def test_16_bit_types_learn_as_float32(single: dict[str, Path]) -> None:
    check(single)


@pytest.mark.slow
@in_full_rounds
@needs_mpirun
def test_16_bit_types_learn_on_two_ranks(single: dict[str, Path], tmp_path: Path) -> None:
    for name in ("bf16", "fp16"):
        words = [*IMAGES, "comm.engine=mpi", f"speed.precision={name}", f"run={tmp_path / name}"]
        result = mpirun(2, ["-m", "hvdtrain", *words])
        assert result.returncode == DONE, result.stderr
        here, there = (last(run, "epoch")["val_loss"] for run in (single[name], tmp_path / name))
        assert there == pytest.approx(here, rel=0.01)
    check({name: single[name] if name == "fp32" else tmp_path / name for name in TYPES})
