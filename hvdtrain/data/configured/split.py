"""Which samples are for training and which for validation: data.val_share, data.share and
evaluate.samples."""

from __future__ import annotations

import numpy as np

from hvdtrain.config.schema import Config
from hvdtrain.config.sections.section import class_of_object, is_object
from hvdtrain.data.configured.opened import with_keys
from hvdtrain.data.sampler import evaluated_samples
from hvdtrain.data.source import Source
from hvdtrain.data.subset import Division, divide, smaller, subset
from hvdtrain.errors import UserError

# torch's losses that a script passes to hvdtrain.train()
_LOSSES_OF_CLASSES = ("CrossEntropyLoss", "NLLLoss")


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
