"""Labels of classes: every integer type and container, those that are no class, samples without
one, and validation sets by class."""

from __future__ import annotations

import math
from typing import Any

import datasets
import numpy as np
import own_data
import pandas
import pytest
import torch
from own_data import UNLABELLED
from rank_threads import in_threads
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, random_split

from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.comm.on_all_ranks import allreduce_sums
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import Batch
from hvdtrain.core.progress import Hyper
from hvdtrain.data.declared import as_declared
from hvdtrain.data.source import Source
from hvdtrain.data.user_data.as_source import as_source
from hvdtrain.errors import UserError
from hvdtrain.tasks import classification
from hvdtrain.tasks.classification import Classification, PartlyLabelled
from hvdtrain.tasks.label_counts import notes_on_gaps
from hvdtrain.training.build import build_learner, build_task, planned_task, restore_task
from hvdtrain.training.conflicts import refuse_conflicts
from hvdtrain.training.data_notes import notes
from hvdtrain.training.datasets import Datasets, open_datasets
from hvdtrain.training.given import given_data, given_task, with_given

N = 24
COLUMNS = np.random.default_rng(0).normal(size=(N, 5))
LABELS = np.arange(N) * 7 % 3
IMAGES = np.random.default_rng(1).integers(0, 255, (N, 6, 6, 3), dtype=np.uint8)
GREY = IMAGES[..., 0]
FLOATS = np.random.default_rng(2).normal(size=(N, 3, 6, 6)).astype(np.float32)
TYPES = ("uint8", "int8", "int16", "int32", "uint16", "uint32", "uint64", ">i4", ">i8", ">u2")


class Samples:
    """A Dataset of pairs, of three classes."""

    classes = 3

    def __init__(self, x: Any, y: Any) -> None:
        self.x = x
        self.y = y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.x[index], self.y[index]


class Hidden(Samples):
    classes = 0


CONTAINERS = {
    "columns": lambda y: {"x": COLUMNS, "y": y},
    "images": lambda y: {"x": IMAGES, "y": y},
    "grey images": lambda y: {"x": GREY, "y": y},
    "float images": lambda y: {"x": FLOATS, "y": y},
    "a pair": lambda y: (COLUMNS, y),
    "a table": lambda y: pandas.DataFrame(COLUMNS, columns=list("abcde")).assign(y=native(y)),
    "tensors": lambda y: {"x": torch.tensor(COLUMNS), "y": torch.as_tensor(native(y))},
    "a TensorDataset": lambda y: TensorDataset(torch.tensor(COLUMNS), torch.as_tensor(native(y))),
    "a Dataset": lambda y: Samples(COLUMNS, y),
    "a list of pairs": lambda y: list(zip(COLUMNS, y, strict=True)),
    "a Hugging Face Dataset": lambda y: hugging_face(native(y)),
    "a Subset": lambda y: Subset(
        TensorDataset(torch.tensor(COLUMNS), torch.as_tensor(native(y))), range(N)
    ),
}


def hugging_face(y: np.ndarray) -> Any:
    """One with a transform, whose samples are read one by one."""
    rows = datasets.Dataset.from_dict({"x": COLUMNS, "label": y})
    return rows.with_transform(
        lambda batch: {"x": [np.asarray(x) for x in batch["x"]], "label": batch["label"]}
    )


def native(y: np.ndarray) -> np.ndarray:
    return y.astype(y.dtype.newbyteorder("="))


def source(given: object) -> Source:
    return as_source(given, "mine", "data.name")


def declared(given: object, ignore_label: int | None = None) -> tuple[Source, Classification]:
    found = source(given)
    task = classification.build(
        "classification", found, found, "task.name", ignore_label=ignore_label
    )
    return as_declared(found, task.fields), task


def configured(makers: dict[str, Any], *words: str) -> Any:
    """The configuration of a script that gives these objects."""
    names = [f"{section}.name={given.name}" for section, given in makers.items()]
    return with_given(configure(None, [*words, *names]), makers)


def hyper(batch: int) -> Hyper:
    return Hyper(lr=0.1, momentum=0.0, weight_decay=0.0, batch=batch)


def host(sums: dict[str, Any]) -> dict[str, Any]:
    return allreduce_sums(SingleProcessCommunicator(), sums, "test")


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_integer_type_is_read_as_int64(container: str) -> None:
    every = np.arange(N)
    expected, of_int64 = declared(CONTAINERS[container](LABELS))
    assert (expected.read(every)["y"] == LABELS).all() and of_int64.classes == 3
    for dtype in TYPES:
        found, task = declared(CONTAINERS[container](LABELS.astype(dtype)))
        batch = found.read(every)
        assert (
            batch["y"].dtype == np.int64
            and (batch["y"] == LABELS).all()
            and task.facts() == of_int64.facts()
        ), dtype
        assert batch["x"].tobytes() == expected.read(every)["x"].tobytes()


@pytest.mark.parametrize("framework", ["torch", "numpy"])  # JAX: below
def test_a_step_on_uint8_labels_is_that_on_int64(framework: str) -> None:
    states = []
    for dtype in (np.uint8, np.int64):
        found, task = declared({"x": COLUMNS, "y": LABELS.astype(dtype)})
        learner = build_learner(
            configure(None, [f"framework={framework}", "model.name=linear"]),
            task,
            SingleProcessCommunicator(),
        )
        learner.step([learner.to_device(found.read(np.arange(N)))], hyper(N), 0)
        states.append(learner.state())
    assert (
        all(np.array_equal(array, states[1][name]) for name, array in states[0].items())
        and np.abs(states[0]["p.fc.weight"]).max() > 1e-3
    )


def test_booleans_are_two_classes() -> None:
    found, task = declared({"x": COLUMNS, "y": LABELS > 0})
    assert task.classes == 2 and found.read(np.arange(3))["y"].tolist() == (LABELS[:3] > 0).tolist()


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("label", [-1, -100])
def test_a_label_below_zero_is_an_error_with_its_sample(container: str, label: int) -> None:
    wrong = np.where(np.arange(N) == 7, label, LABELS)
    with pytest.raises(
        UserError,
        match=rf"field y of sample 7 has {label}, expected 0 to 2\n  where: mine.*\n  fix: "
        rf".*task\.ignore_label={label} of task\.name=classification",
    ):
        declared(CONTAINERS[container](wrong))[0].read(np.array([2, 7]))


def test_a_label_beyond_the_classes_is_an_error_with_its_sample() -> None:
    with pytest.raises(
        UserError,
        match=r"field y of sample 2 has 3, expected 0 to 2\n.*\n  fix: labels count from 0 to 2: "
        r"y - 1 where they begin",
    ):
        declared(Samples(COLUMNS, LABELS + 1))[0].read(np.arange(N))
    with pytest.raises(
        UserError, match="field y of sample 5 has 18446744073709551615, expected 0 to"
    ):
        declared(
            {
                "x": COLUMNS,
                "y": np.where(np.arange(N) == 5, np.uint64(2**64 - 1), LABELS.astype(np.uint64)),
            }
        )
    task = declared({"x": COLUMNS, "y": LABELS})[1]
    with pytest.raises(
        UserError, match="field y of sample 1 has 3, expected 0 to 2"
    ):  # of another set, as in evaluate
        as_declared(
            source({"x": COLUMNS, "y": np.where(np.arange(N) == 1, 3, LABELS).astype(np.uint8)}),
            task.fields,
        )


@pytest.mark.parametrize(
    ("y", "fix"),
    [
        (LABELS[:, None], "y[:, 0]"),
        (np.eye(3)[LABELS], "y.argmax(1)"),
        (LABELS.astype(np.float32), "y.astype('int64')"),
    ],
)
def test_what_makes_labels_of_numbers_that_are_none(y: np.ndarray, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        declared({"x": COLUMNS, "y": y})
    assert caught.value.fix is not None and caught.value.fix.startswith(fix)


def test_samples_without_a_number_are_refused() -> None:
    with pytest.raises(UserError, match=r"x is float64 \(0,\): it contains no numbers"):
        declared({"x": COLUMNS[:, :0], "y": LABELS})


# a loss of torch, given to hvdtrain.train()


def test_a_loss_of_torch_names_the_sample_of_a_label_that_is_no_class() -> None:
    for label, ignored in ((-1, -100), (3, -1)):
        data = {"x": COLUMNS, "y": np.where(np.arange(N) == 9, label, LABELS)}
        given = {
            "data": given_data(data, data),
            "task": given_task(torch.nn.CrossEntropyLoss(ignore_index=ignored), None, None),
        }
        config = configured(
            given,
            "model.name=torch.nn:Linear",
            "model.in_features=5",
            "model.out_features=3",
            "batch.size=2",
        )
        found = open_datasets(config)
        learner = build_learner(config, found.task, SingleProcessCommunicator())
        batch = learner.to_device(found.train.read(np.arange(N)))
        with pytest.raises(
            UserError,
            match=f"sample 9 of the training set has {label} in y, but loss=CrossEntropyLoss of a "
            "model with 3 outputs",
        ):
            learner.step([batch], hyper(N), 0)


# samples without a class


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("framework", "words", "label"),
    [
        ("torch", "", -1),
        ("torch", "model.label_smoothing=0.1", 2**20),
        ("torch", "model.loss=squared_error", -100),
        ("jax", "model.label_smoothing=0.1", -1),
        ("jax", "model.loss=squared_error", 2**20),
        ("numpy", "model.label_smoothing=0.1", -1),
        ("numpy", "model.loss=squared_error", 2**20),
    ],
)
def test_a_step_is_that_of_the_samples_with_a_class(
    framework: str, words: str, label: int, jax_compilation_cache: None
) -> None:
    """On the same job without the other samples."""
    has_class = np.arange(N) % 3 > 0
    data = {"x": COLUMNS, "y": np.where(has_class, LABELS, label).astype(np.int32)}
    found, task = declared(data, ignore_label=label)
    of_classes = Classification(task.shape, task.classes, task.mean, task.std, task.dtype)
    config = configure(
        None,
        [f"framework={framework}", "model.name=linear", "speed.precision=fp64", *words.split()],
    )
    one, other = (
        build_learner(config, each, SingleProcessCommunicator()) for each in (task, of_classes)
    )
    micro = [one.to_device(found.read(rows)) for rows in (np.arange(5), np.arange(5, N))]
    rest = found.read(np.flatnonzero(has_class))
    sums = host(one.step(micro, hyper(N), 0))
    expected = host(other.step([other.to_device(rest)], hyper(len(rest["y"])), 0))
    assert (task.classes, sums["count"], sums["labelled"]) == (3, N, N * 2 / 3)
    for name in ("loss", "right"):
        assert sums[name] == pytest.approx(expected[name], rel=1e-12)
    evaluated = host(one.evaluate(one.to_device(found.read(np.arange(N)))))
    expected = host(other.evaluate(other.to_device(rest)))
    assert [metric.of(evaluated) for metric in task.metrics] == pytest.approx(
        [metric.of(expected) for metric in of_classes.metrics], rel=1e-12
    )
    expected = other.state()
    for name, array in one.state().items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_ranks_divide_by_the_samples_of_all_that_have_a_class(framework: str) -> None:
    """Rank 0 has none with a class, rank 1 some, rank 2 all: the weights are those of one
    process."""
    y = np.where(
        np.arange(N) < 8,
        UNLABELLED,
        np.where(np.arange(N) % 2 < (np.arange(N) < 16), UNLABELLED, LABELS),
    )
    found, task = declared({"x": COLUMNS, "y": y}, ignore_label=UNLABELLED)
    config = configure(
        None, [f"framework={framework}", "model.name=linear", "speed.precision=fp64"]
    )

    def weights(communicator: Communicator, rows: np.ndarray) -> np.ndarray:
        learner = build_learner(config, task, communicator)
        learner.step(
            [learner.to_device(found.read(part)) for part in (rows[:3], rows[3:])], hyper(N), 0
        )
        return learner.state()["p.fc.weight"]

    assert np.count_nonzero(y != UNLABELLED) == 12
    alone = weights(SingleProcessCommunicator(), np.arange(N))
    for found_on_rank in in_threads(
        3, lambda rank: weights(rank, np.arange(N)[8 * rank.rank : 8 * rank.rank + 8])
    ):
        np.testing.assert_allclose(found_on_rank, alone, rtol=1e-12)


@pytest.mark.parametrize("framework", ["torch", "jax", "numpy"])
def test_a_batch_without_any_class_changes_nothing(
    framework: str, jax_compilation_cache: None
) -> None:
    found, task = declared(
        {"x": COLUMNS, "y": np.where(np.arange(N) < 8, UNLABELLED, LABELS)}, ignore_label=UNLABELLED
    )
    learner = build_learner(
        configure(None, [f"framework={framework}", "model.name=linear"]),
        task,
        SingleProcessCommunicator(),
    )
    before = learner.state()
    sums = host(learner.step([learner.to_device(found.read(np.arange(8)))], hyper(8), 0))
    assert (sums["loss"], sums["labelled"], sums["count"], sums["nonfinite"]) == (
        0.0,
        0.0,
        8.0,
        0.0,
    )
    assert all(np.array_equal(array, before[name]) for name, array in learner.state().items())
    assert math.isnan(task.metrics[0].of(sums))


@pytest.mark.parametrize("container", CONTAINERS)
def test_an_ignored_label_is_no_class_in_any_container(container: str) -> None:
    for label in (-1, 255):
        y = np.where(np.arange(N) % 4 == 0, label, LABELS)
        found, task = declared(CONTAINERS[container](y), ignore_label=label)
        assert isinstance(task, PartlyLabelled) and task.classes == 3
        assert (found.read(np.arange(N))["y"] == y).all()
        assert restore_task(configure(None, []), task.facts()).facts() == task.facts()


def test_a_plan_is_of_the_classes_without_the_ignored_label() -> None:
    images = source({"x": IMAGES, "y": np.where(np.arange(N) % 4 == 0, 255, LABELS)})
    planned = planned_task(configure(None, ["task.ignore_label=255"]), images)
    assert (
        isinstance(planned, PartlyLabelled)
        and planned.classes == 3
        and planned.fields["y"].ignored == 255
    )
    assert planned_task(configure(None, []), images).sizes["classes"] == 256


def test_what_does_not_go_with_an_ignored_label() -> None:
    for words, message in (
        (["augment.mixup=0.2"], "augment.mixup mixes each sample with any other"),
        (["augment.cutmix=0.2"], "augment.cutmix mixes each sample with any other"),
        (["task.ignore_label=4294967296"], "task.ignore_label=4294967296 is not a label"),
        (
            ["log.noise_scale=true", "comm.engine=mpi"],
            "log.noise_scale compares means over samples",
        ),
    ):
        with pytest.raises(UserError, match=message):
            config = configure(None, ["task.ignore_label=3", *words])
            refuse_conflicts(config, "mpi", 2)
            open_datasets(config)
    config = configured(
        {"task": given_task(torch.nn.CrossEntropyLoss(), None, None)}, "task.ignore_label=3"
    )
    with pytest.raises(
        UserError,
        match=r"task\.ignore_label needs task\.name=classification, but this job has the loss "
        r"CrossEntropyLoss",
    ):
        refuse_conflicts(config, "single", 1)
    for y, message in (
        (np.full(N, -1), "no training sample has a class: every label is task.ignore_label=-1"),
        (
            np.full(N, -2),
            "no training sample has a class: every label is task.ignore_label=-1, or below zero",
        ),
    ):
        with pytest.raises(UserError, match=message):
            declared({"x": COLUMNS, "y": y}, ignore_label=-1)


def test_the_header_says_what_is_left_out_and_that_labels_begin_at_1() -> None:
    def lines(y: np.ndarray, ignore_label: int | None = None) -> list[str]:
        found, task = declared({"x": COLUMNS, "y": y}, ignore_label)
        return notes(configure(None, []), Datasets(found, found, task))

    assert lines(LABELS) == []
    assert lines(LABELS + 1) == [
        "labels begin at 1: no training sample is of class 0, one of the 4 outputs of the model; "
        "y - 1 counts from 0"
    ]
    left_out = (
        "task.ignore_label=0: 8 of 24 training samples and 8 of 24 validation samples are in no "
        "loss, metric or count"
    )
    assert lines(LABELS, 0)[0] == left_out and len(lines(LABELS, 0)) == 2
    assert lines(np.where(LABELS == 2, -1, LABELS), -1) == [left_out.replace("=0", "=-1")]


# validation sets of a training set


def divided(given: object, *words: str, loss: Any = None) -> Datasets:
    makers = {"data": given_data(given, None)} | (
        {} if loss is None else {"task": given_task(loss, None, None)}
    )
    return open_datasets(configured(makers, "data.val_share=0.25", "batch.size=2", *words))


@pytest.mark.parametrize("container", [name for name in CONTAINERS if name != "a Dataset"])
def test_classes_are_found_and_divided_with_a_share_for_validation(container: str) -> None:
    """Of each class, 8 samples, a quarter; the largest class is in the training set alone where it
    has one sample."""
    found = divided(CONTAINERS[container](LABELS.astype(np.int32)))
    assert found.task.sizes["classes"] == 3
    for part, count in ((found.train, 6), (found.val, 2)):
        assert np.bincount(part.read(np.arange(len(part)))["y"]).tolist() == [count] * 3
    alone = divided(CONTAINERS[container](np.where(np.arange(N) == 3, 5, LABELS)))
    assert (
        alone.task.sizes["classes"] == 6 and 5 not in alone.val.read(np.arange(len(alone.val)))["y"]
    )


def test_classes_of_parts_and_sums_of_datasets() -> None:
    tensors = TensorDataset(torch.tensor(COLUMNS), torch.tensor(LABELS))
    of_class_0 = Subset(tensors, np.flatnonzero(LABELS == 0).tolist())
    first, second = random_split(tensors, [16, 8], torch.Generator().manual_seed(1))
    for train, val in (
        (first, second),
        (of_class_0, of_class_0),
        (ConcatDataset([first, of_class_0]), second),
        (DataLoader(first), second),
    ):
        assert build_task(source(train), source(val), configure(None, [])).sizes["classes"] == 3
    found = source(ConcatDataset([first, of_class_0])).known_labels()
    assert found is not None and found.tolist() == [*LABELS[list(first.indices)], *[0] * 8]
    with pytest.raises(UserError, match="the number of classes is not known"):
        build_task(
            source(ConcatDataset([tensors, Hidden(COLUMNS, LABELS)])),
            source(first),
            configure(None, []),
        )


@pytest.mark.parametrize(
    "loss", [torch.nn.CrossEntropyLoss(), lambda outputs, batch: outputs.sum(1) + batch["y"]]
)
def test_validation_is_by_class_whatever_the_loss(loss: Any) -> None:
    """Of 60, 31, 10 and 2 samples a quarter, at least one: 15, 8, 2, 1."""
    y = np.random.default_rng(3).permutation(np.repeat(np.arange(4), (60, 31, 10, 2)))
    for dtype in (np.int64, np.uint8):
        found = divided({"x": np.ones((len(y), 2)), "y": y.astype(dtype)}, loss=loss)
        assert np.bincount(found.val.read(np.arange(len(found.val)))["y"]).tolist() == [15, 8, 2, 1]


def test_integers_that_are_no_classes_are_divided_alike() -> None:
    """Counts to predict, and more values than samples that validate."""
    data = {"x": COLUMNS, "y": np.arange(N)}
    for words, loss in (
        ("task.name=regression", None),
        ("", lambda outputs, batch: outputs.sum(1)),
    ):
        found = divided(data, *words.split(), loss=loss)
        assert (len(found.train), len(found.val)) == (18, 6)


def test_labels_that_are_read_with_the_samples_are_named() -> None:
    found = divided(Samples(COLUMNS, LABELS))
    config = configure(None, ["data.val_share=0.25"])
    assert (
        len(found.val) == 6
        and "data.val_share is drawn from all samples, not from each class"
        in notes(config, found)[0]
    )
    assert not any("alike" in line for line in notes(config, divided({"x": COLUMNS, "y": LABELS})))


def test_partly_labelled_sets_are_those_of_the_invariance_test() -> None:
    found: Batch = own_data.partly_labelled("train")
    assert 0.4 < (found["y"] == UNLABELLED).mean() < 0.6 and (found["y"][:20] == UNLABELLED).all()


@pytest.mark.parametrize(
    ("name", "y", "classes", "ignored", "lines"),
    [
        ("classification", [0, 1, 2, 1], 3, None, []),
        ("classification", [0, 1, 255], 256, None, ["no sample is of class 2 to 254: the model "
                                                    "has an output for each of 256; "
                                                    "task.ignore_label=255 if 255 stands for no "
                                                    "class"]),
        ("classification", [0, 1, 255], 2, 255, []),
        ("classification", [0, 3, 3, 1], 5, None, ["no sample is of class 2, 4: the model has an "
                                                   "output for each of 5"]),
        ("segmentation", [[[0, 255], [1, 1]]] * 4, 256, None, ["no pixel is of class 2 to 254: "
                                                               "the model has an output for each "
                                                               "of 256; "
                                                              "task.ignore_label=255 if 255 "
                                                              "stands for no class"]),
        ("segmentation", [[[0, 255], [1, 1]]] * 4, 2, 255, []),
        ("multilabel", [[0, 1, 0], [0, 1, 1]], 3, None, ["no sample has label 0: the model has an "
                                                         "output for each of 3"]),
    ],
)  # fmt: skip
def test_gaps_in_labels_are_reported(
    name: str, y: list[Any], classes: int, ignored: int | None, lines: list[str]
) -> None:
    labels = np.array(y)
    source = as_source({"x": np.zeros((len(labels), 2)), "y": labels}, "data", "train_data")
    assert notes_on_gaps(source, name, classes, ignored) == lines
