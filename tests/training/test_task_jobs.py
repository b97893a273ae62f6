"""Whole jobs of regression, language and a task of the user's own: objective, targets, best
checkpoint, resume, evaluation, report."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import own_data
import pytest
from pages import blocks
from ranks import ROOT, needs_extra

import hvdtrain
from hvdtrain.__main__ import main
from hvdtrain.records.run import metrics_of, objective_of, read_run
from hvdtrain.training.checkpoint import files

NUMBERS = [
    "data.name=own_data:numbers",
    "task.name=regression",
    "model.name=linear",
    "optim.base_lr=0.02",
    "batch.size=31",
]
TOKENS = [
    "data.name=own_data:tokens",
    "task.name=language",
    "task.ignore=0",
    "model.name=gpt",
    "model.layers=1",
    "model.width=8",
]
TOKENS += ["model.heads=2", "optim.base_lr=0.5", "batch.size=31", "speed.precision=fp64"]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [
        event
        for event in map(json.loads, (run / "events.jsonl").read_text().splitlines())
        if event["kind"] == kind
    ]


@needs_extra("export")
@needs_extra("evaluate")
def test_lower_is_better_in_the_whole_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            [
                *NUMBERS,
                "epochs=9",
                "run=out",
                "stop.target=2",
                "log.targets=[3,12]",
                "checkpoint.keep_best=1",
                "log.every_steps=2",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert re.search(
        r"data    own_data:numbers: 131 training and 47 validation samples, 3x2 float64, 2 "
        r"numbers to predict",
        out,
    )
    assert re.search(
        r"epoch  seconds  epoch s  samples/s  train loss  val loss  val mse       lr\n", out
    )
    epochs = events(tmp_path / "out", "epoch")
    values = [epoch["val_loss"] for epoch in epochs]
    assert 1 < len(values) < 9 and values[-1] <= 2 < values[-2]
    assert (
        f"done (stop.target=2 held for 1 evaluation): validation loss {values[-1]:.4f} after" in out
    )
    assert [epoch["best_loss"] for epoch in epochs] == [
        min(values[: end + 1]) for end in range(len(values))
    ]
    assert {"train_mse", "train_mae", "train_r2", "val_mse", "val_mae", "val_r2"} <= epochs[
        0
    ].keys() and epochs[-1]["val_r2"] > 0.5
    assert [event["target"] for event in events(tmp_path / "out", "target")] == [12, 3, 2]
    step = events(tmp_path / "out", "step")[0]
    assert step["loss"] == pytest.approx(step["mse"], rel=1e-6) and {"mae", "r2"} <= step.keys()
    start = events(tmp_path / "out", "start")[0]
    assert (start["task"], start["objective"], start["classes"]) == ("regression", "loss", None)
    assert start["metrics"]["r2"] == {"better": "max", "column": "r2", "percent": False}

    record = read_run(tmp_path / "out")
    assert objective_of(record).lower_is_better and metrics_of(record).keys() == {
        "loss",
        "mse",
        "mae",
        "r2",
    }
    frame = hvdtrain.read("out")
    assert frame.val_r2.dropna().iloc[-1] == epochs[-1]["val_r2"]

    main(["evaluate", "out", "data.name=own_data:numbers", "--json", "found.json"])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["loss"] == pytest.approx(values[-1], rel=1e-12) and found["r2"] == pytest.approx(
        epochs[-1]["val_r2"], rel=1e-9
    )
    assert found["count"] == 47 and "confusion" not in found
    assert main(["export", "out", "--to", "m.safetensors"]) == 0
    assert f"validation loss {values[-1]:.4f}" in capsys.readouterr().out


def test_the_best_checkpoint_is_the_one_with_the_lowest_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a rate that grows the loss falls first and rises then."""
    monkeypatch.chdir(tmp_path)
    words = [
        "recipe.schedule=steps",
        "recipe.milestones=[2]",
        "recipe.gamma=100",
        "epochs=4",
        "max_steps=12",
    ]
    assert (
        main([*NUMBERS, "run=out", "checkpoint.keep_best=1", "checkpoint.keep_last=1", *words]) == 0
    )
    values = [epoch["val_loss"] for epoch in events(tmp_path / "out", "epoch")]
    best = int(np.nanargmin([math.inf if value is None else value for value in values]))
    assert best < len(values) - 1
    kept = [
        files.read_numbers(folder).train_state.last for folder in files.finished(tmp_path / "out")
    ]
    assert kept[0] == values[best] and len(kept) == 2


@pytest.mark.parametrize("words", [NUMBERS, TOKENS], ids=["regression", "language"])
def test_a_resumed_job_is_the_straight_one_to_the_last_bit(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Stopped in the middle of an epoch, whose sums the checkpoint keeps, vectors too."""
    monkeypatch.chdir(tmp_path)
    more = [
        "epochs=2",
        "log.every_steps=3",
        "model.name=linear" if words is NUMBERS else "model.layers=1",
    ]
    assert main([*words, *more, "run=straight"]) == 0
    said = capsys.readouterr().out
    step = events(tmp_path / "straight", "step")[0]
    if words is TOKENS:  # 31 windows of 8 tokens a step at most, those of padding are not counted
        assert step["samples_per_s"] < step["tokens_per_s"] < 8 * step["samples_per_s"]
        assert "epoch  seconds  epoch s  tokens/s  train loss" in said
        start, epoch = (events(tmp_path / "straight", kind)[0] for kind in ("start", "epoch"))
        assert (start["counts"], start["schema"]) == ("tokens", 2) and epoch[
            "tokens_per_s"
        ] > epoch["samples_per_s"]
    else:
        assert "tokens_per_s" not in step and "epoch s  samples/s  train" in said
    assert main([*words, *more, "run=stopped", "max_steps=6"]) == 0
    assert main([*words, *more, "run=stopped"]) == 0
    losses = [
        {
            e["step"]: (e["train_loss"], e["val_loss"], e.get("train_r2"))
            for e in events(tmp_path / run, "epoch")
        }
        for run in ("straight", "stopped")
    ]
    del losses[1][6]  # an evaluation where the first part ended
    assert losses[0].keys() == losses[1].keys() and max(losses[0]) in losses[1]
    assert losses[0][max(losses[0])][1] == losses[1][max(losses[0])][1]


@needs_extra("evaluate")
def test_a_confusion_matrix_is_a_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metric of a vector of 100 sums is what `evaluate` counts by itself; the best epoch is
    chosen by it."""
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            [
                "task.name=own_data:balanced",
                "model.name=linear",
                "epochs=2",
                "run=out",
                "checkpoint.keep_best=1",
            ]
        )
        == 0
    )
    epochs = events(tmp_path / "out", "epoch")
    assert epochs[-1]["best_balanced"] == max(epoch["val_balanced"] for epoch in epochs) > 0.8
    assert main(["evaluate", "out", "task.name=own_data:balanced", "--json", "found.json"]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert (
        found["balanced"]
        == pytest.approx(epochs[-1]["val_balanced"], rel=1e-12)
        != found["accuracy"]
    )
    assert found["balanced"] == pytest.approx(np.mean(found["class_accuracy"]), rel=1e-12)


def test_a_checkpoint_of_another_task_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*NUMBERS, "run=out", "max_steps=3"]) == 0
    assert main([*NUMBERS, "run=out", "max_steps=6", "task.objective=r2"]) == 2
    assert (
        "the checkpoint has another data.objective: 'loss', but this job has 'r2'"
        in capsys.readouterr().err
    )
    assert (
        main(
            [
                *NUMBERS,
                "run=out",
                "max_steps=6",
                "data.outputs=1",
                "task.name=own_data:quantile",
                "speed.precision=fp64",
            ]
        )
        == 2
    )
    assert (
        "the checkpoint has another data.task: 'regression', but this job has 'quantile'"
        in capsys.readouterr().err
    )
    assert main(["resume=out", "max_steps=6"]) == 2
    assert (
        "data.name=own_data:numbers imports code, and only the run folder names it"
        in capsys.readouterr().err
    )
    assert main(["resume=out", "max_steps=6", "data.name=own_data:numbers"]) == 0


@needs_extra("evaluate")
def test_the_task_of_the_page_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """80 of 100 targets are below what the model says."""
    *_, module, command = blocks(ROOT / "docs" / "tasks.md")
    (tmp_path / module.file).write_text(module.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    words = command.text.split()
    assert words[:2] == ["PYTHONPATH=.", "hvdtrain"]
    assert main(words[2:]) == 0
    last = events(tmp_path / "out", "epoch")[-1]
    assert (
        last["train_below"] == pytest.approx(0.8, abs=0.04)
        and last["best_loss"] <= last["val_loss"]
    )
    assert main(["evaluate", "out", "data.name=mine:numbers", "task.name=mine:quantile"]) == 0


def test_what_is_wrong_with_data_of_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, message in (
        (["data.name=own_data:no_numbers"], "own_data has no no_numbers"),
        (
            ["data.name=own_data:numbers", "data.outptus=3"],
            "own_data:numbers(split: 'str', outputs: 'int' = 2)",
        ),
        (["data.name=os:listdir"], "os:listdir is part of Python itself, not a data"),
        (
            ["data.name=own_data:restore", "data.facts={shape: [2], share: 0.5}"],
            "own_data:restore, train is a Quantile",
        ),
        (
            ["data.name=own_data:numbers", "data.stage=here"],
            "data.stage copies the files of hvdtrain's own data sets",
        ),
        (
            ["data.name=own_data:numbers", "augment.flip=true"],
            "augmentation needs images; the data have x float64 (3, 2), y float64 (2,)",
        ),
        (
            ["data.name=own_data:numbers", "data.class_names=[a,b]"],
            "the data have no classes to name",
        ),
    ):
        with pytest.raises(hvdtrain.errors.UserError, match=re.escape(message)):
            hvdtrain.train({}, "task.name=regression", "model.name=linear", "run=out", *words)
    assert own_data.numbers("val")["x"].shape == (47, 3, 2)
