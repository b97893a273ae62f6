"""Metrics of torchmetrics in metrics=: on uneven shares those that the library computes of the whole set at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import own_data
import pytest
import torch
import torchmetrics
from rank_threads import in_threads

import hvdtrain
from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.comm.on_all_ranks import allreduce_sums
from hvdtrain.config.read import configure
from hvdtrain.core.metrics import add_sums, zero_sums
from hvdtrain.data.own.as_source import as_declared, as_source
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError
from hvdtrain.tasks.task import Task
from hvdtrain.tasks.user_functions import read_metrics
from hvdtrain.tasks.user_tasks import examples_of, measured
from hvdtrain.training.build import build_learner, build_task

SHARES = {1: [0, 47], 2: [0, 30, 47], 3: [0, 5, 6, 47]}  # where the ranks' samples begin and end
JOBS: dict[str, tuple[Any, list[str], dict[str, Any]]] = {
    "classes": (
        own_data.classes,
        ["model.name=linear"],
        {
            "f1": (torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro"), "max"),
            "kappa": (torchmetrics.CohenKappa(task="multiclass", num_classes=3), "max"),
            "ap": (torchmetrics.AveragePrecision(task="multiclass", num_classes=3, thresholds=50), "max"),
        },
    ),
    "numbers": (
        lambda split: own_data.numbers(split, 1),
        ["model.name=linear", "task.name=regression"],
        {
            "rmse": (torchmetrics.MeanSquaredError(squared=False), "min"),
            "r2score": (torchmetrics.R2Score(), "max"),
            "log_cosh": (torchmetrics.LogCoshError(), "min", lambda outputs, batch: (outputs[:, 0], batch["y"])),
        },
    ),
    "labels": (
        own_data.labels,
        ["model.name=linear", "task.name=multilabel"],
        {"exact": (torchmetrics.ExactMatch(task="multilabel", num_labels=5), "max")},
    ),
    "pixels": (
        own_data.shapes,
        ["model.name=unet", "model.widths=[4]", "model.norm=none", "task.name=segmentation", "task.ignore_label=255"],
        {"iou": (torchmetrics.JaccardIndex(task="multiclass", num_classes=3, ignore_index=255), "max")},
    ),
}


def job(name: str) -> tuple[Source, Task, Any]:
    data, words, metrics = JOBS[name]
    config = configure(None, [*words, "speed.precision=fp64"])
    source = as_source(data("val"), "mine", "data.name")
    task = measured(build_task(source, source, config), read_metrics(metrics), None, examples_of(source))
    return as_declared(source, task.fields), task, config


@pytest.mark.parametrize("name", JOBS)
def test_metrics_are_the_librarys_own_on_any_number_of_ranks(name: str) -> None:
    source, task, config = job(name)
    alone: Any = build_learner(config, task, SingleProcessCommunicator())
    random = np.random.default_rng(4)
    first = {key: random.normal(size=array.shape) for key, array in alone.state().items()}
    alone.load(first)
    whole = source.read(np.arange(len(source)))
    outputs = torch.tensor(alone.predict(alone.to_device(whole)).outputs)
    target = torch.tensor(whole["y"])
    expected = {}
    for metric, (made, _, *inputs) in JOBS[name][2].items():
        made = made.clone().set_dtype(torch.float64)  # noqa: PLW2901
        preds = outputs[:, 0] if name == "numbers" else outputs
        made.update(*(inputs[0](outputs, {"y": target}) if inputs else (preds, target.long() if name != "numbers" else target)))
        expected[metric] = made.compute().item()

    def evaluated(rank: Communicator) -> dict[str, float]:
        one: Any = build_learner(config, task, rank)
        one.load(first)
        edges = np.array(SHARES[rank.size]) * len(source) // 47
        sums = zero_sums(task.sums)
        for start in range(*edges[rank.rank : rank.rank + 2].tolist(), 8):
            rows = np.arange(start, min(start + 8, edges[rank.rank + 1]))
            sums = add_sums(sums, one.evaluate(one.to_device(source.read(rows))))
        total = allreduce_sums(rank, sums, "test", task.sums)
        return {metric.name: metric.of(total) for metric in task.metrics if metric.name in expected}

    for size in (1, 2, 3):
        for found in in_threads(size, evaluated):
            assert found == pytest.approx(expected, rel=1e-12)
    assert all(np.isfinite(list(expected.values())))


def test_a_job_decides_by_a_metric_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    f1 = torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro")
    config = {"model.name": "linear", "run": "out", "epochs": 3, "batch.size": 32}
    data = {split: own_data.classes(split) for split in ("train", "val")}
    run = hvdtrain.train(config, train_data=data["train"], val_data=data["val"], metrics={"f1": (f1, "max")}, objective="f1")
    epochs = [event for event in map(json.loads, (tmp_path / "out" / "events.jsonl").read_text().splitlines()) if event["kind"] == "epoch"]
    said = hvdtrain.predict(run, data["val"]).argmax(1)
    expected = f1(torch.tensor(said), torch.tensor(data["val"]["y"])).item()
    assert run.last == epochs[-1]["val_f1"] == pytest.approx(expected, rel=1e-6) and 0 <= epochs[0]["train_f1"] <= 1


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (
            torchmetrics.AUROC(task="multiclass", num_classes=3),
            r"MulticlassAUROC keeps preds, target, which are no sums over samples\n.*\n  fix: thresholds=200",
        ),
        (torchmetrics.MaxMetric(), "MaxMetric keeps max_value, which are no sums"),
    ],
)
def test_what_is_no_sum_is_refused(metric: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_metrics({"mine": (metric, "max")})


def test_several_numbers_and_other_shapes_are_refused() -> None:
    several = read_metrics({"mine": (torchmetrics.F1Score(task="multiclass", num_classes=3, average="none"), "max")})["mine"]
    assert several.of is not None
    with pytest.raises(UserError, match=r'metric mine: MulticlassF1Score gives 3 numbers, not one\n.*\n  fix: average="macro"'):
        several.of(np.ones(several.length))
    for batch, message in (
        ({"tokens": torch.ones(4)}, "compares outputs with y; the batch has tokens"),
        ({"y": np.ones(4)}, "tensors of torch"),
    ):
        with pytest.raises(UserError, match=message):
            several.function(torch.ones(4, 3), batch)
    with pytest.raises(UserError, match=r"metric mine: MeanSquaredError\.update\(\) fails for outputs \(4, 3\)"):
        read_metrics({"mine": (torchmetrics.MeanSquaredError(), "min")})["mine"].function(torch.ones(4, 3), {"y": torch.ones(4)})
