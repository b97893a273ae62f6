"""Several labels of a sample: F1 and average precision beside scikit-learn's, steps beside
autograd, resumed jobs, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import own_data
import pytest
import torch
from rank_threads import in_threads
from sklearn.metrics import average_precision_score, f1_score

from hvdtrain.__main__ import main
from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.comm.on_all_ranks import allreduce_sums
from hvdtrain.config.read import configure
from hvdtrain.core.metrics import add_sums, zero_sums
from hvdtrain.core.progress import Hyper
from hvdtrain.data.declared import as_declared
from hvdtrain.data.source import Source
from hvdtrain.data.user_data.as_source import as_source
from hvdtrain.errors import UserError
from hvdtrain.extras.multilabel.tasks import multilabel
from hvdtrain.extras.multilabel.tasks.multilabel import Multilabel
from hvdtrain.training.build import build_learner
from hvdtrain.training.checkpoint import files
from hvdtrain.training.conflicts import refuse_conflicts
from hvdtrain.training.datasets import open_datasets

WORDS = [
    "data.name=own_data:labels",
    "task.name=multilabel",
    "model.name=linear",
    "speed.precision=fp64",
    "optim.name=sgd",
]
SHARES = {1: [0, 47], 2: [0, 30, 47], 3: [0, 5, 6, 47]}  # where the ranks' samples begin and end
FRAMEWORKS = pytest.mark.parametrize("framework", ["torch", "numpy", "jax"])


def declared(split: str, **options: Any) -> tuple[Source, Multilabel]:
    source = as_source(own_data.labels(split), "mine", "data.name")
    task = multilabel.build("multilabel", source, source, "task.name", **options)
    return as_declared(source, task.fields), task


def weights_of(task: Multilabel) -> dict[str, np.ndarray]:
    random = np.random.default_rng(5)
    return {"p.fc.weight": random.normal(size=(5, 6)), "p.fc.bias": random.normal(size=5)}


def learner_of(framework: str, task: Multilabel, communicator: Communicator) -> Any:
    found: Any = build_learner(
        configure(None, [*WORDS[1:], f"framework={framework}"]), task, communicator
    )
    found.load(found.state() | weights_of(task))
    return found


@FRAMEWORKS
def test_f1_and_average_precision_are_those_of_scikit_learn(
    framework: str, jax_compilation_cache: None
) -> None:
    """On three ranks with 5, 1 and 41 samples; the average precision is that of the numbers of the
    bins, and near that of the scores."""
    source, task = declared("val")
    data = own_data.labels("val")
    first = weights_of(task)
    logits = (data["x"] - task.mean) / task.std @ first["p.fc.weight"].T + first["p.fc.bias"]

    def evaluated(rank: Communicator) -> dict[str, float]:
        one = learner_of(framework, task, rank)
        sums = zero_sums(task.sums)
        rows = SHARES[3][rank.rank : rank.rank + 2]
        for start in range(*rows, 8):
            sums = add_sums(
                sums,
                one.evaluate(one.to_device(source.read(np.arange(start, min(start + 8, rows[1]))))),
            )
        total = allreduce_sums(rank, sums, "test", task.sums)
        return {metric.name: metric.of(total) for metric in task.metrics}

    scores = 1 / (1 + np.exp(-logits))
    bins = np.floor(scores * 100)
    expected = {
        "loss": (np.logaddexp(0, logits) - data["y"] * logits).mean(),
        "f1": f1_score(data["y"], logits > 0, average="micro"),
        "f1_macro": f1_score(data["y"], logits > 0, average="macro", zero_division=0.0),
        "average_precision": np.mean(
            [average_precision_score(data["y"][:, label], bins[:, label]) for label in range(4)]
        ),
    }
    found = (
        in_threads(3, evaluated)
        if framework != "jax"
        else [evaluated_alone(framework, source, task)]
    )
    for one in found:
        assert one == pytest.approx(expected, rel=1e-12)
    exact = np.mean(
        [average_precision_score(data["y"][:, label], scores[:, label]) for label in range(4)]
    )
    assert found[0]["average_precision"] == pytest.approx(exact, abs=0.02) and 0.1 < exact < 0.9


def evaluated_alone(framework: str, source: Source, task: Multilabel) -> dict[str, float]:
    one = learner_of(framework, task, SingleProcessCommunicator())
    total = allreduce_sums(
        SingleProcessCommunicator(),
        one.evaluate(one.to_device(source.read(np.arange(47)))),
        "test",
        task.sums,
    )
    return {metric.name: metric.of(total) for metric in task.metrics}


@FRAMEWORKS
def test_steps_are_those_of_autograd_on_any_number_of_ranks(
    framework: str, jax_compilation_cache: None
) -> None:
    source, task = declared("val")
    data = own_data.labels("val")
    first = weights_of(task)
    weight, bias = (
        torch.tensor(first[name], requires_grad=True) for name in ("p.fc.weight", "p.fc.bias")
    )
    x = torch.tensor((data["x"] - task.mean) / task.std)
    for _ in range(3):
        loss = torch.nn.BCEWithLogitsLoss()(x @ weight.T + bias, torch.tensor(data["y"]).double())
        for p, gradient in zip(
            (weight, bias), torch.autograd.grad(loss, (weight, bias)), strict=True
        ):
            p.data -= 0.7 * gradient

    def trained(rank: Communicator) -> np.ndarray:
        one = learner_of(framework, task, rank)
        edges = SHARES[rank.size]
        rows = np.arange(edges[rank.rank], edges[rank.rank + 1])
        for step in range(3):
            micro = [one.to_device(source.read(part)) for part in (rows[:4], rows[4:])]
            one.step(
                micro, Hyper(lr=0.7, momentum=0.0, weight_decay=0.0, batch=47, step=step), step
            )
        found: np.ndarray = one.state()["p.fc.weight"]
        return found

    for size in (1, 2, 3) if framework != "jax" else (1,):
        for found in in_threads(size, trained):
            np.testing.assert_allclose(found, weight.detach(), rtol=1e-12, atol=1e-14)


def test_a_stopped_job_goes_on_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        *WORDS,
        "batch.size=31",
        "optim.base_lr=0.5",
        "stop.target=0.99",
        "checkpoint.keep_best=1",
        "task.objective=average_precision",
    ]
    for run, more in (
        ("whole", ["max_steps=11"]),
        ("parts", ["max_steps=6"]),
        ("parts", ["max_steps=11", "resume=auto"]),
    ):
        assert main([*words, f"run={run}", *more]) == 0
    weights = [
        files.read_arrays(files.finished(tmp_path / run)[-1], 2**20)["p.fc.weight"]
        for run in ("whole", "parts")
    ]
    assert np.array_equal(*weights) and np.abs(weights[0]).max() > 0.1


def test_labels_can_be_integers_and_bins_left_out() -> None:
    _, task = declared("val", bins=0, objective="f1_macro")
    assert [metric.name for metric in task.metrics] == [
        "loss",
        "f1",
        "f1_macro",
    ] and task.sums.keys().isdisjoint({"all_by_bin"})
    assert multilabel.restore(task.facts()).facts() == task.facts()
    y = own_data.labels("val")["y"].astype(np.int32)
    given = as_source({"x": own_data.labels("val")["x"], "y": y}, "mine", "data.name")
    found = as_declared(given, multilabel.build("multilabel", given, given, "task.name").fields)
    assert (
        found.read(np.arange(47))["y"].dtype == np.uint8
        and (found.read(np.arange(47))["y"] == y).all()
    )


@pytest.mark.parametrize(
    ("y", "options", "message"),
    [
        (np.arange(6) % 2, {}, r"y is int64 \(\)\n.*\n  fix: y\[:, None\] for one label"),
        (np.ones((6, 2)), {}, r"y is float64 \(2,\)\n.*\n  fix: y\.astype\('uint8'\)"),
        (
            np.eye(6, dtype=int),
            {"bins": 2**20},
            r"task\.bins=1048576 is not possible with 6 la",
        ),
        (
            np.eye(6, dtype=int),
            {"bins": 0, "objective": "average_precision"},
            "leaves out the average precision",
        ),
        (2 * np.eye(6, dtype=int), {}, r"field y of sample 0 has 2, expected 0 to 1"),
    ],
)
def test_data_that_do_not_fit_are_refused(
    y: np.ndarray, options: dict[str, Any], message: str
) -> None:
    source = as_source({"x": np.ones((6, 3)), "y": y}, "mine", "data.name")
    with pytest.raises(UserError, match=message):
        as_declared(
            source, multilabel.build("multilabel", source, source, "task.name", **options).fields
        )


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "model.label_smoothing=0.1",
            "model.label_smoothing=0.1 needs task.name=classification or language, but this is "
            "task.name=multilabel",
        ),
        (
            "model.loss=squared_error",
            "model.loss=squared_error needs task.name=classification, but this is multilabel",
        ),
        ("augment.mixup=0.3", "augment"),
    ],
)
def test_keys_of_classes_are_refused(word: str, message: str) -> None:
    config = configure(None, [*WORDS, word])
    with pytest.raises(UserError, match=message):
        refuse_conflicts(config, "single", 1)
        open_datasets(config)
