"""Sequences drawn token by token from a model that keeps what it has read in a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from hvdtrain.core.progress import fold
from hvdtrain.frameworks.torch.parallel.tensor.split_logits import SplitLogits, whole_logits

_STREAM = 0x73616D70  # of counters, apart from those of other random numbers


class Decoder(Protocol):
    """A model that can read a sequence a few positions at a time, as models/gpt.py."""

    context: int

    def __call__(self, tokens: torch.Tensor, cache: Any) -> torch.Tensor | SplitLogits:
        """int64 (n, m) of further positions -> logits (n, m, vocabulary)."""

    def empty_cache(self) -> Any:
        """For `context` positions of any sequences."""


@torch.inference_mode()
def continue_sequences(
    model: Decoder,
    prompts: torch.Tensor,
    length: int,
    *,
    tokens: int,
    temperature: float,
    seed: int,
    first: int = 0,
    before_each: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """Prompts, int64 (n, m) with m >= 1, continued to int64 (n, length) by tokens 0 ... tokens - 1; the model is in evaluation mode.

    Each is drawn from softmax(logits / temperature); with temperature 0 the most probable one is taken. The random number of position t of
    sequence i is fold(seed, first + i, t): a sequence does not depend on the batch that it is drawn in, up to rounding of the logits.
    Beyond the context the model reads the second half of its context again, and goes on from there. before_each() is called before each
    position.
    """
    n = len(prompts)
    found = torch.cat([prompts, prompts.new_zeros(n, length - prompts.shape[1])], 1)
    numbers = torch.from_numpy(_uniform(seed, first + np.arange(n), np.arange(length))).to(prompts.device)  # (n, length)
    cache, begin, read = model.empty_cache(), 0, 0  # the cache has positions begin ... read - 1
    for at in range(prompts.shape[1], length):
        before_each()
        if not n:  # other ranks have the sequences
            continue
        if at - begin > model.context:
            begin = read = at - max(1, model.context // 2)
            cache = model.empty_cache()
        logits = whole_logits(model(found[:, read:at], cache))[:, -1, :tokens].double()  # (n, tokens)
        read = at
        found[:, at] = _draw(logits, temperature, numbers[:, at])
    return found


def _draw(logits: torch.Tensor, temperature: float, numbers: torch.Tensor) -> torch.Tensor:
    """(n,) by inversion of the cumulative distribution."""
    if temperature == 0:
        return logits.argmax(1)
    cumulative = (logits / temperature).softmax(1).cumsum(1)
    drawn = torch.searchsorted(cumulative, (numbers * cumulative[:, -1])[:, None], right=True)[:, 0]
    return drawn.clamp(max=logits.shape[1] - 1)


def _uniform(seed: int, sequences: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 (sequences, positions), each from 0 to below 1."""
    bits = fold(seed, _STREAM, sequences.astype(np.uint64)[:, None], positions.astype(np.uint64)[None, :])
    return (bits >> np.uint64(11)) * 2.0**-53
