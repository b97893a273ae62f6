"""Whole arrays as a source: of numpy in memory or memory-mapped, torch's tensors, columns of pandas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdtrain.data.source import LARGE_BYTES, ArraySource, NamedArrays, Source
from hvdtrain.data.subset import SubsetOfImages
from hvdtrain.errors import UserError, first_line

_MOST_CLASSES = 2**20  # of images with whole numbers: larger ones are no classes


def is_array(value: object) -> bool:
    """Whether this is an array of numpy or torch, a Series or a DataFrame."""
    return hasattr(value, "shape") and (hasattr(value, "__array__") or hasattr(value, "to_numpy")) and not isinstance(value, np.generic)


def from_arrays(given: Mapping[Any, Any], name: str, where: str) -> Source:
    """The source of arrays by field. Images x with labels y are a data set of images and classes.

    Raises UserError where they are not numbers, or not of the same samples.
    """
    for field in given:
        if not isinstance(field, str) or not field.isidentifier():
            raise UserError(f"{name} has a field named {field!r}", where, "names of fields are words: x, y, tokens")
    arrays = {field: to_numpy(value, f"field {field} of {name}", where) for field, value in given.items()}
    if set(arrays) == {"x", "y"}:
        images, y = as_images(arrays["x"]), arrays["y"]
        if images is not None and _are_labels(y, len(images)):
            if y.min() < 0:  # of samples without a class, or wrong
                return NamedArrays({"x": images, "y": y}, where=name)
            source = ArraySource(images, y, int(y.max()) + 1, name)
            return source if images.nbytes <= LARGE_BYTES else SubsetOfImages(source, None)
    return NamedArrays(arrays, where=name)


def to_numpy(value: Any, what: str, where: str) -> np.ndarray:
    """Its numbers, in its own memory where that is possible. Raises UserError where it has no numbers."""
    if hasattr(value, "detach"):  # of torch
        value = _of_torch(value, what, where)
    if isinstance(value, np.ma.MaskedArray):
        shown = f"{what} is a masked array ({np.ma.count_masked(value):,} of {value.size:,} values are masked), whose mask would be lost"
        raise UserError(shown, where, "leave these samples out, or say what stands for them: .filled(0)")
    array = value.to_numpy() if hasattr(value, "to_numpy") else np.asanyarray(value)
    if array.dtype.kind not in "iufb" or array.dtype.itemsize > 8:
        raise UserError(f"{what} is {array.dtype} {array.shape}, expected numbers", where, _fix_of_numbers(array))
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _fix_of_numbers(array: np.ndarray) -> str:
    fix = "convert it to integers or floats"
    return fix if array.dtype.kind not in "OSU" else f"{fix}; np.unique(y, return_inverse=True)[1] counts the classes of names from 0"


def _of_torch(tensor: Any, what: str, where: str) -> np.ndarray:
    try:
        tensor = tensor.detach().cpu()
        found: np.ndarray = tensor.float().numpy() if str(tensor.dtype) == "torch.bfloat16" else tensor.numpy()
    except (TypeError, RuntimeError, NotImplementedError) as error:  # sparse, quantized, masked
        fix = "a dense tensor of numbers: .to_dense(), .dequantize()"
        raise UserError(f"{what} is a tensor without an array: {first_line(error)}", where, fix) from None
    return found


def as_images(x: np.ndarray) -> np.ndarray | None:
    """uint8 (n, H, W, C) of images (n, H, W, C), (n, C, H, W) with 1 or 3 channels, or grey ones (n, H, W); None of anything else."""
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or 0 in x.shape[1:]:
        return None
    if x.ndim == 3:
        return x[..., None]
    return x.transpose(0, 2, 3, 1) if has_channels_first(x.shape[1:]) else x


def has_channels_first(shape: tuple[int, ...]) -> bool:
    """Whether an image of this shape is (C, H, W), as torch has them, and not (H, W, C)."""
    return len(shape) == 3 and shape[0] in (1, 3) and shape[2] not in (1, 3, 4)


def _are_labels(y: np.ndarray, samples: int) -> bool:
    return y.shape == (samples,) and samples > 0 and y.dtype.kind in "iu" and y.max() < _MOST_CLASSES
