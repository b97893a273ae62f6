"""DatasetSource: a torch Dataset as a source, read in this process or in worker processes. Each
sample has its own random state."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from hvdtrain.core.arrays import Batch, digest
from hvdtrain.core.progress import fold
from hvdtrain.data.field import Field, Padding
from hvdtrain.data.labels import smallest
from hvdtrain.data.ragged import LEAST, mask_of, padded_fields, padded_length
from hvdtrain.data.source import Source, check_indices
from hvdtrain.data.user_data.samples import (
    CollatedDataset,
    evaluation_seeds,
    lengths_of,
    probed,
    random_state_kept,
    read_lengths,
    training_seeds,
    with_longest,
)
from hvdtrain.data.worker_pool import WorkerPool
from hvdtrain.errors import UserError

_SAMPLES = 64  # samples in a digest
_VALUES = 2**24  # most values in a digest
_DRAWN = 0x64726177  # a stream of counters, distinct from the sampler's

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class DatasetSource(Source):
    """Samples by index. In training, random transforms are seeded by (seed, epoch, sample). In
    evaluation, a sample is always the same.

    Without workers, the thread that needs samples reads them, because all threads of a process
    share its random generators.
    """

    def __init__(
        self,
        samples: CollatedDataset,
        workers: int,
        notes: tuple[str, ...] = (),
        labels: np.ndarray | None = None,
        lengths: Mapping[str, np.ndarray] = _NOTHING,
    ) -> None:
        self._notes = notes
        self._samples = samples
        self._labels = labels
        self._lengths = dict(lengths)
        self._longest: dict[str, int] = {}
        self._values: dict[str, int] = {}
        self._pool = WorkerPool(samples, workers) if workers else None

    @property
    def fields(self) -> Mapping[str, Field]:
        padding = self._samples.padding
        fields: dict[str, Field] = {}
        for name, kind in self._samples.fields.items():
            if name in padding:
                rows = max(LEAST, kind.shape[0], self._longest.get(name, 0))
                bounded = kind._replace(
                    shape=(rows, *kind.shape[1:]), values=self._values.get(name, kind.values)
                )
                fields |= padded_fields(name, bounded, padding[name])
            elif name.isidentifier():
                fields[name] = kind
        return fields

    def with_bounds(self, longest: Mapping[str, int], values: Mapping[str, int]) -> DatasetSource:
        """Returns the source with bounds that also cover another source."""
        bounded = copy.copy(self)
        bounded._longest = dict(longest)
        bounded._values = dict(values)
        return bounded

    @property
    def is_users_dataset(self) -> bool:
        return True

    @property
    def notes(self) -> tuple[str, ...]:
        return self._notes

    def known_lengths(self, name: str) -> np.ndarray | None:
        return self._lengths.get(name)

    @property
    def reads_in_process(self) -> bool:
        """Whether the user's code runs in this process, on one thread."""
        return self._pool is None

    @property
    def nested_inputs(self) -> tuple[str, ...]:
        """The fields that are nested in x."""
        return self._samples.nested_inputs

    @property
    def where(self) -> str:
        """The name of the data, and the file and line that return a sample."""
        return self._samples.where

    def __len__(self) -> int:
        return self._samples.samples

    def known_labels(self) -> np.ndarray | None:
        """Returns the labels that the Dataset stores separately; y of a sample may still differ."""
        return self._labels

    def read(self, indices: np.ndarray) -> Batch:
        """Reads samples as for evaluation. Raises UserError, also if a worker process ended."""
        return self._read(indices, None)

    def read_in_epochs(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> Batch:
        """Reads samples as for training in these epochs, int64 (n,)."""
        return self._read(indices, training_seeds(indices, epochs, seed))

    def digests(self, seed: int) -> dict[str, str]:
        """Returns digests of at most 64 samples drawn by the seed, read as for evaluation."""
        return {"samples": self._digest(seed)}

    def identity(self) -> dict[str, str]:
        return {"contents": self._digest(0)}

    def _digest(self, seed: int) -> str:
        values = sum(math.prod(field.shape) for field in self.fields.values())
        most = max(1, min(_SAMPLES, _VALUES // max(1, values)))
        drawn = fold(seed, _DRAWN, np.arange(most, dtype=np.uint64)) % np.uint64(len(self))
        indices = np.unique(drawn).astype(np.int64)
        return digest(self._read_here(indices, None))

    def _read(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        check_indices(indices, len(self))
        return self._trimmed(
            self._read_here(indices, seeds)
            if self._pool is None
            else self._pool.read(indices, seeds)
        )

    def _trimmed(self, batch: Batch) -> Batch:
        """Cuts padded fields to their longest sample, with their masks."""
        for name, padding in self._samples.padding.items():
            lengths = batch.pop(lengths_of(name))
            rows = min(
                padded_length(lengths, self.fields[name].shape[0]), self.fields[name].shape[0]
            )
            array = batch[name]
            if rows > array.shape[1]:  # no samples, or a single row
                array = np.concatenate(
                    [
                        array,
                        np.full(
                            (len(array), rows - array.shape[1], *array.shape[2:]),
                            padding.value,
                            array.dtype,
                        ),
                    ],
                    1,
                )
            batch[name], batch[padding.mask] = (
                np.ascontiguousarray(array[:, :rows]),
                mask_of(lengths, rows),
            )
        return batch

    def _read_here(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        with random_state_kept():
            return self._samples.read(indices, seeds)


def from_dataset(
    dataset: Any,
    collate: Any,
    loader: Any,
    name: str,
    where: str,
    workers: int | None,
    kept: tuple[str, ...] = (),
    padding: Mapping[str, Padding] = _NOTHING,
) -> DatasetSource:
    """Returns the source of a map-style Dataset. Reads its first sample; with padding, it reads all
    samples if the Dataset does not report lengths.

    kept: names of fields that are not renamed to x and y.

    Raises UserError if it cannot be read, if a sample differs when it is read again, or if it
    cannot be sent to worker processes.
    """
    notes: list[str] = []
    if loader is not None:
        _check_loader(loader, name, where)
        collate = (
            None if getattr(collate, "__module__", "").startswith("torch.utils.data.") else collate
        )
        workers = loader.num_workers if workers is None else workers
        notes = [
            f"{name}: of its DataLoader dataset, collate_fn and num_workers are used; batches and "
            "their order are hvdtrain's own"
        ]
    seeds = evaluation_seeds(np.arange(len(dataset) if hasattr(dataset, "__len__") else 1)[:1])
    whole, labels = (labels_of(dataset, whole) for whole in (True, False))
    with random_state_kept():
        samples = probed(
            dataset,
            collate,
            _values(dataset, whole),
            name,
            int(seeds[0]) if len(seeds) else 0,
            where,
            kept,
            padding,
        )
        lengths = read_lengths(samples) if padding else {}
        samples = with_longest(
            samples, {field: int(found.max()) for field, found in lengths.items()}
        )
        _check_repeats(samples, where)
    known = labels if labels is not None and len(labels) == samples.samples else None
    return DatasetSource(samples, workers or 0, tuple(notes), known, lengths)


def _check_repeats(samples: CollatedDataset, where: str) -> None:
    """Raises UserError if the first sample differs when it is read again after the last one, with
    the same random state."""
    indices = np.array([0, samples.samples - 1, 0])
    batch = samples.read(indices, evaluation_seeds(indices))
    for name, array in batch.items():
        if array[0].tobytes() != array[2].tobytes():
            what = (
                f"sample 0 of {samples.name} has another {name} when it is read again: the "
                "Dataset has its own random generator"
            )
            fix = (
                "draw from random, numpy.random or torch's generator: they are seeded for each "
                "sample by (seed, epoch, sample)"
            )
            raise UserError(what, where, fix)


def _check_loader(loader: Any, name: str, where: str) -> None:
    sampler = type(loader.sampler).__name__
    if (
        sampler not in ("RandomSampler", "SequentialSampler", "DistributedSampler")
        or type(loader.batch_sampler).__name__ != "BatchSampler"
    ):
        what = (
            f"the DataLoader of {name} has a {sampler}, but hvdtrain chooses the samples of a "
            "step itself, from the seed and the step"
        )
        raise UserError(
            what,
            where,
            "give its Dataset; to select or repeat samples, a torch.utils.data.Subset",
        )


def _values(dataset: Any, labels: np.ndarray | None) -> dict[str, int]:
    """Returns Field.values by field, as declared by the Dataset: {"tokens": 50257}. For y it is the
    number of classes, declared or from the labels."""
    declared = getattr(dataset, "values", None)
    classes = declared_classes(dataset)
    if not classes and labels is not None and len(labels) and labels.min() >= 0:
        classes = int(labels.max()) + 1
    return {"y": classes} | (dict(declared) if isinstance(declared, Mapping) else {})


_LABELS = ("targets", "labels")  # attributes of Datasets with labels
_FIELDS = ("label", "labels", "y")  # label columns of a Hugging Face Dataset
_DEEPEST = 8  # limit for a Subset of a Subset of ...


def declared_classes(dataset: Any, depth: int = 0) -> int:
    """Returns the number of classes, from `classes` (names, or their number) or the features of the
    Dataset; 0 if unknown."""
    classes = getattr(dataset, "classes", None)
    if isinstance(classes, (int, np.integer)):
        return int(classes)
    if isinstance(classes, (list, tuple)) and classes:
        return len(classes)
    features = getattr(dataset, "features", None) or {}
    feature = next((features[name] for name in _FIELDS if name in features), None)
    if feature is not None and hasattr(feature, "num_classes"):
        return int(feature.num_classes)
    if depth == _DEEPEST:
        return 0
    found = [declared_classes(part, depth + 1) for part in _parts(dataset)]
    return max(found) if found and all(found) else 0


def labels_of(dataset: Any, whole: bool, depth: int = 0) -> np.ndarray | None:
    """Returns labels (n,); None if they can only be read with samples. whole: for a Subset, return
    the labels of the complete data set."""
    if type(dataset) in (list, tuple):
        return _of_pairs(dataset)
    found = next((getattr(dataset, name) for name in _LABELS if hasattr(dataset, name)), None)
    if found is None and _is_tensor_dataset(dataset):
        found = dataset.tensors[1]
    if found is None and hasattr(dataset, "select_columns"):
        found = _column(dataset)
    if found is not None and not callable(found):
        return _integers(found)
    if depth == _DEEPEST:
        return None
    parts = [labels_of(part, whole, depth + 1) for part in _parts(dataset)]
    if not parts or any(part is None for part in parts):
        return None
    joined = np.concatenate([part for part in parts if part is not None])
    return (
        joined
        if whole or not hasattr(dataset, "indices")
        else joined[np.asarray(dataset.indices, np.int64)]
    )


def _parts(dataset: Any) -> list[Any]:
    """Returns the parts of a torch Subset or ConcatDataset."""
    if hasattr(dataset, "dataset"):
        return [dataset.dataset]
    return (
        list(dataset.datasets)
        if isinstance(getattr(dataset, "datasets", None), (list, tuple))
        else []
    )


def _is_tensor_dataset(dataset: Any) -> bool:
    return (
        any(base.__name__ == "TensorDataset" for base in type(dataset).__mro__)
        and len(dataset.tensors) == 2
    )


def _column(dataset: Any) -> Any:
    """Returns the labels of a Hugging Face Dataset whose samples are read one by one; reads only
    the label column, without the transform."""
    name = next((name for name in _FIELDS if name in dataset.features), None)
    return None if name is None else dataset.select_columns([name]).with_format("numpy")[:][name]


def _of_pairs(pairs: Any) -> np.ndarray | None:
    """Returns the labels of a list of samples (x, y) with integer y."""
    if all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
        return _integers([pair[1] for pair in pairs])
    return None


def _integers(labels: Any) -> np.ndarray | None:
    """Returns numbers (n,) as an array; None for anything else."""
    try:
        found = np.asarray(labels)
    except (TypeError, ValueError, RuntimeError):
        return None
    if found.ndim != 1 or not len(found) or found.dtype.kind not in "iub":
        return None
    return smallest(found) if isinstance(labels, (list, tuple)) else found
