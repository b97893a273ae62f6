"""The 8x8 handwritten digits inside scikit-learn: nothing to download."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hvdtrain.data.sampler import permutation
from hvdtrain.data.source import ArraySource, Source, Split
from hvdtrain.errors import UserError

_TRAIN = 1437  # of 1797; the other 360 validate
_SPLIT_SEED = 1797  # of the one shuffle that parts them, the same for every run


def build(name: str, root: Path | None, split: Split) -> Source:
    """1797 digits, 8x8x1, 10 classes: 1437 train and 360 validate, the same ones in every run.

    scikit-learn's values 0..16 become v * 255 // 16: 0 stays 0, 16 is 255.
    """
    if root is not None:
        raise UserError("the digits are read from no folder", "data.root", "leave data.root out, or choose another data.name")
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise UserError(f"the digits are inside scikit-learn: {error}", "data.name=digits", "pip install scikit-learn") from error
    digits = load_digits()
    order = permutation(_SPLIT_SEED, 0, len(digits.images))
    mine = order[:_TRAIN] if split == "train" else order[_TRAIN:]
    x = (digits.images[mine].astype(np.int64) * 255 // 16).astype(np.uint8)
    return ArraySource(x[..., None], digits.target[mine].astype(np.int64), 10, f"digits of scikit-learn, {split}")
