"""Classification with class weights and the first k of the outputs: beside torch's and
scikit-learn's, in every framework."""

from __future__ import annotations

from typing import Any

import numpy as np
import own_data
import pytest
import torch
from rank_threads import in_threads
from sklearn.metrics import top_k_accuracy_score
from sklearn.utils.class_weight import compute_class_weight

from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.comm.on_all_ranks import allreduce_sums
from hvdtrain.config import plugins
from hvdtrain.config.read import configure
from hvdtrain.core.progress import Hyper
from hvdtrain.data.declared import as_declared
from hvdtrain.data.source import Source
from hvdtrain.data.user_data.as_source import as_source
from hvdtrain.errors import UserError
from hvdtrain.tasks import classification
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner

SHARES = {1: [0, 47], 2: [0, 30, 47], 3: [0, 5, 6, 47]}  # where the ranks' samples begin and end
WEIGHTS = (0.5, 2.0, 3.0)


def declared(words: str = "", **options: Any) -> tuple[Source, Classification]:
    data = own_data.partly_labelled("val") if words else own_data.classes("val")
    source = as_source(data, "mine", "data.name")
    ignored = {"ignore_label": own_data.UNLABELLED} if words else {}
    task = classification.build("classification", source, source, "task.name", **ignored, **options)
    return as_declared(source, task.fields), task


def learner_of(framework: str, task: Classification, rank: Communicator, *words: str) -> Any:
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
