"""The tasks: their metrics and gradients against formulas by hand, facts that make a task again,
and data that do not fit."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import own_data
import pytest
import torch
from own_data import PADDING, VOCABULARY
from ranks import needs_extra

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.comm.on_all_ranks import allreduce_sums
from hvdtrain.config.read import configure
from hvdtrain.core.metrics import Metric, add_sums, is_better, ratio, reaches, zero_sums
from hvdtrain.core.progress import Hyper
from hvdtrain.data.configured.split import divide
from hvdtrain.data.field import Field
from hvdtrain.data.source import ArraySource, NamedArrays
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import Learner
from hvdtrain.tasks import language, regression
from hvdtrain.tasks.around import UserTask, as_task
from hvdtrain.tasks.classification import Classification
from hvdtrain.tasks.task import Task
from hvdtrain.tasks.transform import column_stats
from hvdtrain.training.build import build_learner, build_task, restore_task
from hvdtrain.training.data_facts import facts_of_task, identity
from hvdtrain.training.datasets import open_datasets
from hvdtrain.training.replicas.probe import probe_batch

HYPER = Hyper(lr=0.1, momentum=0.0, weight_decay=0.0, batch=6)


def learner_of(task: Any, *words: str) -> Learner:
    config = configure(None, ["speed.precision=fp64", f"task.name={task.name}", *words])
    return build_learner(config, task, SingleProcessCommunicator())


def host(sums: dict[str, Any]) -> dict[str, Any]:
    return allreduce_sums(SingleProcessCommunicator(), sums, "test")


# metrics


def test_directions_and_nan() -> None:
    assert (
        is_better(2.0, 1.0, "max")
        and not is_better(1.0, 1.0, "max")
        and is_better(1.0, 2.0, "min")
        and not is_better(2.0, 1.0, "min")
    )
    assert (
        is_better(5.0, math.nan, "max")
        and is_better(5.0, math.nan, "min")
        and not is_better(math.nan, 5.0, "min")
    )
    assert (
        reaches(1.0, 1.0, "max")
        and reaches(1.0, 1.0, "min")
        and reaches(0.9, 1.0, "min")
        and not reaches(math.nan, 1.0, "min")
    )
    assert math.isnan(ratio("loss", "tokens")({"loss": 0.0, "tokens": 0}))


def test_vectors_of_ranks_without_samples_have_the_length_of_the_others() -> None:
    lengths = {"loss": 0, "target": 3}
    empty = zero_sums(lengths)
    assert empty == {"loss": 0.0, "target": 0.0, "count": 0}
    found = allreduce_sums(SingleProcessCommunicator(), empty, "test", lengths)
    assert found["target"].tolist() == [0.0, 0.0, 0.0] and (found["loss"], found["count"]) == (
        0.0,
        0.0,
    )
    more = {"loss": torch.tensor(0.5), "target": torch.tensor([1.0, 2.0, 3.0]), "count": 2}
    one = allreduce_sums(
        SingleProcessCommunicator(), add_sums(add_sums(empty, more), more), "test", lengths
    )
    assert one["target"].tolist() == [2.0, 4.0, 6.0] and one["loss"] == 1.0
    assert add_sums({"target": (1.0, 2.0)}, {"target": (0.5, 0.5)}) == {"target": (1.5, 2.5)}


# regression


def regression_task(outputs: int = 2, **options: Any) -> Any:
    train, val = (NamedArrays(own_data.numbers(split, outputs)) for split in ("train", "val"))
    return regression.build("regression", train, val, "task.name", **options)


@pytest.mark.parametrize("framework", ["torch", "numpy", "jax"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_errors_of_a_linear_model_by_hand(
    framework: str, outputs: int, jax_compilation_cache: None
) -> None:
    """All outputs are the biases, so that the errors are those of constants; two batches, one of a
    single sample."""
    task = regression_task(outputs)
    data = own_data.numbers("val", outputs)
    one = learner_of(task, f"framework={framework}", "model.name=linear")
    bias = np.array([4.0, -1.0])[:outputs]
    one.load(one.state() | {"p.fc.bias": bias})
    batches = [
        {name: array[rows] for name, array in data.items()}
        for rows in (slice(0, 46), slice(46, 47))
    ]
    sums = zero_sums(task.sums)
    for batch in batches:
        sums = add_sums(sums, one.evaluate(one.to_device(batch)))
    total = allreduce_sums(SingleProcessCommunicator(), sums, "test", task.sums)
    found = {metric.name: metric.of(total) for metric in task.metrics}
    y = data["y"].reshape(47, outputs)
    residual = ((y - bias) ** 2).sum(0)
    spread = ((y - y.mean(0)) ** 2).sum(0)
    expected = {
        "mse": ((y - bias) ** 2).mean(),
        "mae": np.abs(y - bias).mean(),
        "r2": (1 - residual / spread).mean(),
    }
    assert found == pytest.approx({"loss": expected["mse"], **expected}, rel=1e-12)
    assert total["count"] == 47


@pytest.mark.parametrize("loss", ["squared_error", "absolute_error"])
def test_a_step_of_regression_is_that_of_autograd(loss: str) -> None:
    task = regression_task(loss=loss)
    data = own_data.numbers("train")
    batch = {name: array[:6] for name, array in data.items()}
    x = torch.tensor((batch["x"] - task.mean) / task.std).reshape(6, 6)
    weight = torch.zeros(2, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    error = x @ weight.T + bias - torch.tensor(batch["y"])
    expected = (error.square() if loss == "squared_error" else error.abs()).mean()
    expected.backward()
    for framework in ("torch", "numpy"):
        one = learner_of(task, f"framework={framework}", "model.name=linear", "optim.name=sgd")
        sums = host(one.step([one.to_device(batch)], HYPER, 0))
        assert sums["loss"] / 6 == pytest.approx(expected.item(), rel=1e-12)
        assert weight.grad is not None and bias.grad is not None
        np.testing.assert_allclose(one.state()["p.fc.weight"], -0.1 * weight.grad, rtol=1e-12)
        np.testing.assert_allclose(one.state()["p.fc.bias"], -0.1 * bias.grad, rtol=1e-12)


def test_r2_keeps_its_digits_for_targets_far_from_zero_and_is_unknown_for_constant_ones() -> None:
    """A mean of 1e8 with a deviation of 1: sums of plain squares would have no digit left."""
    random = np.random.default_rng(0)
    data = {"x": random.normal(size=(50, 2)), "y": 1e8 + random.normal(size=50)}
    source = NamedArrays(data)
    task = regression.build("regression", source, source, "task.name")
    one = learner_of(task, "framework=numpy", "model.name=linear")
    one.load(one.state() | {"p.fc.bias": np.array([1e8])})
    total = allreduce_sums(
        SingleProcessCommunicator(), one.evaluate(one.to_device(data)), "test", task.sums
    )
    expected = 1 - ((data["y"] - 1e8) ** 2).sum() / ((data["y"] - data["y"].mean()) ** 2).sum()
    assert regression.r2(total) == pytest.approx(expected, rel=1e-6)
    same = {"count": 3, "residual": [1.0], "target": [6.0], "target_square": [12.0]}
    assert math.isnan(regression.r2(same)) and math.isnan(regression.r2(same | {"count": 0}))


def test_images_can_be_inputs_of_regression() -> None:
    images = np.random.default_rng(0).integers(0, 256, (9, 4, 3, 2)).astype(np.uint8)
    source = NamedArrays({"x": images, "y": np.arange(9.0)})
    task = regression.build("regression", source, source, "task.name")
    np.testing.assert_allclose(task.mean, images.reshape(-1, 2).mean(0) / 255, rtol=1e-13)
    inputs = []
    for framework in ("torch", "numpy"):
        one: Any = learner_of(task, f"framework={framework}", "model.name=linear")
        batch = one.to_device(source.read(np.arange(9)))
        inputs.append(
            np.asarray(
                one.forward._part.inputs(batch.arrays).flatten(1)
                if framework == "torch"
                else batch.x
            )
        )
    expected = ((images / 255 - task.mean) / task.std).transpose(0, 3, 1, 2).reshape(9, -1)
    for found in inputs:
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_columns_are_exact_in_any_order() -> None:
    x = np.random.default_rng(1).normal(1e6, 1.0, (999, 3, 2))
    stats, turned = (column_stats(NamedArrays({"x": array}), "x") for array in (x, x[::-1]))
    assert stats.mean.tolist() == turned.mean.tolist() and stats.std.tolist() == turned.std.tolist()
    np.testing.assert_allclose(stats.mean, x.reshape(-1, 2).mean(0), rtol=1e-14)
    np.testing.assert_allclose(stats.std, x.reshape(-1, 2).std(0), rtol=1e-9)
    assert column_stats(NamedArrays({"x": np.ones((4, 2))}), "x").std.tolist() == [1.0, 1.0]


# language


def language_task(**options: Any) -> Any:
    return language.build(
        "language", own_data.tokens("train"), own_data.tokens("val"), "task.name", **options
    )


GPT = ("model.name=gpt", "model.layers=1", "model.width=8", "model.heads=2", "optim.name=sgd")


@pytest.mark.parametrize("ignore", [None, PADDING])
def test_a_step_of_language_is_the_mean_over_tokens_whatever_the_micro_batches(
    ignore: int | None,
) -> None:
    """Against one cross_entropy of torch over all tokens; the micro-batches have from no token to
    14."""
    task = language_task(ignore=ignore)
    batch = own_data.tokens("train").read(np.arange(6))  # sample 0 is padding alone
    one: Any = learner_of(task, *GPT)
    before = {name: p.detach().clone() for name, p in one.model.named_parameters()}
    tokens = torch.tensor(batch["tokens"].astype(np.int64))
    targets = (
        tokens[:, 1:].masked_fill(tokens[:, 1:] == PADDING, -100)
        if ignore is not None
        else tokens[:, 1:]
    )
    count = int((targets != -100).sum())
    assert count == 48 if ignore is None else 6 < count < 40
    loss = torch.nn.functional.cross_entropy(
        one.model.train()(tokens[:, :-1]).flatten(0, 1), targets.flatten()
    )
    expected = torch.autograd.grad(loss, list(one.model.parameters()))
    micro = [
        one.to_device({"tokens": batch["tokens"][rows]}) for rows in ([0], [1, 2, 3], [4, 5], [])
    ]
    sums = host(one.step(micro, HYPER, 0))
    assert (sums["tokens"], sums["count"]) == (count, 6)
    assert sums["loss"] / count == pytest.approx(loss.item(), rel=1e-12)
    for (name, p), gradient in zip(one.model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(
            p.detach() - before[name], -0.1 * gradient, rtol=1e-10, atol=1e-14
        )
    metrics = {metric.name: metric.of(sums) for metric in task.metrics}
    assert metrics["perplexity"] == pytest.approx(math.exp(loss.item()), rel=1e-12) and metrics[
        "bits"
    ] == pytest.approx(loss.item() / math.log(2))


def test_a_batch_without_any_token_to_predict_changes_nothing() -> None:
    one: Any = learner_of(language_task(ignore=PADDING), *GPT)
    before = one.state()
    sums = host(
        one.step([one.to_device({"tokens": np.full((3, 9), PADDING, np.uint16)})], HYPER, 0)
    )
    assert (sums["loss"], sums["tokens"], sums["count"], sums["nonfinite"]) == (0.0, 0.0, 3.0, 0.0)
    assert all(np.array_equal(array, before[name]) for name, array in one.state().items())


def test_nats_beyond_a_float_are_an_infinite_perplexity() -> None:
    perplexity = next(metric for metric in language_task().metrics if metric.name == "perplexity")
    assert perplexity.of({"loss": 1e4, "tokens": 1.0}) == math.inf and math.isnan(
        perplexity.of({"loss": 0.0, "tokens": 0.0})
    )


# facts


def tasks() -> Iterator[Any]:
    yield Classification((8, 6, 1), 3, np.array([0.5]), np.array([0.25]))
    yield regression_task()
    yield regression_task(1, loss="absolute_error", objective="r2", standardize=False)
    yield language_task()
    yield language_task(ignore=3)


@pytest.mark.parametrize("task", list(tasks()), ids=lambda task: task.name)
def test_a_task_is_made_again_from_its_facts(task: Any) -> None:
    config = configure(None, [f"task.name={task.name}"])
    facts = json.loads(json.dumps(task.facts()))
    again = restore_task(config, facts)
    assert json.loads(json.dumps(again.facts())) == facts and (again.sizes, again.fields) == (
        task.sizes,
        task.fields,
    )
    for name in facts:
        if name in ("objective", "ignore"):
            continue
        for wrong in (None, "x", [], [[]], -1, [math.nan], [0, [0], 0]):
            with pytest.raises((KeyError, TypeError, ValueError, OverflowError)):
                restore_task(config, facts | {name: wrong})


@pytest.mark.parametrize("task", list(tasks()), ids=lambda task: task.name)
def test_the_probe_is_a_batch_of_the_task(task: Any) -> None:
    batch = probe_batch(task)
    assert batch.keys() == task.fields.keys()
    for name, field in task.fields.items():
        assert batch[name].shape == (8, *field.shape) and batch[name].dtype == field.dtype
        assert batch[name].std() > 0 or not field.shape
        assert not field.values or 0 <= batch[name].min() <= batch[name].max() < field.values


def test_facts_of_all_ranks_are_those_of_the_task() -> None:
    config = configure(None, ["data.name=own_data:numbers", "task.name=regression"])
    datasets = open_datasets(config)
    from hvdtrain.training.data_facts import data_facts

    found = data_facts(config, datasets)
    assert facts_of_task(found) == datasets.task.facts()
    data = identity(config, datasets)["data"]
    assert data["samples"] == 131 and data["task"] == "regression" and len(data["arrays"]) == 16


# data that do not fit


@pytest.mark.parametrize(
    ("arrays", "values", "message"),
    [
        ({}, {}, "do not have the same samples: none"),
        (
            {"x": np.zeros(3), "y": np.zeros(4)},
            {},
            r"do not have the same samples: x float64 \(3,\), y float64 \(4,\)",
        ),
        ({"x": np.array(3.0)}, {}, "do not have the same samples"),
        ({"x": np.array(["a", "b"])}, {}, "field x is <U1 .*, expected numbers"),
        (
            {"y": np.array([[1.0, 2.0], [3.0, np.nan]])},
            {},
            "field y of sample 1 has nan, expected a finite number",
        ),
        (
            {"tokens": np.array([[0, 1], [7, 1]], np.uint16)},
            {"tokens": 7},
            "field tokens of sample 1 has 7, expected 0 to 6",
        ),
        ({"tokens": np.array([[0, -1]])}, {"tokens": 7}, "field tokens of sample 0 has -1"),
    ],
)
def test_arrays_that_are_no_data_set(
    arrays: dict[str, np.ndarray], values: dict[str, int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        NamedArrays(arrays, values)


def numbers(**arrays: np.ndarray) -> NamedArrays:
    return NamedArrays(arrays)


@pytest.mark.parametrize(
    ("words", "train", "message"),
    [
        (
            "",
            numbers(x=np.zeros((4, 2)), y=np.zeros(4)),
            r"with integer labels y; the data have x float64 \(2,\)",
        ),
        (
            "task.name=regression",
            numbers(x=np.zeros(4)),
            "needs a field y, the numbers to predict; the data have x float64",
        ),
        ("task.name=language", numbers(x=np.zeros(4)), "needs a field tokens, integers"),
        (
            "task.name=language",
            numbers(tokens=np.zeros((4, 3), np.int64)),
            r"tokens are int64 \(3,\)",
        ),
        (
            "task.name=language task.ignore=11",
            own_data.tokens("train"),
            "task.ignore=11 is not a token: tokens are 0 to 10",
        ),
        (
            "task.name=regression augment.mixup=0.2",
            numbers(x=np.zeros(4), y=np.zeros(4)),
            "augment.mixup mixes the labels of classes",
        ),
        (
            "task.name=regression augment.cutmix=1.0",
            numbers(x=np.zeros(4), y=np.zeros(4)),
            "augment.cutmix mixes the labels of classes",
        ),
        pytest.param(
            "task.name=segmentation augment.mixup=0.2",
            numbers(**own_data.shapes("train")),
            r"augment.mixup mixes the labels of classes(.|\n)*fix: augment.mixup=0; or "
            r"augment.cutmix, which pastes boxes of images with",
            marks=needs_extra("maps"),
        ),
        pytest.param(
            "task.name=language task.ignore=0 log.noise_scale=true",
            own_data.tokens("train"),
            "log.noise_scale compares means over samples",
            marks=needs_extra("noise_scale"),
        ),
    ],
)
def test_data_that_do_not_fit_a_task(words: str, train: NamedArrays, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_task(train, train, configure(None, words.split()))


def test_sets_that_do_not_fit_each_other() -> None:
    with pytest.raises(
        UserError,
        match=r"y is float64 \(2,\) in the training set, float64 \(\) in the validation set",
    ):
        regression.build(
            "regression",
            NamedArrays(own_data.numbers("train")),
            NamedArrays(own_data.numbers("val", 1)),
            "task.name",
        )
    with pytest.raises(UserError, match="training windows have 9 tokens, validation windows 5"):
        language.build("language", own_data.tokens("train"), own_data.tokens("val", 5), "task.name")


@pytest.mark.parametrize(
    ("task", "words", "message"),
    [
        (
            regression_task(),
            "model.name=wide_resnet",
            r"model.name=wide_resnet takes images .H, W, C., but the inputs .* are \(3, 2\)",
        ),
        (
            regression_task(),
            "model.name=gpt",
            "gpt is built from context and vocabulary, and task.name=regression has shape, outputs",
        ),
        (
            language_task(),
            "model.name=mlp",
            "mlp is built from shape and outputs, and task.name=language has context, vocabulary",
        ),
        (
            language_task(),
            "framework=jax model.name=mlp",
            "model.name=mlp is built from shape|task.name=language does not compute with",
        ),
        (regression_task(), "model.name=torch.nn:Flatten", "has no parameter to train"),
        (
            regression_task(),
            "model.name=torch.nn:Linear model.in_features=2 model.out_features=5",
            r"returns \(2, 3, 5\), not numbers \(2, 2\)",
        ),
    ],
)
def test_models_that_do_not_fit_a_task(task: Any, words: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        learner_of(task, *words.split())


def test_a_division_of_data_without_classes_has_each_sample_once() -> None:
    for source in (own_data.tokens("train"), NamedArrays(own_data.numbers("train"))):
        train, val = divide(source, 0.25)
        assert (len(train), len(val)) == (98, 33)
        assert train.fields == val.fields == source.fields and train.identity() != val.identity()
        name = next(iter(source.fields))
        whole = np.concatenate([part.read(np.arange(len(part)))[name] for part in (train, val)])
        assert sorted(map(str, whole.tolist())) == sorted(
            map(str, source.read(np.arange(131))[name].tolist())
        )


def test_fields_are_shown() -> None:
    assert (
        str(Field("uint16", (9,), VOCABULARY)) == "uint16 (9,) below 11"
        and str(Field("float64", ())) == "float64 ()"
    )
    images = ArraySource(np.zeros((3, 4, 5, 2), np.uint8), np.zeros(3, np.int64), 7)
    assert images.fields == {"x": Field("uint8", (4, 5, 2)), "y": Field("int64", (), 7)}


# tasks of the user's own


class Wrong:
    """Not a task."""


def no_task() -> Wrong:
    return Wrong()


class OfNoMetric(own_data.Quantile):
    """With an objective that is none of its metrics."""

    objective = "accuracy"


def of_no_metric() -> OfNoMetric:
    return OfNoMetric((3, 2), 0.5)


class OfATakenName(own_data.Quantile):
    metrics = (*own_data.Quantile.metrics, Metric("lr", ratio("below", "count"), "min"))


def of_a_taken_name() -> OfATakenName:
    return OfATakenName((3, 2), 0.5)


class OfManyMembers(own_data.Quantile):
    """With members that Task has defaults of, without being one."""

    main = "image"
    class_label = "y"
    mask_label = "mask"
    drawn = Field("uint16", (4,), 9)
    takes_lengths = True
    takes_split_logits = True
    has_user_loss = True
    details = "3 numbers"
    notes = ("a line",)
    examples = None

    def notes_on_data(self, *_: object) -> list[str]:
        return ["of the data"]

    def rows(self, *_: object) -> str:
        return "rows"


class Losses(own_data.Quantile):
    """One that is wrong in the way that `how` says."""

    how = ""

    def each(self, outputs: Any, batch: dict[str, Any], training: bool) -> Any:
        each = super().each(outputs, batch, training)
        return {
            "mean": each._replace(loss=each.loss.mean()),
            "matrix": each._replace(loss=each.loss[:, None] - each.loss),
            "number": each.loss,
            "undeclared": each._replace(terms=each.terms | {"above": each.loss}),
            "fails": each if self.how != "fails" else outputs.cross(batch["y"]),
        }[self.how]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "mean",
            r"each\(\) of task.name=quantile gives loss of shape \(\), not \(2,\): one row for "
            r"each sample",
        ),
        ("matrix", r"gives loss of shape \(2, 2\), not \(2,\)"),
        ("number", r"gives a Tensor, not Each\(loss, terms\)"),
        ("undeclared", "gives above, below, loss, not the sums below, loss"),
        (
            "fails",
            r"the loss of task.name=quantile fails for what the model gives: RuntimeError[^:]*: "
            r".*(.|\n)*outputs.cross\(",
        ),
    ],
)
def test_a_loss_that_is_not_one_of_each_sample(
    how: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Losses, "how", how)
    with pytest.raises(UserError, match=message):
        learner_of(as_task(Losses((3, 2), 0.5)), "model.name=linear")


def test_what_is_wrong_with_a_task_of_the_users_own() -> None:
    source = NamedArrays(own_data.numbers("train", 1))
    for name, message in (
        ("test_tasks:no_task", "test_tasks:no_task returned a Wrong without name, fields"),
        (
            "test_tasks:of_no_metric",
            "metrics loss, below, sums loss, below, objective accuracy",
        ),
        ("test_tasks:of_a_taken_name", "has a metric or a sum named lr"),
        ("own_data:missing", "own_data has no missing"),
    ):
        with pytest.raises(UserError, match=message):
            build_task(source, source, configure(None, [f"task.name={name}"]))
    with pytest.raises(
        UserError,
        match=r"own_data:quantile\(train.* does not fit: got an unexpected keyword argument "
        r"'shrae'",
    ):
        build_task(
            source, source, configure(None, ["task.name=own_data:quantile", "task.shrae=0.3"])
        )
    with pytest.raises(
        UserError,
        match=r"^task\.ignore_label is an option of task\.name=classification, and "
        r"own_data:quantile has no parameter ignore_label\n  where: task\.ignore_label",
    ):
        build_task(
            source, source, configure(None, ["task.name=own_data:quantile", "task.ignore_label=0"])
        )
    task = build_task(
        source, source, configure(None, ["task.name=own_data:quantile", "task.share=0.25"])
    )
    assert (
        isinstance(task, UserTask)
        and task.facts()["share"] == 0.25
        and isinstance(task.metrics[0], Metric)
    )
    own = OfManyMembers((3, 2), 0.5)
    found = as_task(own)
    assert isinstance(found, UserTask)
    for name in vars(Task):
        if name.startswith("_") or name in ("frameworks", "main_input"):
            continue
        if name in vars(OfManyMembers):
            assert getattr(found, name) == getattr(own, name), name
        elif name not in vars(own_data.Quantile) and not callable(vars(Task)[name]):
            assert getattr(found, name) == vars(Task)[name].fget(found), name
    assert found.main_input == "image" and task.main_input == "x"
    own.main_input = "pixels"  # type: ignore[attr-defined]
    assert found.main_input == "pixels"
    with pytest.raises(UserError, match="task.name=quantile does not support framework=numpy"):
        learner_of(task, "framework=numpy", "model.name=linear")
