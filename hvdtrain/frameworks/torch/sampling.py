"""Draws sequences token by token from a torch model that caches what it has read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import sampling_numbers
from hvdtrain.frameworks.torch.forward import Forward, InParts, whole_outputs
from hvdtrain.frameworks.torch.strategy import Strategy


class DrawsTokens:
    """A learner that implements Sampler."""

    config: Config
    model: torch.nn.Module
    forward: Forward
    strategy: Strategy

    def continue_sequences(
        self,
        prompts: np.ndarray,
        length: int,
        *,
        tokens: int,
        temperature: float,
        seed: int,
        first: int,
        before_each: Callable[[], None],
    ) -> np.ndarray:
        if not hasattr(self.model, "empty_cache"):
            what = (
                f"{type(self.model).__name__} has no empty_cache(), so it cannot generate token "
                "by token"
            )
            raise UserError(what, self.config.where("model.name"), "a run with model.name=gpt")
        self.model.eval()
        model: Any = self.model
        keeps_up = self.strategy.gathers_in_passes and not len(prompts)
        begun = np.zeros((1, prompts.shape[1]), np.int64) if keeps_up else prompts
        device = self.forward.inputs.device
        with self.forward.precision.autocast(device):
            sequences = continue_sequences(
                model,
                torch.from_numpy(begun).to(device),
                length,
                tokens=tokens,
                temperature=temperature,
                seed=seed,
                first=first,
                before_each=before_each,
            )
        return sequences[: len(prompts)].cpu().numpy()


class IncrementalDecoder(Protocol):
    """A model that can read a sequence a few positions at a time, as models/gpt.py."""

    context: int

    def __call__(self, tokens: torch.Tensor, cache: Any) -> torch.Tensor | InParts:
        """Returns int64 (n, m) of further positions -> logits (n, m, vocabulary)."""

    def empty_cache(self) -> Any:
        """Returns an empty cache with `context` positions, for any sequences."""


@torch.inference_mode()
def continue_sequences(
    model: IncrementalDecoder,
    prompts: torch.Tensor,
    length: int,
    *,
    tokens: int,
    temperature: float,
    seed: int,
    first: int = 0,
    before_each: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """Returns the prompts, int64 (n, m) with m >= 1, continued by the model to int64 (n, length).
    Tokens are 0 ... tokens - 1. The model must be in evaluation mode.

    Each token is drawn from softmax(logits / temperature); with temperature 0 it is the most
    probable token. The random number of position t of sequence i is fold(seed, first + i, t): a
    sequence does not depend on the batch that it is drawn in, up to rounding of the logits. Beyond
    the context the model reads the second half of its context again and continues from there.
    before_each() is called before each position.
    """
    n = len(prompts)
    sequences = torch.cat([prompts, prompts.new_zeros(n, length - prompts.shape[1])], 1)
    # (n, length)
    numbers = torch.from_numpy(sampling_numbers(seed, first + np.arange(n), np.arange(length))).to(
        prompts.device
    )
    # the cache has positions begin ... read - 1
    cache = model.empty_cache()
    begin = 0
    read = 0
    for at in range(prompts.shape[1], length):
        before_each()
        if not n:  # other ranks have the sequences
            continue
        if at - begin > model.context:
            begin = read = at - max(1, model.context // 2)
            cache = model.empty_cache()
        logits = whole_outputs(model(sequences[:, read:at], cache))[
            :, -1, :tokens
        ].double()  # (n, tokens)
        read = at
        sequences[:, at] = _draw(logits, temperature, numbers[:, at])
    return sequences


def _draw(logits: torch.Tensor, temperature: float, numbers: torch.Tensor) -> torch.Tensor:
    """Returns (n,) by inversion of the cumulative distribution."""
    if temperature == 0:
        return logits.argmax(1)
    cumulative = (logits / temperature).softmax(1).cumsum(1)
    drawn = torch.searchsorted(cumulative, (numbers * cumulative[:, -1])[:, None], right=True)[:, 0]
    return drawn.clamp(max=logits.shape[1] - 1)
