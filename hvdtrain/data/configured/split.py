"""Which samples are for training and which for validation: data.val_share, data.share and
evaluate.samples."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hvdtrain.config.schema import Config
from hvdtrain.config.sections.section import class_of_object, is_object
from hvdtrain.core.progress import fold
from hvdtrain.data.configured.opened import with_keys
from hvdtrain.data.option_error import OptionError
from hvdtrain.data.sampler import evaluated_samples
from hvdtrain.data.source import LabelledImages, Source
from hvdtrain.data.subset import subset
from hvdtrain.errors import UserError

_SEED = 1618  # seed of the division, which is the same in every run, whatever the job's seed
# torch's losses that a script passes to hvdtrain.train()
_LOSSES_OF_CLASSES = ("CrossEntropyLoss", "NLLLoss")


class Division(NamedTuple):
    train: Source
    val: Source


def divided(config: Config, val_share: float, source: Source) -> Division:
    """Splits the training set in two, by class if its labels are known."""
    with with_keys(config):
        return divide(source, val_share, _labels(config, source))


def share_of_train(config: Config, train: Source) -> Source:
    """Returns data.share of the training set, of each class if its labels are known."""
    share = config.data.share
    return train if share is None else smaller(train, share, _labels(config, train))


def _labels(config: Config, source: Source) -> np.ndarray | None:
    """Returns the labels of classes; None if there are none."""
    labels = None if config.task.name == "regression" else source.known_labels()
    are_classes = labels is not None and _are_classes(config, source, labels)
    return labels if are_classes else None


def _are_classes(config: Config, source: Source, labels: np.ndarray) -> bool:
    """Whether integers y are classes: according to the task, the data or the loss, or because there
    are at most as many different values as validation samples."""
    task = config.task.name
    if (
        task == "classification"
        or source.fields["y"].values
        or (is_object(task) and class_of_object(task) in _LOSSES_OF_CLASSES)
    ):
        return True
    return len(np.unique(labels)) <= (config.data.val_share or 0.0) * len(labels)


def evaluated_part(config: Config, val: Source) -> Source:
    """Returns the samples of an evaluation: evaluate.samples of the validation set, drawn by the
    seed, in the order of the set; or all samples.

    Raises UserError if the set has fewer samples.
    """
    count = config.evaluate.samples
    if count is None or count == len(val):
        return val
    if count > len(val):
        what = f"evaluate.samples={count} is more than the {len(val)} validation samples"
        raise UserError(
            what, config.where("evaluate.samples"), f"{len(val)} or less, or leave it out"
        )
    return subset(val, evaluated_samples(len(val), count, config.seed))


def divide(source: Source, val_share: float, labels: np.ndarray | None = None) -> Division:
    """Divides a source into training and validation samples: val_share of the samples (for labelled
    images, of each class) are for validation, the same in every run.

    labels: class numbers (n,) for samples that are not labelled images.

    A class with at least two samples has one in each part; the only sample of a class is for
    training. Raises UserError if nothing is left to validate with.
    """
    validates = validation_mask(_numbered(source, labels), val_share)
    if not validates.any():
        what = f"no class has the two samples that data.val_share={val_share:g} needs"
        raise OptionError(what, "val_share", "more samples, or a validation set of its own")
    return Division(
        subset(source, np.flatnonzero(~validates)), subset(source, np.flatnonzero(validates))
    )


def smaller(source: Source, share: float, labels: np.ndarray | None = None) -> Source:
    """Returns a share of the samples (for labelled images, of each class), at least one of each
    class; the same in every run, and all samples of a smaller share.

    labels: as in divide().
    """
    labels = _numbered(source, labels)
    count = np.bincount(labels)
    wanted = np.minimum(np.maximum(np.rint(share * count).astype(np.int64), 1), count)
    return subset(source, np.flatnonzero(_first_of_each_class(labels, count, wanted)))


def _numbered(source: Source, labels: np.ndarray | None) -> np.ndarray:
    """Returns class numbers (n,) from 0; all 0 for samples without labels."""
    if isinstance(source, LabelledImages):
        labels = source.labels()
    if labels is None:
        return np.zeros(len(source), np.int64)
    return np.unique(labels, return_inverse=True)[1]


def validation_mask(labels: np.ndarray, share: float) -> np.ndarray:
    """Returns bool (n,): which samples are for validation; labels start at 0."""
    count = np.bincount(labels)
    # validation samples of each class; -1 for a class without samples
    wanted = np.minimum(np.maximum(np.rint(share * count).astype(np.int64), 1), count - 1)
    return _first_of_each_class(labels, count, wanted)


def _first_of_each_class(labels: np.ndarray, count: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns bool (n,): the `wanted` samples of each class that a fixed shuffle puts first."""
    # sorted by class, and shuffled within each class
    order = np.lexsort((fold(_SEED, np.arange(len(labels), dtype=np.uint64)), labels))
    first_of_class = np.cumsum(count) - count
    mask = np.empty(len(labels), bool)
    mask[order] = np.arange(len(labels)) - first_of_class[labels[order]] < wanted[labels[order]]
    return mask
