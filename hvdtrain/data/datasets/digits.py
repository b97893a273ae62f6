"""The 8x8 handwritten digits that scikit-learn contains: nothing to download."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hvdtrain.data.sampler import permutation
from hvdtrain.data.source import ArraySource, Source, Split
from hvdtrain.errors import UserError

_TRAIN = 1437  # of 1797; the other 360 validate
_SPLIT_SEED = 1797  # of the shuffle that splits them, the same in every run


def build(name: str, root: Path | None, split: Split) -> Source:
    """1797 digits, 8x8x1, 10 classes: 1437 training and 360 validation images, the same ones in every run.

    scikit-learn's values 0..16 become v * 255 // 16: 0 stays 0, 16 is 255.

    Raises UserError where data.root is set, and without scikit-learn.
    """
    if root is not None:
        raise UserError("data.name=digits reads no folder", "data.root", "leave data.root out, or choose another data.name")
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise UserError(f"the digits are part of scikit-learn: {error}", "data.name=digits", "pip install scikit-learn") from error
    digits = load_digits()
    order = permutation(_SPLIT_SEED, 0, len(digits.images))
    mine = order[:_TRAIN] if split == "train" else order[_TRAIN:]
    x = (digits.images[mine].astype(np.int64) * 255 // 16).astype(np.uint8)
    return ArraySource(x[..., None], digits.target[mine].astype(np.int64), 10, f"digits of scikit-learn, {split}")
