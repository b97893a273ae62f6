"""Data of the user's own: what each form becomes, samples that are a function of (seed, epoch,
sample) on any process, and the errors."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import torch
from own_datasets import Flawed, Noisy, ragged_rows, rows
from PIL import Image
from ranks import ROOT, environment
from safetensors.numpy import save_file
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from waiting import wait_until

from hvdtrain.config.read import configure
from hvdtrain.core.arrays import Batch
from hvdtrain.data.around_source import inner_source
from hvdtrain.data.configured.split import divide
from hvdtrain.data.declared import as_declared
from hvdtrain.data.field import Field
from hvdtrain.data.source import ArraySource, LabelledImages, NamedArrays, Source
from hvdtrain.data.user_data.as_source import as_source
from hvdtrain.data.user_data.dataset import DatasetSource
from hvdtrain.data.user_data.user_source import user_source
from hvdtrain.errors import UserError
from hvdtrain.training.build import build_task
from hvdtrain.training.datasets import open_datasets

X = np.arange(12, dtype=np.float32).reshape(4, 3)
Y = np.array([0.5, 1.5, 2.5, 3.5])
LABELS = np.array([0, 2, 1, 2])
LARGE = np.uint64(2**63 + 5)
GREY = np.arange(4 * 6 * 5, dtype=np.uint8).reshape(4, 6, 5)
COLOURS = np.arange(4 * 3 * 6 * 5, dtype=np.uint16).astype(np.uint8).reshape(4, 3, 6, 5)


class Items:
    """A map-style Dataset of a list."""

    def __init__(self, items: list[Any], **attributes: Any) -> None:
        self.items = items
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class HalfASource:
    """A source that lacks two methods."""

    fields = MappingProxyType({"x": Field("float32", ())})

    def __len__(self) -> int:
        return 1

    def read(self, indices: np.ndarray) -> Batch:
        return {"x": np.zeros(len(indices), np.float32)}


def source(given: object, workers: int | None = None) -> Source:
    return as_source(given, "mine:numbers, train", "data.name, command line", workers)


def frame(**columns: Any) -> pandas.DataFrame:
    return pandas.DataFrame(columns)


@pytest.mark.parametrize(
    ("given", "x", "y"),
    [
        ({"x": X, "y": Y}, X, Y),
        ((X, Y), X, Y),
        ({"x": torch.from_numpy(X), "y": torch.from_numpy(Y)}, X, Y),
        ({"x": X.astype(">f4"), "y": Y}, X, Y),
        ({"x": frame(a=X[:, 0], b=X[:, 1]), "y": pandas.Series(Y)}, X[:, :2], Y),
        (TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), X, Y),
        (frame(b=X[:, 1], y=Y, a=X[:, 0]), X[:, 1::-1], Y),
        (frame(b=[1, 2, 3, 4], target=LABELS, a=Y), np.stack([[1, 2, 3, 4], Y], 1), LABELS),
        (list(zip(X, Y, strict=True)), X, Y),
        (Items([{"x": torch.from_numpy(x), "y": y} for x, y in zip(X, Y, strict=True)]), X, Y),
        (
            Items([{"pixel_values": x, "label": int(y)} for x, y in zip(X, LABELS, strict=True)]),
            X,
            LABELS,
        ),
        (
            Items([(Image.fromarray(x), y) for x, y in zip(GREY, LABELS, strict=True)]),
            GREY[..., None],
            LABELS,
        ),
        (
            Items([(Image.fromarray(x), 1) for x in COLOURS.transpose(0, 2, 3, 1)]),
            COLOURS.transpose(0, 2, 3, 1),
            np.ones(4, np.int64),
        ),
        (
            Items([(torch.from_numpy(x), 1) for x in COLOURS]),
            COLOURS.transpose(0, 2, 3, 1),
            np.ones(4, np.int64),
        ),
        (
            Items([([1.5, 2.0], np.float32(y)) for y in Y]),
            np.array([[1.5, 2.0]] * 4),
            Y.astype(np.float32),
        ),
        (DataLoader(Items(list(zip(X, Y, strict=True))), batch_size=3, shuffle=True), X, Y),
        (DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))), X, Y),
    ],
)
def test_what_a_function_may_return(given: object, x: np.ndarray, y: np.ndarray) -> None:
    found = source(given)
    assert len(found) == 4 and found.fields["x"] == Field(str(x.dtype), x.shape[1:])
    assert found.fields["y"][:2] == (str(y.dtype), ())
    indices = np.array([2, 0, 2])
    batch = found.read(indices)
    assert (
        batch["x"].dtype == x.dtype
        and (batch["x"] == x[indices]).all()
        and (batch["y"] == y[indices]).all()
    )
    assert (
        found.digests(1) == source(given).digests(1)
        and found.identity() == source(given).identity()
    )
    if not isinstance(found, ArraySource):
        assert found.identity() != source({"x": x[::-1], "y": y}).identity()


@pytest.mark.parametrize("x", [GREY, GREY[..., None], COLOURS, COLOURS.transpose(0, 2, 3, 1)])
def test_images_with_labels_are_a_data_set_of_images(x: np.ndarray) -> None:
    found = source({"x": x, "y": LABELS.astype(np.int16)})
    assert (
        isinstance(found, ArraySource)
        and found.shape == (6, 5, 1 if x.ndim == 3 or x.shape[3] == 1 else 3)
        and found.classes == 3
    )
    assert isinstance(source({"x": x, "y": Y}), NamedArrays)


def test_a_safetensors_file_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "numbers.safetensors"
    save_file({"x": X, "y": LABELS, "none": np.zeros((4, 0))}, path, {"made": "here"})
    found = source(path)
    assert isinstance(found, NamedArrays) and isinstance(found.arrays["x"], np.memmap)
    assert (found.read(np.array([3, 1]))["x"] == X[[3, 1]]).all() and found.fields["none"] == Field(
        "float64", (0,)
    )
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(
        UserError, match=r"mine:numbers, train cannot be read.*\n  where: .*numbers\.safetensors"
    ):
        source(str(path))
    with pytest.raises(
        UserError, match=r"returned the path .*data\.npz\n.*\n  fix: a file NAME\.safetensors"
    ):
        source("data.npz")
    with pytest.raises(UserError, match="cannot be read"):
        source(tmp_path / "none.safetensors")


def test_a_table_needs_numbers() -> None:
    for table, message in (
        (
            frame(a=[1.0, np.nan], y=[1, 2]),
            "column 'a' of mine:numbers, train has nan in row 1, expected a finite number",
        ),
        (
            frame(a=["p", "q"], y=[1, 2]),
            "column 'a' of mine:numbers, train is .*, expected numbers",
        ),
        (frame(y=[1, 2]), "has the target y and no other column"),
    ):
        with pytest.raises(UserError, match=message):
            source(table)
    assert source(frame(a=X[:, 0], tokens=X[:, 1])).fields.keys() == {"a", "tokens"}


@pytest.mark.in_turn
def test_samples_are_drawn_by_seed_epoch_and_sample_alone() -> None:
    """Whatever their order, their batch and the process that reads them; this process's own
    generators stay as they are."""
    here = source(Noisy("train"))
    there = source(Noisy("train"), workers=2)
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    expected = random.random(), np.random.rand(), torch.rand(())
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    indices = np.array([5, 9, 130, 5, 0])
    epochs = np.array([0, 0, 0, 1, 1])
    batch = here.read_in_epochs(indices, epochs, 4)
    assert (random.random(), np.random.rand(), torch.rand(())) == expected
    one_by_one = [here.read_in_epochs(indices[[i]], epochs[[i]], 4) for i in (4, 3, 2, 1, 0)][::-1]
    for name in ("x", "y"):
        assert (batch[name] == np.concatenate([one[name] for one in one_by_one])).all()
        assert (batch[name] == there.read_in_epochs(indices, epochs, 4)[name]).all()
        assert (here.read(indices)[name] == there.read(indices)[name]).all()
    noise = batch["x"] - Noisy("train").arrays["x"][indices]
    assert (
        len({*noise.ravel()}) == noise.size
        and (noise != here.read_in_epochs(indices, epochs, 5)["x"]).all()
    )
    read = here.read(np.array([5, 5]))["x"]
    assert (read[0] == read[1]).all() and (read[0] != batch["x"][0]).all()
    assert here.digests(1) == there.digests(1) != here.digests(2)
    assert here.identity() == there.identity() != source(Noisy("val")).identity()
    train, val = divide(here, 0.1)
    part = train.read_in_epochs(np.array([7]), np.array([2]), 4)["x"]
    whole = train.indices[[7]]  # type: ignore[attr-defined]
    assert (part == here.read_in_epochs(whole, np.array([2]), 4)["x"]).all() and len(val) == 13


def many() -> np.ndarray:
    return np.arange(40)


@pytest.mark.in_turn
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("flaw", "message"),
    [
        (
            "error",
            r"sample 7 of mine:numbers, train: ZeroDivisionError: no such image\n  where: "
            r".*own_datasets\.py:\d+: raise",
        ),
        (
            "shape",
            r"sample 7 of .* has x as float32 \(1, 3\), but the first one as float32 \(2, 3\)\n  "
            r"where: .*own_datasets\.py:\d+, Flawed\.",
        ),
        (
            "length",
            r"mine:numbers, train has 39 samples now, and had 40 when the job started\n  where: "
            r".*own_datasets.py",
        ),
    ],
)
def test_what_is_wrong_with_a_sample_is_an_error_with_its_number(
    flaw: str, message: str, workers: int
) -> None:
    with pytest.raises(UserError, match=message):
        found = source(Flawed(flaw), workers)
        as_declared(found, found.fields).read(many())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            Flawed("dtype"),
            r"sample 7 of .* has x as float64 \(2, 3\), but the first one as float32 \(2, 3\)",
        ),
        (Flawed("keys"), "sample 7 of .* has x, z, but the first one has x, y"),
        (Flawed("nan"), "sample 7 of .* has nan in x, expected finite numbers"),
        (Flawed("text"), "x of sample 7 of .* is a str: seven"),
        (
            Flawed("own generator"),
            "sample 0 of .* has another x when it is read again: the Dataset has its own random "
            "generator",
        ),
        (
            (Flawed(), ragged_rows),
            r"sample 7 of .* has x as float32 \(1, 3\).*\n  where: .*own_datasets\.py:\d+, "
            r"ragged_rows",
        ),
        (
            (Flawed(), lambda samples: samples[0]),
            r"the collate function gives x as float32 \(2, 3\) of a list of one sample",
        ),
        (Items([(1, 2, 3)]), "sample 0 of .* is a tuple of 3, without names"),
        (Items([{"my x": 1.0}]), "has a field named 'my x'"),
        (Items([]), "has no samples"),
        (
            {"x": X, "y": Y[:3]},
            r"the arrays do not have the same samples: x float32 \(4, 3\), y float64 \(3,\)",
        ),
        ({"x": X, "y": Y * np.nan}, "field y of sample 0 has nan, expected a finite number"),
        ({"x": X, "y": np.array(["a"] * 4)}, "field y of mine:numbers, train is <U1"),
        ({"x": X, 3: Y}, "has a field named 3"),
        (TensorDataset(*[torch.ones(4)] * 3), "a TensorDataset of 3 tensors without names"),
        (7, r"train is an int\n.*\n  fix: give a dict of arrays"),
        (
            HalfASource(),
            r"train is a HalfASource without digests, identity\n.*\n  fix: give a dict of arrays",
        ),
        (
            (pair for pair in [(1.0, 0)]),
            r"train is a generator, whose samples come in an order of its own.*\n.*\n  fix: "
            r"list\(\) of it; or",
        ),
        (
            iter([(1.0, 0)]),
            r"train is a list_iterator, whose samples .*\n.*\n  fix: list\(\) of it; or",
        ),
        (
            ([[1.0], [2.0], [3.0]], [0, 1, 2]),
            r"train is a pair of a list of 3 and a list of 3\n.*\n  fix: arrays: \(np.array\(x\), "
            r"np.array\(y\)\); or one",
        ),
        (
            {"x": [[1.0], [2.0]], "y": LABELS},
            r"x of mine:numbers, train is a list\n.*\n  fix: an array: np.array\(x\), or a tensor",
        ),
        (X, r"train is one array \(4, 3\) without a name\n.*\n  fix: give a dict of arrays"),
        (lambda: X, "train is a function, not what it gives: call it"),
        (
            {"x": {}, "y": LABELS},
            r"train is a dict of other things than arrays \(x: dict, y: ndarray\)",
        ),
        ({}, "train is a dict without fields"),
        ({"x": X[:0], "y": Y[:0]}, "mine:numbers, train has no samples"),
        ((X[:0], LABELS[:0]), "mine:numbers, train has no samples"),
        ({"x": GREY[:0], "y": LABELS[:0]}, "mine:numbers, train has no samples"),
        (
            {"x": np.ma.masked_array(X, X > 7), "y": Y},
            r"field x of .* is a masked array \(4 of 12 values are masked\), and its mask would "
            "be lost",
        ),
        (
            Items([(np.ma.masked_array(x), y) for x, y in zip(X, Y, strict=True)]),
            "x of sample 0 of .* is a masked array",
        ),
        (
            {"x": torch.eye(4).to_sparse(), "y": Y},
            r"field x of .* cannot be converted to an array: .*\n.*\n  fix: a dense tensor",
        ),
        (
            DataLoader(Items([1, 2]), sampler=WeightedRandomSampler([1, 1], 2)),
            "the DataLoader of .* has a WeightedRandomSampler",
        ),
        # the model gets integers as int64
        ({"x": np.full((4, 2), LARGE), "y": Y}, "field x of sample 0 has 9223372036854775813,"),
        ({"x": X, "y": np.full((4, 2), LARGE)}, "field y of sample 0 has 9223372036854775813,"),
        (Items([(np.full(2, LARGE), 0.5)] * 40), "field x of sample 0 has 9223372036854775813,"),
        (Items([(X[0], LARGE)] * 40), "y of sample 0 of .* is 9223372036854775813,"),
        (Items([(X[0], int(LARGE))] * 40), "y of sample 0 of .* is 9223372036854775813,"),
    ],
)
def test_what_else_is_wrong(given: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        source(given).read(many())


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_data_without_an_index_are_refused() -> None:
    for given in (
        Stream(),
        DataLoader(Stream()),
        (number for number in range(3)),
        torch.utils.data.Dataset(),
    ):
        stopped = "no rank can take its exact share, so no job could resume"
        message = (
            f"{stopped}\n.*\n  fix: (list\\(\\) of it; or )?a Dataset with __len__ and __getitem__"
        )
        with pytest.raises(UserError, match=message):
            source(given)


def test_what_workers_cannot_have() -> None:
    with pytest.raises(
        UserError,
        match=r"cannot be sent to a worker process: .*<lambda>.*\n  where: .*\n  fix: .*no "
        r"lambda.*data\.workers=0",
    ):
        source((Flawed(), lambda samples: rows(samples[:1])), workers=1)
    with pytest.raises(
        UserError, match="data.workers=1 starts processes that read a torch Dataset"
    ):
        source({"x": X, "y": Y}, workers=1)


@pytest.mark.in_turn
def test_a_killed_worker_is_an_error() -> None:
    with pytest.raises(
        UserError,
        match=r"worker process \d+ of data.workers ended by signal 9 while it read sample 0 and "
        r"39 more",
    ):
        source(Flawed("kill"), workers=1).read(many())


@pytest.mark.in_turn
def test_no_worker_outlives_its_rank(tmp_path: Path) -> None:
    """Workers of a script's own class; one of them is in the user's code when the rank is
    killed."""
    script = tmp_path / "script.py"
    script.write_text(WORKERS_OF_A_SCRIPT)
    command = [sys.executable, "-W", "error", str(script)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=environment({"PYTHONPATH": f"{ROOT}:{ROOT}/tests/support"}),
    ) as rank:
        assert rank.stdout is not None
        pids = [int(pid) for pid in rank.stdout.readline().split()]
        assert len(pids) == 2 and all(alive(pid) for pid in pids)
        rank.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(alive(pid) for pid in pids), "the end of the workers")


WORKERS_OF_A_SCRIPT = """
import threading, time
import numpy as np
import own_datasets
import hvdtrain
from hvdtrain.data.user_data.as_source import as_source
from hvdtrain.data.declared import as_declared
from hvdtrain.data.worker_pool import end_script_of_worker

class Mine(own_datasets.Flawed):
    def __getitem__(self, index):
        if index == 7:
            time.sleep(2000)
        return super().__getitem__(index)

end_script_of_worker()  # as hvdtrain.train() does
found = as_source(Mine(), "mine", "here", 2)
found.read(np.arange(2))
print(*(worker.process.pid for worker in found._pool.workers), flush=True)
found.read(np.array([7, 8]))
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Windows:
    """A source of a user's own class; sample 3 has a token that its field does not declare, sample
    2 is not finite."""

    fields: Mapping[str, Field] = MappingProxyType(
        {"tokens": Field("int64", (4,), 8), "x": Field("float32", ())}
    )

    def __len__(self) -> int:
        return 5

    def read(self, indices: np.ndarray) -> Batch:
        tokens = np.tile(np.arange(4), (len(indices), 1))
        tokens[indices == 3, 2] = 8
        return {"tokens": tokens, "x": np.where(indices == 2, np.float32(np.inf), np.float32(1))}

    def digests(self, seed: int) -> dict[str, str]:
        return {"tokens": "0f"}

    def identity(self) -> dict[str, str]:
        return {"tokens": "0f"}


class Images(ArraySource):
    def __post_init__(self) -> None:
        """Checks nothing, as a class of one's own may."""


def test_a_source_of_ones_own_with_numbers_that_it_does_not_declare() -> None:
    found = source(Windows())
    assert found.read(np.array([4, 0]))["tokens"].tolist() == [[0, 1, 2, 3]] * 2 and len(found) == 5
    assert (found.fields, found.digests(1), found.identity()) == (
        Windows.fields,
        {"tokens": "0f"},
        {"tokens": "0f"},
    )
    for read in (found.read, lambda indices: found.read_in_epochs(indices, indices, 0)):
        with pytest.raises(
            UserError, match="field tokens of sample 3 has 8, expected 0 to 7"
        ) as caught:
            read(np.array([1, 3]))
        assert (caught.value.where, caught.value.fix[:15]) == (
            "mine:numbers, train",
            "count from 0; `",
        )
    with pytest.raises(UserError, match="field x of sample 2 has inf, expected a finite number"):
        found.read(np.array([2]))
    with pytest.raises(UserError, match="field y of sample 2 has 9, expected 0 to 2"):
        source(Images(np.zeros((3, 2, 2, 1), np.uint8), np.array([0, 1, 9]), 3))


def test_a_source_of_ones_own_has_what_it_wraps_and_its_images() -> None:
    images = ArraySource(np.zeros((3, 2, 2, 1), np.uint8), np.array([0, 1, 2]), 3)
    members = ("shape", "classes", "labels", "stats", "label_digest", "image_digest")

    class OwnImages(Windows, Source):  # type: ignore[misc]
        """A subclass of Source, with all members of images."""

        class_names = ()

    for member in members:
        setattr(OwnImages, member, getattr(images, member))
    assert isinstance(user_source(OwnImages()), LabelledImages)
    around = Windows()
    assert inner_source(user_source(around)) is None
    around.source = images  # type: ignore[attr-defined]
    assert inner_source(user_source(around)) is images


@pytest.mark.in_turn
def test_workers_end_with_their_source() -> None:
    found = source(Flawed(), workers=1)
    assert isinstance(found, DatasetSource) and found._pool is not None
    found.read(many())
    (worker,) = found._pool.workers
    del found
    wait_until(lambda: worker.process.poll() is not None, "the end of the worker")


def test_classes_of_a_dataset() -> None:
    """Declared by names or a number, of the labels of the whole, or of both sets of arrays; else an
    error."""
    items = [(x, int(y)) for x, y in zip(X, LABELS, strict=True)]
    for given, classes in (
        (Items(items, classes=["a", "b", "c", "d"]), 4),
        (Items(items, classes=5), 5),
        (Items(items, targets=LABELS.tolist()), 3),
        (Subset(Items(items, targets=LABELS), [0, 1]), 3),
        ({"x": X, "y": LABELS}, 3),
    ):
        task = build_task(source(given), source(given), configure(None, []))
        assert (task.sizes["classes"], task.sizes["shape"]) == (classes, (3,))
    with pytest.raises(
        UserError,
        match="the number of classes is not known.*\n.*\n  fix: give the Dataset an attribute "
        "`classes`",
    ):
        build_task(source(Items(items)), source(Items(items)), configure(None, []))
    task = build_task(
        source({"x": X, "y": LABELS}), source({"x": X, "y": LABELS + 1}), configure(None, [])
    )
    assert task.sizes["classes"] == 4
    task = build_task(
        *[source(Items([(np.ones((3, 6, 5)), 0)], classes=2))] * 2, configure(None, [])
    )
    assert task.sizes["shape"] == (6, 5, 3) and task.fields["x"].shape == (3, 6, 5)


def test_threads_do_not_run_the_users_code() -> None:
    words = ["data.name=own_datasets:noisy", "task.name=regression"]
    with pytest.raises(
        UserError,
        match=r"data\.ahead=2 reads on other threads.*\n  where: data.ahead, command line\n  fix: "
        r".*data\.workers=1",
    ):
        open_datasets(configure(None, [*words, "data.ahead=2"]))
    with pytest.raises(
        UserError,
        match=r"data\.workers=1 starts processes that decode .*; data\.name=digits has threads",
    ):
        open_datasets(configure(None, ["data.workers=1"]))


def test_large_arrays_are_not_read_whole_at_the_start() -> None:
    """Their numbers are checked when they are read, and their identity is of some samples: the same
    ones."""
    large = np.broadcast_to(np.float32(3.0), (2**15, 2**14))  # 2 GiB of one number
    labels = np.zeros(len(large), np.int64)
    found = source({"x": large, "y": labels})
    assert (
        found.identity()
        == source({"x": large, "y": labels}).identity()
        != source({"x": large, "y": labels + 1}).identity()
    )
    labels[77] = -1
    changed = NamedArrays({"x": large, "y": labels}, {"y": 2})
    assert (changed.read(np.array([5]))["y"] == 0).all()
    with pytest.raises(UserError, match="field y of sample 77 has -1, expected 0 to 1"):
        changed.read(np.array([5, 77]))


def test_columns_of_a_hugging_face_dataset() -> None:
    whole = datasets.Dataset.from_dict(
        {"a": [1.5, 2.5, 3.5, 4.5], "b": [1, 2, 3, 4], "label": LABELS}
    )
    assert (
        source(whole.select([3, 0])).read(np.array([0, 1]))["x"] == [[4.5, 4.0], [1.5, 1.0]]
    ).all()
    assert source(whole).read(np.array([1]))["y"].tolist() == [2]
    nested = datasets.Features(
        x=datasets.Array2D((2, 2), "float32"), y=datasets.List(datasets.Value("int32"), 2)
    )
    found = source(
        datasets.Dataset.from_dict({"x": [[[1, 2], [3, 4]]] * 3, "y": [[1, 2]] * 3}, nested).skip(1)
    )
    assert (
        found.fields == {"x": Field("float32", (2, 2)), "y": Field("int32", (2,))}
        and len(found) == 2
    )
    assert found.read(np.array([1]))["x"].tolist() == [[[1, 2], [3, 4]]]
    lists = datasets.Dataset.from_dict({"tokens": [[1, 2, 3], [4, 5, 6]]})
    assert source(lists).read(np.array([1]))["tokens"].tolist() == [[4, 5, 6]]
    for table, message in (
        ({"x": [[1, 2], [3]], "y": [0, 1]}, "column 'x' of .* has lists of 1 to 2 numbers"),
        ({"x": ["p", "q"], "y": [0, 1]}, "column 'x' of .* is object, expected numbers"),
        ({"x": [1.0, None], "y": [0, 1]}, "column 'x' of .* lacks 1 values"),
        (
            {"a": [1.0], "b": [[1.0]], "y": [0]},
            "column 'b' of .* contains lists, and there are other input columns",
        ),
    ):
        with pytest.raises(UserError, match=message):
            source(datasets.Dataset.from_dict(table))
    with pytest.raises(UserError, match="contains all splits: train, test"):
        source(whole.train_test_split(0.5))
    with pytest.raises(UserError, match="no rank can take its exact share"):
        source(whole.to_iterable_dataset())


def test_images_of_a_hugging_face_dataset() -> None:
    features = datasets.Features(
        image=datasets.Image(), label=datasets.ClassLabel(names=["a", "b", "c", "d"])
    )
    images = [Image.fromarray(x) for x in COLOURS.transpose(0, 2, 3, 1)]
    found = source(datasets.Dataset.from_dict({"image": images, "label": LABELS}, features))
    assert found.fields == {"x": Field("uint8", (6, 5, 3)), "y": Field("int64", (), 4)}
    batch = found.read(np.array([2, 0]))
    assert (batch["x"] == COLOURS.transpose(0, 2, 3, 1)[[2, 0]]).all() and (
        batch["y"] == LABELS[[2, 0]]
    ).all()
    unequal = datasets.Dataset.from_dict(
        {"image": [images[0], images[1].resize((3, 3)), images[2]], "label": [0, 1, 2]}, features
    )
    with pytest.raises(
        UserError,
        match=r"sample 1 of .* has x as uint8 \(3, 3, 3\), but the first one as uint8 \(6, 5, 3\)",
    ):
        source(unequal).read(np.array([1]))
