"""What models that only count reach on the validation tokens: nats per token, exactly, to compare a language model with.

python benchmarks/token_baselines.py [--config FILE] [key=value ...]      as hvdtrain, for the data of the job: seconds

uniform: every token equally probable, without the start token of images, which is never predicted.
unigram: the shares of the tokens in the training set.
bigram: the shares after the token before it; of images that is the pixel to the left, or at the left edge the last one of the row above.
above, of images: the shares after the pixel above, in the first row after the start token.
Each count is one more than it is (Laplace), so that a pair which the training set does not have is possible.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np

from hvdtrain.config.read import configure
from hvdtrain.data.source import Source
from hvdtrain.training.datasets import open_datasets

BLOCK = 4096  # windows at once


def counts(source: Source, vocabulary: int, back: int) -> np.ndarray:
    """[before, token]: how often a token is predicted, and which one was `back` positions before
    it, or at the window's beginning."""
    found = np.zeros(vocabulary**2, np.int64)
    for first in range(0, len(source), BLOCK):
        tokens = source.read(np.arange(first, min(first + BLOCK, len(source))))["tokens"]
        places = np.maximum(np.arange(1, tokens.shape[1]) - back, 0)
        found += np.bincount(
            (tokens[:, places] * vocabulary + tokens[:, 1:]).ravel(), minlength=vocabulary**2
        )
    return found.reshape(vocabulary, vocabulary)


def nats(train: np.ndarray, val: np.ndarray) -> float:
    """Mean over the validation tokens of -log of their shares among the training tokens after the
    same token: [before, token] each."""
    shares = (train + 1) / (train + 1).sum(1, keepdims=True)
    return float(-(val * np.log(shares)).sum() / val.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    train, val, task, _ = open_datasets(configure(options.config, options.overrides))
    vocabulary = task.sizes["vocabulary"]
    is_image = train.pictures is not None
    predicted = vocabulary - is_image
    pairs = {
        back: [counts(source, vocabulary, back)[:, :predicted] for source in (train, val)]
        for back in (1, math.isqrt(task.sizes["context"]))
    }
    found = {
        "tokens": {"train": int(pairs[1][0].sum()), "val": int(pairs[1][1].sum())},
        "uniform": math.log(predicted),
        "unigram": nats(*(each.sum(0, keepdims=True) for each in pairs[1])),
        "bigram": nats(*pairs[1]),
    }
    if is_image:
        found["above"] = nats(*pairs[math.isqrt(task.sizes["context"])])
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
