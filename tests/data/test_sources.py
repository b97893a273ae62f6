"""Sources in memory, the embedded digits, and the synthetic one."""

from __future__ import annotations

import math
import subprocess
import sys
import tracemalloc
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ranks import needs_extra

from hvdtrain.config.read import configure
from hvdtrain.core.arrays import digest
from hvdtrain.core.extras import tables
from hvdtrain.core.import_torchvision import import_torchvision
from hvdtrain.core.progress import fold
from hvdtrain.data.channel_stats import channel_stats
from hvdtrain.data.configured.split import divide, smaller, validation_mask
from hvdtrain.data.datasets import cifar, digits, idx, synthetic
from hvdtrain.data.labels import smallest
from hvdtrain.data.source import ArraySource, NamedArrays, Source
from hvdtrain.data.subset import SubsetOfImages
from hvdtrain.data.user_data import arrays
from hvdtrain.data.user_data.as_source import as_source
from hvdtrain.data.user_data.dataset import labels_of
from hvdtrain.errors import UserError
from hvdtrain.training.datasets import open_datasets

PROJECT = Path(__file__).parents[2]


def images(n: int = 7, classes: int = 3) -> ArraySource:
    pixels = fold(1, np.arange(n * 5 * 4 * 3, dtype=np.uint64)) >> 56
    return ArraySource(
        pixels.astype(np.uint8).reshape(n, 5, 4, 3), np.arange(n) % classes, classes, "here"
    )


def test_reads_by_index_into_fresh_memory() -> None:
    source = images()
    batch = source.read(np.array([5, 0, 5]))
    assert (len(source), source.shape, source.classes) == (7, (5, 4, 3), 3)
    assert batch["x"].dtype == np.uint8 and batch["y"].dtype == np.int64
    assert batch["y"].tolist() == [2, 0, 2]
    np.testing.assert_array_equal(batch["x"], np.stack([source.x[5], source.x[0], source.x[5]]))
    batch["x"][:] = 0
    assert source.x[5].any()
    assert source.read(np.empty(0, np.int64))["x"].shape == (0, 5, 4, 3)


def test_stats_are_exact() -> None:
    source = images()
    mean, deviation = source.stats()
    assert mean.dtype == deviation.dtype == np.float64
    for channel in range(3):
        values = [Fraction(int(v), 255) for v in source.x[..., channel].ravel()]
        average = sum(values) / len(values)
        variance = sum((v - average) ** 2 for v in values) / len(values)
        assert mean[channel] == float(average)
        assert deviation[channel] == pytest.approx(math.sqrt(variance), rel=1e-15)


def test_stats_do_not_depend_on_the_order_of_samples() -> None:
    # counted in three blocks
    x = np.random.default_rng(2).integers(0, 256, (3, 1200, 1200, 2), np.uint8)
    for a, b in zip(channel_stats(x), channel_stats(np.ascontiguousarray(x[::-1])), strict=True):
        assert a.tobytes() == b.tobytes()
    assert channel_stats(x)[0] == pytest.approx(
        [x[..., 0].mean() / 255, x[..., 1].mean() / 255], rel=1e-12
    )


def test_a_constant_channel_has_deviation_one() -> None:
    x = np.zeros((2, 2, 2, 2), np.uint8)
    x[..., 1] = [[[10, 20], [10, 20]], [[10, 20], [10, 20]]]
    mean, deviation = channel_stats(x)
    assert mean.tolist() == [0.0, 15 / 255]
    assert deviation.tolist() == [1.0, 5 / 255]


@pytest.mark.parametrize(
    ("x", "y", "text"),
    [
        (
            np.zeros((2, 4, 4, 1), np.float32),
            np.zeros(2, np.int64),
            "images are float32 (2, 4, 4, 1), expected uint8 (n, H, W, C)",
        ),
        (
            np.zeros((2, 4, 4), np.uint8),
            np.zeros(2, np.int64),
            "images are uint8 (2, 4, 4), expected",
        ),
        (np.zeros((0, 4, 4, 1), np.uint8), np.zeros(0, np.int64), "no dimension 0"),
        (
            np.zeros((2, 4, 4, 1), np.uint8),
            np.zeros(2, np.float32),
            "labels are float32 (2,), expected integers (2,)",
        ),
        (
            np.zeros((2, 4, 4, 1), np.uint8),
            np.zeros(3, np.int64),
            "labels are int64 (3,), expected integers (2,)",
        ),
        (np.zeros((2, 4, 4, 1), np.uint8), np.array([0, 3]), "label 3 of sample 1 is outside 0..2"),
        (
            np.zeros((2, 4, 4, 1), np.uint8),
            np.array([-1, 0]),
            "label -1 of sample 0 is outside 0..2",
        ),
    ],
)
def test_wrong_arrays_are_refused(x: np.ndarray, y: np.ndarray, text: str) -> None:
    with pytest.raises(UserError) as caught:
        ArraySource(x, y, 3, "here")
    assert text in str(caught.value) and "where: here" in str(caught.value)


@pytest.mark.parametrize("of_dataset", [False, True])
def test_labels_take_the_memory_of_their_own_type(
    monkeypatch: pytest.MonkeyPatch, of_dataset: bool
) -> None:
    """Of 2 million images, in memory or too large for it, with labels of a byte; as int64 they
    would be 16 MB, and with a place each 32."""
    x = np.zeros((2_000_000, 1, 1, 1), np.uint8)
    y = np.arange(2_000_000, dtype=np.uint16).astype(np.uint8)
    if of_dataset:
        monkeypatch.setattr(arrays, "LARGE_BYTES", 2**20)
    tracemalloc.start()
    source = as_source({"x": x, "y": y}, "mine", "here")
    digest_of_all = source.identity()["labels"]
    batch = source.read(np.array([1_999_999, 3]))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(source, SubsetOfImages if of_dataset else ArraySource)
    assert peak_bytes < 8e6, peak_bytes
    assert batch["y"].dtype == np.int64 and batch["y"].tolist() == y[[1_999_999, 3]].tolist()
    assert digest_of_all == digest({"y": y.astype("<i8")}), "of checkpoints of before"


def test_labels_of_a_list_take_a_byte() -> None:
    found = labels_of(SimpleNamespace(targets=[0, 255, 3]), whole=False)
    assert found is not None and found.dtype == np.uint8 and found.tolist() == [0, 255, 3]
    assert (
        smallest(np.array([-1, 200])).dtype == np.int16
        and smallest(np.array([], np.int64)).dtype == np.int64
    )


def test_digits_are_scikit_learns_and_split_once() -> None:
    from sklearn.datasets import load_digits

    given = load_digits()
    train = digits.build("digits", None, "train")
    val = digits.build("digits", None, "val")
    assert (len(train), len(val), train.shape, train.classes) == (1437, 360, (8, 8, 1), 10)
    read = [source.read(np.arange(len(source))) for source in (train, val)]
    x = np.concatenate([batch["x"] for batch in read])[..., 0]
    y = np.concatenate([batch["y"] for batch in read])
    assert (x.min(), x.max()) == (0, 255)
    found = sorted((label, image.tobytes()) for label, image in zip(y.tolist(), x, strict=True))
    scaled = [
        np.array([int(v) * 255 // 16 for v in image.ravel()], np.uint8).tobytes()
        for image in given.images
    ]
    # every digit in one of the two, none twice
    assert found == sorted(zip(given.target.tolist(), scaled, strict=True))
    assert np.bincount(read[1]["y"]).min() >= 30  # each class is validated
    again = digits.build("digits", None, "val").read(np.arange(360))
    np.testing.assert_array_equal(again["x"], read[1]["x"])
    # the split of every run, written out
    assert read[1]["y"][:8].tolist() == [
        0,
        4,
        8,
        0,
        2,
        8,
        2,
        2,
    ]


def test_synthetic_is_a_pure_function_of_the_index() -> None:
    source = synthetic.build("synthetic", None, "train", samples=100, shape=(6, 5, 3), classes=4)
    assert (len(source), source.shape, source.classes) == (100, (6, 5, 3), 4)
    whole = source.read(np.arange(100))
    some = source.read(np.array([99, 3, 3]))
    np.testing.assert_array_equal(some["x"], whole["x"][[99, 3, 3]])
    assert some["y"].tolist() == [3, 3, 3]
    assert whole["x"].dtype == np.uint8 and whole["y"].dtype == np.int64
    assert len({image.tobytes() for image in whole["x"]}) == 100
    assert source.read(np.empty(0, np.int64))["x"].shape == (0, 6, 5, 3)
    with pytest.raises(IndexError, match="of 100"):
        source.read(np.array([100]))


def test_synthetic_pixels_follow_their_formula() -> None:
    source = synthetic.build("synthetic", None, "val", val_samples=9, shape=(4, 4, 2), classes=3)
    # class 1; a 4x4 image shows each cell of its pattern once
    x = source.read(np.array([7]))["x"][0]
    for place in range(4 * 4 * 2):
        noise = (fold(1, 7, place // 8) >> place % 8 * 8) & 255
        pattern = fold(2, 1, place) >> 56
        assert x.ravel()[place] == pattern // 4 + noise - noise // 4


def test_synthetic_can_be_learned() -> None:
    train = synthetic.build("synthetic", None, "train", samples=400)
    val = synthetic.build("synthetic", None, "val", val_samples=200)
    seen = train.read(np.arange(400))
    unseen = val.read(np.arange(200))
    # (classes, H, W, C)
    means = np.stack([seen["x"][seen["y"] == label].mean(0) for label in range(10)])
    distances = ((unseen["x"][:, None].astype(float) - means) ** 2).sum((2, 3, 4))  # (n, classes)
    assert (distances.argmin(1) == unseen["y"]).mean() > 0.95
    assert not np.array_equal(seen["x"][:200], unseen["x"])


def test_synthetic_stats_are_close_to_those_of_all_samples() -> None:
    source = synthetic.build("synthetic", None, "train", samples=3000, shape=(4, 4, 3))
    pixels = source.read(np.arange(3000))["x"] / 255
    mean, deviation = source.stats()
    assert mean == pytest.approx(pixels.mean((0, 1, 2)), abs=0.01)
    assert deviation == pytest.approx(pixels.std((0, 1, 2)), abs=0.01)


def test_synthetic_options_out_of_range_are_errors() -> None:
    with pytest.raises(UserError, match=r"0 is too small, at least 1 is needed\n  where: samples"):
        synthetic.build("synthetic", None, "train", samples=0)
    with pytest.raises(UserError, match="where: shape"):
        synthetic.build("synthetic", None, "train", shape=(8, 0, 3))
    with pytest.raises(UserError, match="where: classes"):
        synthetic.build("synthetic", None, "train", classes=0)


def test_datasets_import_no_framework_and_describe_their_options() -> None:
    script = """
import sys, typing, inspect
from hvdtrain.data.datasets import cifar, digits, idx, synthetic
print([name for name in ("torch", "torchvision", "sklearn", "PIL") if name in sys.modules])
for plugin in (cifar, digits, idx, synthetic):
    typing.get_type_hints(plugin.build)
    for option, parameter in inspect.signature(plugin.build).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            assert f"\\n{option}: " in inspect.getdoc(plugin.build), (plugin, option)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert (ended.stdout, ended.stderr) == ("[]\n", "")


def test_a_smaller_share_is_part_of_a_larger_one_and_has_each_class() -> None:
    labels = np.repeat([0, 1, 2], [50, 20, 1])
    data = NamedArrays({"x": np.arange(71)[:, None], "y": labels})
    kept = {
        share: set(smaller(data, share, labels).read(np.arange(count))["x"].ravel().tolist())
        for share, count in ((0.01, 3), (0.1, 8), (0.5, 36))
    }
    assert kept[0.01] < kept[0.1] < kept[0.5] and 70 in kept[0.01]
    assert [sum(labels[list(kept[0.5])] == label) for label in range(3)] == [25, 10, 1]
    assert len(smaller(data, 0.5)) == 36  # without labels, of all samples


def test_a_share_of_each_class_validates() -> None:
    """A tenth of 100, 20, 1 and 3 samples: 10, 2, none (the only one is trained on) and one,
    whatever the order of the samples."""
    labels = np.random.default_rng(3).permutation(np.repeat([0, 1, 2, 4], [100, 20, 1, 3]))
    mask = validation_mask(labels, 0.1)
    assert np.bincount(labels[mask], minlength=5).tolist() == [10, 2, 0, 0, 1]
    assert (mask == validation_mask(labels, 0.1)).all() and not (mask[:62] == mask[62:]).all()
    most = validation_mask(labels, 0.99)
    assert (
        np.bincount(labels[~most], minlength=5).tolist() == [1, 1, 1, 0, 1] and (most >= mask).all()
    )


@pytest.mark.parametrize("in_memory", [True, False])
def test_the_two_parts_of_a_divided_set_have_each_sample_once(in_memory: bool) -> None:
    whole: Source = images(40)
    if not in_memory:
        whole = SubsetOfImages(whole, np.arange(40))
    train, val = divide(whole, 0.25)
    assert (len(train), len(val), val.shape, val.classes) == (30, 10, (5, 4, 3), 3)
    x = np.concatenate([part.read(np.arange(len(part)))["x"] for part in (train, val)])
    everything = whole.read(np.arange(40))["x"]
    assert sorted(one.tobytes() for one in x) == sorted(one.tobytes() for one in everything)
    assert (val.labels() == val.read(np.arange(10))["y"]).all() and np.bincount(
        val.labels()
    ).tolist() == [4, 3, 3]
    assert isinstance(val, ArraySource) == in_memory
    assert train.stats().mean == pytest.approx(
        train.read(np.arange(30))["x"].mean((0, 1, 2)) / 255, rel=1e-12
    )
    if not in_memory:
        with pytest.raises(IndexError):
            val.read(np.array([10]))


def test_names_of_classes_are_those_of_torchvision() -> None:
    datasets = import_torchvision().datasets
    assert list(idx._FAMILY["fashion_mnist"].classes) == datasets.FashionMNIST.classes
    assert list(idx._FAMILY["kmnist"].classes) == datasets.KMNIST.classes
    for name, count in (("cifar10", 10), ("cifar100", 100)):
        names = cifar._EDITIONS[name].classes
        assert len(names) == len({*names}) == count and list(names) == sorted(names)
    assert digits.build("digits", None, "val").class_names == tuple("0123456789")


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ("data.name=synthetic data.samples=0", "data.samples, command line"),
        pytest.param(
            "data.name=folder",
            "data.root, default",
            marks=needs_extra("image_files"),
        ),
        ("data.name=digits data.root=x", "data.root, command line"),
        pytest.param(
            "data.name=csv data.root=t.csv data.delimiter=ab",
            "data.delimiter, command line",
            marks=pytest.mark.skipif(".csv" not in tables(), reason="this copy reads no tables"),
        ),
    ],
)
def test_an_error_of_an_option_names_its_key_and_where_that_was_set(
    words: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.csv").write_text("x,y\n1,2\n")
    monkeypatch.chdir(tmp_path)
    config = configure(None, words.split())
    with pytest.raises(UserError) as caught:
        open_datasets(config)
    assert caught.value.where == where
