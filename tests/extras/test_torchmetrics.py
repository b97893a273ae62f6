"""Metrics of torchmetrics in metrics=: on uneven shares those that the library computes of the
whole set at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import own_data
import pytest
import torch
from rank_threads import in_threads
from ranks import needs_extra

import hvdtrain
from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.comm.on_all_ranks import allreduce_sums
from hvdtrain.config.read import configure
from hvdtrain.core.import_torchvision import import_torchvision
from hvdtrain.core.metrics import Concatenated, add_sums, zero_sums
from hvdtrain.data.declared import as_declared
from hvdtrain.data.source import Source
from hvdtrain.data.user_data.as_source import as_source
from hvdtrain.errors import UserError
from hvdtrain.tasks.task import Task
from hvdtrain.tasks.user_functions import read_metrics, refuse_parts
from hvdtrain.tasks.user_tasks import examples_of, measured
from hvdtrain.training.build import build_learner, build_task

import_torchvision()  # torchmetrics imports it, and would stop beside a CPU build of torch
import torchmetrics  # noqa: E402
from torchmetrics.image import PeakSignalNoiseRatio  # noqa: E402

# where the ranks' samples begin and end
SHARES = (
    [0, 47],
    [0, 30, 47],
    [0, 5, 6, 47],
    [0, 0, 20, 47],
)


class Spread(torchmetrics.Metric):
    """Largest less least error, over the mean of all."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("largest", torch.tensor(-torch.inf), dist_reduce_fx="max")
        self.add_state("least", torch.tensor(torch.inf), dist_reduce_fx="min")
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("samples", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        error = (preds - target).abs()
        self.largest = torch.maximum(self.largest, error.max())
        self.least = torch.minimum(self.least, error.min())
        self.total = self.total + error.sum()
        self.samples = self.samples + len(error)

    def compute(self) -> torch.Tensor:
        return (self.largest - self.least) / (self.total / self.samples)


def thirds(split: str) -> dict[str, np.ndarray]:
    """Six columns, and in which third of the samples their sum is: every class is there."""
    x = own_data.classes(split)["x"]
    return {"x": x, "y": np.digitize(x.sum(1), np.quantile(x.sum(1), [1 / 3, 2 / 3]))}


JOBS: dict[str, tuple[Any, list[str], dict[str, Any]]] = {
    "classes": (
        thirds,
        ["model.name=linear"],
        {
            "f1": (torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro"), "max"),
            "kappa": (torchmetrics.CohenKappa(task="multiclass", num_classes=3), "max"),
            "ap": (
                torchmetrics.AveragePrecision(task="multiclass", num_classes=3, thresholds=50),
                "max",
            ),
            "exact_ap": (torchmetrics.AveragePrecision(task="multiclass", num_classes=3), "max"),
            "roc": (torchmetrics.AUROC(task="multiclass", num_classes=3), "max"),
        },
    ),
    "numbers": (
        lambda split: own_data.numbers(split, 1),
        ["model.name=linear", "task.name=regression"],
        {
            "rmse": (torchmetrics.MeanSquaredError(squared=False), "min"),
            "r2score": (torchmetrics.R2Score(), "max"),
            "spread": (Spread(), "min"),
            "kendall": (torchmetrics.KendallRankCorrCoef(), "max"),
            "pearson": (torchmetrics.PearsonCorrCoef(), "max"),
            "psnr": (PeakSignalNoiseRatio(data_range=20.0), "max"),
            "log_cosh": (
                torchmetrics.LogCoshError(),
                "min",
                lambda outputs, batch: (outputs[:, 0], batch["y"]),
            ),
        },
    ),
    "labels": (
        own_data.labels,
        ["model.name=linear", "task.name=multilabel"],
        {
            "exact": (torchmetrics.ExactMatch(task="multilabel", num_labels=5), "max"),
            "roc": (torchmetrics.AUROC(task="multilabel", num_labels=5, average="micro"), "max"),
        },
    ),
    "pixels": (
        own_data.shapes,
        [
            "model.name=unet",
            "model.widths=[4]",
            "model.norm=none",
            "task.name=segmentation",
            "task.ignore_label=255",
        ],
        {
            "iou": (
                torchmetrics.JaccardIndex(task="multiclass", num_classes=3, ignore_index=255),
                "max",
            )
        },
    ),
}


def job(name: str) -> tuple[Source, Task, Any]:
    data, words, metrics = JOBS[name]
    config = configure(None, [*words, "speed.precision=fp64"])
    source = as_source(data("val"), "mine", "data.name")
    task = measured(
        build_task(source, source, config), read_metrics(metrics), None, examples_of(source)
    )
    return as_declared(source, task.fields), task, config


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=needs_extra("maps") if name == "pixels" else ()) for name in JOBS],
)
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
        made.update(
            *(
                inputs[0](outputs, {"y": target})
                if inputs
                else (preds, target.long() if name != "numbers" else target)
            )
        )
        expected[metric] = made.compute().item()

    def evaluated(rank: Communicator, edges: np.ndarray) -> dict[str, float]:
        one: Any = build_learner(config, task, rank)
        one.load(first)
        sums = zero_sums(task.sums)
        for start in range(*edges[rank.rank : rank.rank + 2].tolist(), 8):
            rows = np.arange(start, min(start + 8, edges[rank.rank + 1]))
            sums = add_sums(sums, one.evaluate(one.to_device(source.read(rows))))
        total = allreduce_sums(rank, sums, "test", task.sums, task.gathered)
        return {metric.name: metric.of(total) for metric in task.metrics if metric.name in expected}

    for edges in SHARES:
        shares = np.array(edges) * len(source) // 47
        for found in in_threads(
            len(edges) - 1, lambda rank, shares=shares: evaluated(rank, shares)
        ):
            assert found == pytest.approx(expected, rel=1e-12)
    assert all(np.isfinite(list(expected.values())))


@needs_extra("trained_models")
def test_a_job_decides_by_a_metric_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    f1 = torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro")
    config = {"model.name": "linear", "run": "out", "epochs": 3, "batch.size": 32}
    data = {split: own_data.classes(split) for split in ("train", "val")}
    run = hvdtrain.train(
        config,
        train_data=data["train"],
        val_data=data["val"],
        metrics={"f1": (f1, "max")},
        objective="f1",
    )
    epochs = [
        event
        for event in map(json.loads, (tmp_path / "out" / "events.jsonl").read_text().splitlines())
        if event["kind"] == "epoch"
    ]
    said = hvdtrain.predict(run, data["val"]).argmax(1)
    expected = f1(torch.tensor(said), torch.tensor(data["val"]["y"])).item()
    assert (
        run.last == epochs[-1]["val_f1"] == pytest.approx(expected, rel=1e-6)
        and 0 <= epochs[0]["train_f1"] <= 1
    )


@needs_extra("trained_models")
def test_a_job_gathers_at_its_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whose header says so; in training the metric is not known; evaluate() has it too."""
    monkeypatch.chdir(tmp_path)
    roc = torchmetrics.AUROC(task="multiclass", num_classes=3)
    config = {
        "model.name": "linear",
        "run": "out",
        "epochs": 2,
        "batch.size": 32,
        "batch.evaluate": 10,
        "speed.precision": "fp64",
    }
    data = {split: thirds(split) for split in ("train", "val")}
    run = hvdtrain.train(
        config,
        train_data=data["train"],
        val_data=data["val"],
        metrics={"roc": (roc, "max")},
        objective="roc",
    )
    assert (
        "metric roc: of evaluations alone, which gather what they keep" in capsys.readouterr().out
    )
    events = list(map(json.loads, (tmp_path / "out" / "events.jsonl").read_text().splitlines()))
    epochs = [event for event in events if event["kind"] == "epoch"]
    expected = roc(
        torch.tensor(hvdtrain.predict(run, data["val"])), torch.tensor(data["val"]["y"])
    ).item()
    assert (
        run.last == epochs[-1]["val_roc"] == pytest.approx(expected, rel=1e-6)
        and epochs[-1]["train_roc"] is None
    )
    assert [event["roc"] for event in events if event["kind"] == "step"] == [None] * sum(
        event["kind"] == "step" for event in events
    )
    found = hvdtrain.evaluate(run, data["val"], metrics={"roc": (roc, "max")})
    assert found["roc"] == pytest.approx(expected, rel=1e-6)


class Odd(torchmetrics.Metric):
    """With a state that ranks put together in a way of its own, or take the mean of, or that is no
    tensor."""

    def __init__(self, reduction: Any, default: Any = None) -> None:
        super().__init__()
        self.add_state(
            "state", torch.tensor(0.0) if default is None else default, dist_reduce_fx=reduction
        )

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        if isinstance(self.state, list):
            self.state.append("word")  # type: ignore[arg-type]
        else:
            self.state = self.state + preds.mean()

    def compute(self) -> torch.Tensor:
        return torch.as_tensor(self.state)


def test_states_that_cannot_be_put_together_are_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"metric mine: Odd combines state of several ranks with nansum\(\)\n.*\n  fix: "
        "dist_reduce_fx=",
    ):
        read_metrics({"mine": (Odd(torch.nansum), "max")})
    with pytest.raises(
        UserError,
        match="metric mine: MinMaxMetric contains other metrics, whose states are unknown",
    ):
        read_metrics({"mine": (torchmetrics.MinMaxMetric(torchmetrics.MeanMetric()), "max")})
    mean: Any = read_metrics({"mine": (Odd("mean"), "max")})["mine"]
    batch = {"y": torch.ones(2)}
    parts = mean.function(torch.ones(2), batch)
    assert mean.of(parts + parts) == 1.0 and np.isnan(mean.of(Concatenated()))
    with pytest.raises(
        UserError, match=r"Odd takes the mean of state over ranks, which depends on their number"
    ):
        mean.of(parts + mean.function(torch.zeros(2), batch))
    with pytest.raises(UserError, match=r"Odd keeps state, whose values are not tensors"):
        read_metrics({"mine": (Odd(None, []), "max")})["mine"].function(torch.ones(2), batch)
    with pytest.raises(
        UserError, match="metric mine belongs to torchmetrics, which computes on torch tensors"
    ):
        refuse_parts(read_metrics({"mine": (Odd("mean"), "max")}))


def test_several_numbers_and_other_shapes_are_refused() -> None:
    several: Any = read_metrics(
        {"mine": (torchmetrics.F1Score(task="multiclass", num_classes=3, average="none"), "max")}
    )["mine"]
    assert several.of is not None
    with pytest.raises(
        UserError,
        match=r"metric mine: MulticlassF1Score returns 3 numbers, not one\n.*\n  fix: "
        r'average="macro"',
    ):
        several.of(np.ones(several.length))
    for batch, message in (
        ({"tokens": torch.ones(4)}, "compares outputs with y, but the batch only has tokens"),
        ({"y": np.ones(4)}, "torch tensors"),
    ):
        with pytest.raises(UserError, match=message):
            several.function(torch.ones(4, 3), batch)
    with pytest.raises(
        UserError, match=r"metric mine: MeanSquaredError\.update\(\) fails for outputs \(4, 3\)"
    ):
        read_metrics({"mine": (torchmetrics.MeanSquaredError(), "min")})["mine"].function(
            torch.ones(4, 3), {"y": torch.ones(4)}
        )


class Count(torchmetrics.Metric):
    """Samples: no ratio, in which what is counted twice cancels."""

    def __init__(self, state: Any, reduction: Any, **how: Any) -> None:
        super().__init__(**how)
        self.add_state("v", state, dist_reduce_fx=reduction)

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        if isinstance(self.v, list):
            self.v.append(target * 0 + 1)
        else:
            self.v = self.v + len(target)

    def compute(self) -> torch.Tensor:
        return torch.cat(self.v).sum() if isinstance(self.v, list) else self.v


@pytest.mark.parametrize(("state", "reduction"), [(torch.tensor(0.0), "sum"), ([], "cat")])
def test_ranks_are_put_together_once_where_torch_distributed_runs(
    state: Any, reduction: str
) -> None:
    running = {
        "distributed_available_fn": lambda: True,
        "dist_sync_fn": lambda x, group=None: [x, x],
    }
    own: Any = read_metrics({"mine": (Count(state, reduction, **running), "max")})["mine"]
    found = own.function(torch.ones(4), {"y": torch.ones(4)})
    assert own.of(found if reduction == "cat" else found.sum(0).numpy()) == 4


def test_a_metric_that_fails_is_told_by_its_name() -> None:
    batch = {"y": torch.ones(4)}
    few = {"y": torch.ones(1)}
    for metric, message in (
        (
            torchmetrics.MaxMetric(),
            r"metric mine: MaxMetric\.update\(\) fails for outputs \(4,\): .*\n.*\n  fix: .* a "
            r"metric whose update\(\) takes",
        ),
        (torchmetrics.CatMetric(), r"metric mine: CatMetric\.update\(\) fails"),
        (torchmetrics.retrieval.RetrievalMAP(), r"metric mine: RetrievalMAP\.update\(\) fails"),
    ):
        with pytest.raises(UserError, match=message):
            read_metrics({"mine": (metric, "max")})["mine"].function(torch.ones(4), batch)
    for inputs, message in (
        (
            lambda outputs, batch: outputs,
            r"the function of its inputs returns a Tensor, not two tensors\n.*\n  fix: \(metric, "
            r"\"max\", lambda",
        ),
        (lambda outputs, batch: (outputs, 1, 2), "returns 3 things, not two tensors"),
        (
            lambda outputs, batch: (outputs, batch["z"]),
            r"the function of its inputs fails: KeyError: 'z'\n.*test_torchmetrics.py:\d+",
        ),
    ):
        with pytest.raises(UserError, match=message):
            read_metrics({"mine": (torchmetrics.R2Score(), "max", inputs)})["mine"].function(
                torch.ones(4), batch
            )
    one: Any = read_metrics({"mine": (torchmetrics.R2Score(), "max")})["mine"]
    with pytest.raises(
        UserError,
        match=r"metric mine: R2Score\.compute\(\) fails: ValueError: Needs at least .*\n.*\n  "
        r"fix: more samples",
    ):
        one.of(np.asarray(one.function(torch.ones(1), few).sum(0)))
    with pytest.raises(
        UserError, match=r"metric mine is the class R2Score\n.*\n  fix: an object of it: R2Score"
    ):
        read_metrics({"mine": (torchmetrics.R2Score, "max")})
    with pytest.raises(
        UserError,
        match=r"metric mine is a MetricCollection, which returns several numbers\n.*\n  fix: add "
        "each of its metrics",
    ):
        read_metrics({"mine": (torchmetrics.MetricCollection([torchmetrics.R2Score()]), "max")})


def test_no_metric_is_called_for_a_pass_without_samples(tmp_path: Path) -> None:
    """norm.kind=sync may give a rank one: metrics of the library, and functions, do not take it.
    The other numbers stay as they are."""
    f1 = torchmetrics.classification.MulticlassF1Score(num_classes=10, average="macro")

    def largest(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return outputs.reshape(len(outputs), -1).amax(1)  # fails without samples

    words = (
        "data.name=digits model.name=convnet model.widths=[3,4] norm.kind=sync batch.size=500 "
        "stop.steps=2 speed.precision=fp64"
    )
    plain, measured_too = (
        hvdtrain.train({"run": str(tmp_path / name)}, *words.split(), metrics=metrics)
        for name, metrics in {
            "plain": None,
            "measured": {"f1": (f1, "max"), "largest": (largest, "max")},
        }.items()
    )
    assert all(
        np.array_equal(plain.weights[name], array) for name, array in measured_too.weights.items()
    )
