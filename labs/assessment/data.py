"""The data of one grading: what a submission gets, and samples that only the grader has.

python labs/assessment/data.py --to FOLDER [--set cifar10 --data ROOT]     writes train.npz and val.npz for practice
"""  # noqa: E501

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.config import plugins
from hvdtrain.data.channel_stats import ChannelStats, channel_stats
from hvdtrain.data.datasets import cifar, digits, idx
from hvdtrain.data.source import LabelledImages
from hvdtrain.errors import DONE, USER, UserError


class DataSet(NamedTuple):
    """A data set with its target: the accuracy on 2 ranks within so many minutes, of 2 cores."""

    build: Callable[..., LabelledImages]
    target: float
    minutes: float


SETS = {  # README.md, "For teachers", has how the targets were found
    "digits": DataSet(digits.build, 0.95, 1),
    "fashion_mnist": DataSet(idx.build, 0.90, 6),
    "cifar10": DataSet(cifar.build, 0.70, 8),
}
if "folder" in plugins.files("data/datasets"):  # the data set of an extra
    _folder: Any = plugins.load("data/datasets", "folder", "--set")
    SETS["folder"] = DataSet(_folder.build, 0.70, 8)


class Samples(NamedTuple):
    x: np.ndarray  # uint8 (n, C, H, W)
    y: np.ndarray  # int64 (n,)

    def rows(self, which: np.ndarray) -> Samples:
        return Samples(self.x[which], self.y[which])


class Parts(NamedTuple):
    """train and given go to the submission; hidden stays in the grader's memory."""

    train: Samples
    given: Samples
    hidden: Samples
    stats: ChannelStats  # of train, each channel
    classes: int


def official(name: str, root: Path | None) -> tuple[Samples, Samples]:
    """The training and the test set as published. Raises UserError where they cannot be read."""
    if root is not None and not root.is_dir():
        raise UserError(
            "there is no such folder",
            f"--data {root}",
            "the folder of the files; or make it, to download them into it",
        )
    train, test = (SETS[name].build(name, root, split) for split in ("train", "val"))
    return read(train), read(test)


def read(source: LabelledImages) -> Samples:
    batch = source.read(np.arange(len(source)))
    return Samples(np.ascontiguousarray(batch["x"].transpose(0, 3, 1, 2)), batch["y"])


def split(train: Samples, test: Samples, secret: int) -> Parts:
    """The test set in two random halves, one given, one hidden; the classes renumbered, and all
    samples in another order.

    A function of `secret` alone. The new class numbers make data and weights worthless that a
    submission has from elsewhere.
    """
    rng = np.random.default_rng(secret)
    classes = int(train.y.max()) + 1
    number = rng.permutation(classes)
    train_order = rng.permutation(len(train.y))
    test_order = rng.permutation(len(test.y))
    half = len(test_order) // 2
    train = Samples(train.x, number[train.y]).rows(train_order)
    test = Samples(test.x, number[test.y])
    given = test.rows(test_order[:half])
    hidden = test.rows(test_order[half:])
    return Parts(train, given, hidden, channel_stats(train.x.transpose(0, 2, 3, 1)), classes)


def write(parts: Parts, to: Path) -> None:
    """train.npz, with the mean and std of each channel of x / 255, and val.npz."""
    to.mkdir(parents=True, exist_ok=True)
    mean, std = (np.asarray(value, np.float32) for value in parts.stats)
    np.savez(to / "train.npz", x=parts.train.x, y=parts.train.y, mean=mean, std=std)
    np.savez(to / "val.npz", x=parts.given.x, y=parts.given.y)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_data_options(parser)
    parser.add_argument("--to", type=Path, required=True)
    options = parser.parse_args()
    try:
        write(split(*official(options.set, options.data), secrets.randbits(64)), options.to)
    except UserError as error:
        print(error, file=sys.stderr)
        return USER
    print(
        f"{options.to}/train.npz and val.npz: of half the test set, and with classes in another "
        "order, as the grader's"
    )
    return DONE


def add_data_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        choices=SETS,
        default="digits",
        help="the data set (digits: in the package; folder: images by class)",
    )
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="where the data set's files are (data.root)"
    )


if __name__ == "__main__":
    sys.exit(main())
