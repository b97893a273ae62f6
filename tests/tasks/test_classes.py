"""Classification with class weights and the first k of the outputs: beside torch's and
scikit-learn's, in every framework."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import own_data
import pytest
import torch
from rank_threads import in_threads
from sklearn.metrics import (
    average_precision_score,
    balanced_accuracy_score,
    f1_score,
    precision_score,
    recall_score,
    roc_auc_score,
    top_k_accuracy_score,
)
from sklearn.utils.class_weight import compute_class_weight

from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.comm.on_all_ranks import allreduce_sums
from hvdtrain.config import plugins
from hvdtrain.config.read import configure
from hvdtrain.core.metrics import Concatenated, add_sums, zero_sums
from hvdtrain.core.progress import Hyper
from hvdtrain.data.declared import as_declared
from hvdtrain.data.source import Source
from hvdtrain.data.user_data.as_source import as_source
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.private_api import FakeTensorMode
from hvdtrain.tasks import class_metrics, classification
from hvdtrain.tasks.labels import notes_on_counts
from hvdtrain.tasks.task import DeviceAndDtype, Task
from hvdtrain.training.build import build_learner

SHARES = {1: [0, 47], 2: [0, 30, 47], 3: [0, 5, 6, 47]}  # where the ranks' samples begin and end
WEIGHTS = (0.5, 2.0, 3.0)


def declared(words: str = "", **options: Any) -> tuple[Source, Any]:
    data = own_data.partly_labelled("val") if words else own_data.classes("val")
    source = as_source(data, "mine", "data.name")
    ignored = {"ignore_label": own_data.UNLABELLED} if words else {}
    task = classification.build("classification", source, source, "task.name", **ignored, **options)
    return as_declared(source, task.fields), task


def learner_of(framework: str, task: Task, rank: Communicator, *words: str) -> Any:
    config = configure(
        None,
        [
            f"framework={framework}",
            "model.name=linear",
            "speed.precision=fp64",
            "optim.name=sgd",
            *words,
        ],
    )
    found: Any = build_learner(config, task, rank)
    random = np.random.default_rng(5)
    found.load(
        found.state()
        | {"p.fc.weight": random.normal(size=(3, 6)), "p.fc.bias": random.normal(size=3)}
    )
    return found


@pytest.mark.in_turn
@pytest.mark.parametrize("framework", ["torch", "numpy", "jax"])
@pytest.mark.parametrize("partly", ["", "partly"])
def test_steps_and_metrics_are_those_of_torch_and_scikit_learn(
    framework: str, partly: str, jax_compilation_cache: None
) -> None:
    """The loss of each sample times the weight of its class, the mean over the samples with a
    class, with label smoothing."""
    source, task = declared(partly, class_weights=WEIGHTS, top_k=2)
    batch = source.read(np.arange(47))
    known = batch["y"] >= 0
    x = torch.tensor((batch["x"] - task.mean) / task.std)[known]
    y = torch.tensor(batch["y"])[known]
    first = learner_of(framework, task, SingleProcessCommunicator()).state()
    weight, bias = (
        torch.tensor(first[name], requires_grad=True) for name in ("p.fc.weight", "p.fc.bias")
    )
    each = (
        torch.nn.CrossEntropyLoss(label_smoothing=0.1, reduction="none")(x @ weight.T + bias, y)
        * torch.tensor(WEIGHTS)[y].double()
    )
    (gradient,) = torch.autograd.grad(each.mean(), weight)

    def stepped(rank: Communicator) -> tuple[np.ndarray, dict[str, float]]:
        one = learner_of(framework, task, rank, "model.label_smoothing=0.1")
        edges = SHARES[rank.size]
        rows = np.arange(edges[rank.rank], edges[rank.rank + 1])
        total = allreduce_sums(
            rank, one.evaluate(one.to_device(source.read(rows))), "test", task.sums
        )
        micro = [one.to_device(source.read(part)) for part in (rows[:4], rows[4:])]
        one.step(micro, Hyper(lr=0.7, momentum=0.0, weight_decay=0.0, batch=47), 0)
        return one.state()["p.fc.weight"], {
            metric.name: metric.of(total) for metric in task.metrics
        }

    logits = (x @ weight.T + bias).detach().numpy()
    plain = (
        torch.nn.functional.cross_entropy(torch.tensor(logits), y, reduction="none")
        * torch.tensor(WEIGHTS)[y].double()
    )
    expected = {
        "loss": plain.mean().item(),
        "accuracy": (logits.argmax(1) == y.numpy()).mean(),
        "top2": top_k_accuracy_score(y.numpy(), logits, k=2, labels=[0, 1, 2]),
    }
    assert 0.1 < expected["accuracy"] < expected["top2"] < 1
    for size in (1, 2, 3) if framework != "jax" else (1,):
        for found, metrics in in_threads(size, stepped):
            np.testing.assert_allclose(
                found, (weight - 0.7 * gradient).detach(), rtol=1e-12, atol=1e-14
            )
            assert metrics == pytest.approx(expected, rel=1e-12)


def test_balanced_weights_are_those_of_scikit_learn_and_facts_make_the_task_again() -> None:
    for partly in ("", "partly"):
        source, task = declared(partly, class_weights="balanced", top_k=2)
        labels = source.read(np.arange(47))["y"]
        labels = labels[labels >= 0]
        seen = np.unique(labels)
        assert task.class_weights is not None
        assert np.array(task.class_weights)[seen] == pytest.approx(
            compute_class_weight("balanced", classes=seen, y=labels), rel=1e-15
        )
        assert np.mean(np.array(task.class_weights)[labels]) == pytest.approx(1, rel=1e-14)
        assert classification.restore(task.facts()).facts() == task.facts()
    assert declared()[1].facts().keys().isdisjoint({"top_k", "class_weights"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 3}, r"task\.top_k=3 is not possible with 3 classes\n.*\n  fix: 2 to 2"),
        ({"class_weights": (1.0, 2.0)}, r"task\.class_weights has 2 weights, for 3 classes"),
        ({"class_weights": (1.0, -2.0, 1.0)}, r"task\.class_weights=\[1\.0, -2\.0, 1\.0\]"),
        ({"class_weights": (0.0, 0.0, 0.0)}, r"one number of 0 or more for each class"),
    ],
)
def test_what_is_impossible_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        declared(**options)


def test_the_words_of_a_command_are_read() -> None:
    config = configure(None, ["task.class_weights=[1.0,2.0,3]", "task.top_k=2"])
    assert classification_options(config) == {"class_weights": (1.0, 2.0, 3.0), "top_k": 2}
    assert classification_options(configure(None, ["task.class_weights=balanced"])) == {
        "class_weights": "balanced"
    }


def classification_options(config: Any) -> dict[str, Any]:
    return plugins.convert_options(config.task, "tasks")


def two_classes(samples: int = 47) -> dict[str, np.ndarray]:
    """Six columns with ties, and a rare class 1."""
    random = np.random.default_rng(3)
    x = random.integers(0, 3, (samples, 6)).astype(np.float64)
    return {"x": x, "y": (x @ np.linspace(-1.0, 1.0, 6) > 1.4).astype(np.int64)}


def three_classes(*, partly: bool) -> dict[str, np.ndarray]:
    """Six columns, and a class that follows from them with noise; partly: two of five samples have
    none."""
    random = np.random.default_rng(4)
    x = random.normal(3.0, 2.0, (47, 6))
    y = ((x - 3.0) @ random.normal(size=(6, 3)) + random.normal(0.0, 2.0, (47, 3))).argmax(1)
    has_class = (np.arange(47) % 5 > 1) | (not partly)
    return {"x": x, "y": np.where(has_class, y, own_data.UNLABELLED)}


def of_scikit_learn(y: np.ndarray, logits: np.ndarray) -> dict[str, float]:
    """The metrics of logits (n, classes), from scikit-learn; the calibration error by a loop."""
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    said = logits.argmax(1)
    two = logits.shape[1] == 2
    average = {"average": "binary" if two else "macro", "zero_division": 0}
    largest = shares.max(1)
    error = 0.0
    for number in range(15):
        is_in = (largest >= number / 15) & (largest < (number + 1) / 15 + (number == 14))
        if is_in.any():
            error += is_in.mean() * abs((said == y)[is_in].mean() - largest[is_in].mean())
    columns = [1] if two else range(3)
    return {
        "auroc": np.mean([roc_auc_score(y == label, shares[:, label]) for label in columns]),
        "average_precision": np.mean(
            [average_precision_score(y == label, shares[:, label]) for label in columns]
        ),
        "f1": f1_score(y, said, **average),
        "precision": precision_score(y, said, **average),
        "recall": recall_score(y, said, **average),
        "balanced_accuracy": balanced_accuracy_score(y, said),
        "calibration_error": error,
    }


@pytest.mark.in_turn
@pytest.mark.parametrize("framework", ["torch", "numpy", "jax"])
@pytest.mark.parametrize("data", ["two", "three", "partly"])
def test_metrics_of_classes_are_those_of_scikit_learn(
    framework: str, data: str, jax_compilation_cache: None
) -> None:
    """On one to three ranks, for two classes, three, and three with samples that have none."""
    found = two_classes() if data == "two" else three_classes(partly=data == "partly")
    source = as_source(found, "mine", "data.name")
    ignored = {"ignore_label": own_data.UNLABELLED} if data == "partly" else {}
    names = class_metrics.NAMES
    task = classification.build(
        "classification", source, source, "task.name", metrics=names, objective="auroc", **ignored
    )
    assert task.objective == "auroc" and task_restored(task).facts() == task.facts()
    source = as_declared(source, task.fields)
    known = found["y"] >= 0
    classes = 2 if data == "two" else 3
    random = np.random.default_rng(5)
    weights = {
        "p.fc.weight": random.normal(size=(classes, 6)),
        "p.fc.bias": random.normal(size=classes),
    }
    transform = task.transform
    assert transform is not None
    logits = (found["x"] - transform.mean) / transform.std @ weights["p.fc.weight"].T
    expected = of_scikit_learn(found["y"][known], (logits + weights["p.fc.bias"])[known])
    assert all(0.01 < value < 0.999 for value in expected.values())

    def evaluated(rank: Communicator) -> dict[str, float]:
        words = ["model.name=linear", "speed.precision=fp64", "optim.name=sgd"]
        one: Any = build_learner(configure(None, [f"framework={framework}", *words]), task, rank)
        one.load(one.state() | weights)
        edges = SHARES[rank.size]
        rows = np.arange(edges[rank.rank], edges[rank.rank + 1])
        sums = zero_sums(task.sums)
        for part in (rows[:4], rows[4:]):
            if len(part):
                sums = add_sums(sums, one.evaluate(one.to_device(source.read(part))))
        total = allreduce_sums(rank, sums, "test", task.sums, task.gathered)
        return {metric.name: metric.of(total) for metric in task.metrics}

    for size in (1, 2, 3) if framework != "jax" else (1,):
        for metrics in in_threads(size, evaluated):
            assert {name: metrics[name] for name in names} == pytest.approx(expected, rel=1e-12)


def task_restored(task: Task) -> Task:
    return classification.restore(json.loads(json.dumps(task.facts())))


def test_a_class_without_samples_is_in_no_mean() -> None:
    scores = np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.6, 0.1], [0.5, 0.4, 0.1]])
    labels = np.array([0, 1, 0, 1])
    part = Concatenated([((scores,), (labels,))])
    source = as_source(own_data.classes("val"), "mine", "data.name")
    task = classification.build(
        "classification", source, source, "task.name", metrics=("auroc", "f1")
    )
    auroc, f1 = task.metrics[-2:]
    assert auroc.of({"auroc_scores": part}) == pytest.approx(
        np.mean([roc_auc_score(labels == k, scores[:, k]) for k in range(2)])
    )
    assert np.isnan(auroc.of({"auroc_scores": Concatenated([((scores[:1],), (labels[:1],))])}))
    assert np.isnan(auroc.of({}))
    counts = {"class_predicted": (2, 2, 0), "class_actual": (2, 2, 0), "class_hits": (1, 1, 0)}
    assert f1.of({**counts, "count": 4}) == f1_score(labels, scores.argmax(1), average="macro")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": ("f1", "f1")}, "task.metrics names f1 twice"),
        ({"objective": "top5"}, "task.objective=top5 is not a metric of this job"),
    ],
)
def test_metrics_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        declared(**options)


def test_the_header_counts_uneven_classes() -> None:
    """Samples of each class, and the accuracy of a constant answer."""
    y = np.repeat([0, 1, 2], [93, 5, 2])
    source = as_source({"x": np.zeros((100, 2)), "y": y}, "mine", "data.name")
    assert notes_on_counts(source, 3, None, (0.5, 2, 10)) == [
        "training samples by class: 0 93 (weight 0.5), 1 5 (weight 2), 2 2 (weight 10)",
        "93.0% of the training samples are of class 0, so always predicting it has about that "
        "accuracy; task.objective=balanced_accuracy, auroc or average_precision tell models apart",
    ]
    even = as_source({"x": np.zeros((4, 2)), "y": np.array([0, 1, 0, 1])}, "mine", "data.name")
    assert notes_on_counts(even, 2, None, None) == []


def test_memory_is_predicted_with_metrics_that_gather_scores() -> None:
    """A memory prediction evaluates with tensors that have no values."""
    task = declared(metrics=("auroc",))[1]
    part = task.part("torch", configure(None, []).model, DeviceAndDtype(torch.float64, "cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        batch = {"x": torch.zeros(4, 6, dtype=torch.float64), "y": torch.zeros(4, dtype=torch.long)}
        each = part.each(torch.zeros(4, 3, dtype=torch.float64), batch, training=False)
    assert each.parts == {} and "right" in each.terms


def test_too_many_classes_for_scores_are_refused() -> None:
    y = np.arange(1500)
    source = as_source({"x": np.zeros((1500, 2)), "y": y}, "mine", "data.name")
    with pytest.raises(UserError, match="auroc gathers a score of every sample for each of 1,500"):
        classification.build("classification", source, source, "task.name", objective="auroc")
