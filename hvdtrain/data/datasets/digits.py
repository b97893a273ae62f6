"""The 8x8 handwritten digits of scikit-learn, included in this package: nothing to download."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hvdtrain.data.files.selection import Staging
from hvdtrain.data.option_error import OptionError
from hvdtrain.data.sampler import permutation
from hvdtrain.data.source import ArraySource, LabelledImages, Split

# uint8 images (1797, 8, 8) of values 0 to 16, and uint8 labels (1797,). The test set of "Optical
# Recognition of Handwritten Digits" (Alpaydin and Kaynak 1998, UCI Machine Learning Repository,
# doi:10.24432/C50P49, CC BY 4.0), as sklearn.datasets.load_digits() gives it: the import of
# scikit-learn would take 1.5 s on every rank.
_FILE = Path(__file__).with_suffix(".npz")
_TRAIN = 1437  # of 1797; the other 360 validate
_SPLIT_SEED = 1797  # seed of the shuffle that splits them, the same in every run


STAGING = Staging(has_files=False)


def build(name: str, root: Path | None, split: Split) -> LabelledImages:
    """1797 digits, 8x8x1, 10 classes: 1437 training and 360 validation images. The split is the
    same in every run.

    The file's values 0..16 become v * 255 // 16: 0 stays 0, 16 is 255.

    Raises UserError if data.root is set.
    """
    if root is not None:
        raise OptionError(
            "data.name=digits reads no folder",
            "root",
            "leave data.root out, or choose another data.name",
        )
    with np.load(_FILE, allow_pickle=False) as digits:
        images = digits["images"]
        labels = digits["labels"]
    order = permutation(_SPLIT_SEED, 0, len(images))
    mine = order[:_TRAIN] if split == "train" else order[_TRAIN:]
    x = (images[mine].astype(np.int64) * 255 // 16).astype(np.uint8)
    return ArraySource(
        x[..., None],
        labels[mine].astype(np.int64),
        10,
        f"digits of scikit-learn, {split}",
        tuple("0123456789"),
    )
