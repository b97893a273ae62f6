"""A user's data set of token windows for jobs with model.name=gpt: a start token, then pixels as
grey levels."""

from __future__ import annotations

import numpy as np

from hvdtrain.data.datasets import digits, synthetic
from hvdtrain.data.source import NamedArrays, Split


def windows(
    split: Split, levels: int = 16, side: int = 8, samples: int = 0, val_samples: int = 0
) -> NamedArrays:
    """Returns {"tokens": (n, side^2 + 1)}; each token is a level or the start token, whose number
    is `levels`.

    The images are the digits, or synthetic if `samples` is not 0.
    """
    images = (
        synthetic.build(
            "synthetic",
            None,
            split,
            samples=samples,
            val_samples=val_samples,
            shape=(side, side, 1),
        )
        if samples
        else digits.build("digits", None, split)
    )
    x = images.read(np.arange(len(images)))["x"].astype(np.int64)  # (n, H, W, 1)
    factor = x.shape[1] // side
    x = x.reshape(len(x), side, factor, side, factor).sum((2, 4)) // factor**2
    tokens = np.full((len(x), side * side + 1), levels, np.int64)
    tokens[:, 1:] = x.reshape(len(x), -1) * levels // 256
    return NamedArrays({"tokens": tokens}, {"tokens": levels + 1}, f"digit tokens, {split}")
