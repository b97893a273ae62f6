"""Sampling weights: from a field of the samples, from the inverse frequency of their classes, or
from an array of a script."""

from __future__ import annotations

import numpy as np

from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.section import is_object
from hvdtrain.data.around_source import inner_source
from hvdtrain.data.array_files import array_files_in
from hvdtrain.data.ragged import PaddedArrays
from hvdtrain.data.sampler import WeightedDraws
from hvdtrain.data.source import Source, arrays_in_memory
from hvdtrain.data.subset import Subset
from hvdtrain.errors import UserError

BALANCED = "balanced"
_GIVE = "hvdtrain.train(sample_weights=array), a number for each training sample"


def draws_of(config: Config, train: Source) -> WeightedDraws:
    """Returns the weighted draws of data.sample_weights, which is set. Raises UserError if these
    weights do not exist."""
    asked = config.data.sample_weights
    where = config.where("data.sample_weights")
    assert asked is not None, where
    if not is_object(asked):
        return WeightedDraws(read_weights(train, asked, _ignored_label(config), where))
    given = None if config.data.given is None else config.data.given.objects.get("sample_weights")
    if given is None:
        raise UserError(
            "data.sample_weights is an array that only its script defines",
            where,
            "hvdtrain.train(sample_weights=)",
        )
    return WeightedDraws(checked_weights(np.asarray(given), len(train), where))


def _ignored_label(config: Config) -> int | None:
    """Returns the label that marks samples without a class, from the task or a script's torch loss;
    None if there is no such label."""
    if not plugins.is_dotted(config.task.name):
        label: int | None = plugins.convert_options(config.task, "tasks").get("ignore_label")
        return label
    objects = {} if config.task.given is None else config.task.given.objects
    return getattr(objects.get("loss"), "ignore_index", None)


def read_weights(source: Source, asked: str, ignored: int | None, where: str) -> np.ndarray:
    """Returns weights, float64 (n,): the field `asked`, or for "balanced" 1 / the number of samples
    in the class and 0 for the label `ignored`.

    Raises UserError if there is no such field, or its values are not weights.
    """
    if asked == BALANCED:
        return _balanced(source, ignored, where)
    if asked not in source.fields:
        known = ", ".join(source.fields)
        raise UserError(
            f"the data have no field {asked!r}: they have {known}",
            where,
            f"one of them, balanced, or {_GIVE}",
        )
    found = _field(source, asked)
    if found is None:
        what = f"the field {asked} is known only once samples are read"
        raise UserError(what, where, f"arrays, scientific data files, or {_GIVE}")
    return checked_weights(found, len(source), where)


def checked_weights(weights: np.ndarray, samples: int, where: str) -> np.ndarray:
    """Returns the weights as float64 (n,). Raises UserError unless there is one finite,
    non-negative number for each sample, and at least one above 0."""
    if weights.shape != (samples,) or weights.dtype.kind not in "iufb":
        what = (
            f"weights are {weights.dtype} {weights.shape}, but there are {samples:,} training "
            "samples"
        )
        raise UserError(what, where, f"an array of shape ({samples},), a number for each sample")
    checked = weights.astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(checked) & (checked >= 0)))
    if len(wrong):
        raise UserError(
            f"the weight of sample {wrong[0]} is {checked[wrong[0]]:g}",
            where,
            "finite numbers, 0 or more; 0 excludes a sample",
        )
    if not checked.any():
        raise UserError(
            "all weights are 0, so no sample can be drawn", where, "at least one above 0"
        )
    return checked


def _balanced(source: Source, ignored: int | None, where: str) -> np.ndarray:
    labels = source.known_labels()
    if labels is None:
        labels = _field(source, "y") if "y" in source.fields else None
    if labels is None or labels.ndim != 1 or labels.dtype.kind not in "iub":
        kind = (
            "one whole number y for each sample"
            if labels is None
            else f"y is {labels.dtype} {labels.shape}"
        )
        what = f"data.sample_weights=balanced needs classes: {kind}" + (
            " is not known without reading them" if labels is None else ""
        )
        raise UserError(
            what,
            where,
            "labels (n,) of classes; a Dataset provides them in its attribute `targets`; or "
            f"{_GIVE}",
        )
    _, number, counts = np.unique(labels, return_inverse=True, return_counts=True)
    weights = 1.0 / counts[number]
    return checked_weights(
        weights if ignored is None else np.where(labels == ignored, 0.0, weights),
        len(source),
        where,
    )


def _field(source: Source, name: str) -> np.ndarray | None:
    """Returns a field of all samples, if it can be read without the other fields; else None."""
    arrays = arrays_in_memory(source)
    if arrays is not None:
        return arrays[name]
    if isinstance(source, PaddedArrays):
        array = source.arrays.get(name)
        return array if isinstance(array, np.ndarray) else None
    if isinstance(source, Subset):
        found = _field(source.source, name)
        return None if found is None else found[source.indices]
    inner = inner_source(source)
    if inner is not None and len(inner) == len(source):
        return _field(inner, name)
    files = array_files_in(source)
    return (
        None
        if files is None or len(files) != len(source)
        else files.read_field(name, np.arange(len(files)))
    )
