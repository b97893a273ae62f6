"""The labels of a torch Dataset, where it has them beside its samples: of parts and sums of Datasets too, and of lists of pairs."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdtrain.data.source import smallest

_LABELS = ("targets", "labels")  # where Datasets have them
_FIELDS = ("label", "labels", "y")  # of a Hugging Face Dataset
_DEEPEST = 8  # a Subset of a Subset of ...


def declared_classes(dataset: Any, depth: int = 0) -> int:
    """How many there are, by `classes` (names, or their number) or the features of the Dataset; 0 where it does not say."""
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
    """Integers (n,); None where they are only read with samples. whole: of a Subset those of all that it is a part of."""
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
    return joined if whole or not hasattr(dataset, "indices") else joined[np.asarray(dataset.indices, np.int64)]


def _parts(dataset: Any) -> list[Any]:
    """What a torch Subset or ConcatDataset is made of."""
    if hasattr(dataset, "dataset"):
        return [dataset.dataset]
    return list(dataset.datasets) if isinstance(getattr(dataset, "datasets", None), (list, tuple)) else []


def _is_tensor_dataset(dataset: Any) -> bool:
    return any(base.__name__ == "TensorDataset" for base in type(dataset).__mro__) and len(dataset.tensors) == 2


def _column(dataset: Any) -> Any:
    """The labels of a Hugging Face Dataset whose samples are read one by one: this column alone is read, without its transform."""
    name = next((name for name in _FIELDS if name in dataset.features), None)
    return None if name is None else dataset.select_columns([name]).with_format("numpy")[:][name]


def _of_pairs(pairs: Any) -> np.ndarray | None:
    """Labels of a list of samples (x, y) with whole numbers y."""
    if all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
        return _integers([pair[1] for pair in pairs])
    return None


def _integers(labels: Any) -> np.ndarray | None:
    """Numbers (n,) as an array; None of anything else."""
    try:
        found = np.asarray(labels)
    except (TypeError, ValueError, RuntimeError):
        return None
    if found.ndim != 1 or not len(found) or found.dtype.kind not in "iub":
        return None
    return smallest(found) if isinstance(labels, (list, tuple)) else found
