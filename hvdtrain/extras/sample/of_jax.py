"""Draws sequences token by token from a JAX model with a cache of earlier positions; the tokens are
the same as in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.extras.sample.sampler import sampling_numbers
from hvdtrain.frameworks.jax.layers import Params, Reader
from hvdtrain.frameworks.jax.learner import JaxLearner
from hvdtrain.frameworks.jax.model import JaxDevice


def make_sampler(learner: JaxLearner, config: Config) -> JaxSampler:
    """Returns the sampler of a learner."""
    return JaxSampler(learner, config.where("model.name"))


class JaxSampler:
    """Implements Sampler with the model of a JaxLearner."""

    def __init__(self, learner: JaxLearner, where: str) -> None:
        """where: the model was set."""
        self._learner = learner
        self._where = where
        self._decoder: CompiledDecoder | None = None  # since tokens were drawn

    def continue_sequences(
        self,
        prompts: np.ndarray,
        length: int,
        *,
        tokens: int,
        temperature: float,
        top_k: int | None = None,
        seed: int,
        first: int,
        before_each: Callable[[], None],
    ) -> np.ndarray:
        model = self._learner.model
        reader = model.functions.reader
        if reader is None:
            what = f"{model.title} has no reader, so it cannot generate token by token"
            raise UserError(what, self._where, "a run with model.name=gpt")
        self._decoder = self._decoder or CompiledDecoder(reader, model.tree, self._learner.target)
        numbers = sampling_numbers(seed, first + np.arange(len(prompts)), np.arange(length))
        weights = self._learner.whole_weights()
        return self._decoder.continue_sequences(
            weights, prompts, numbers, tokens, temperature, top_k, before_each
        )


class CompiledDecoder:
    """Runs a model's Reader, compiled once for each number of sequences and of positions that are
    read together."""

    def __init__(
        self, reader: Reader, tree: Callable[[list[jax.Array]], Params], target: JaxDevice
    ) -> None:
        """tree: converts a list of weights to parameters."""
        self._reader = reader
        self._target = target

        def last(
            weights: list[jax.Array], tokens: jax.Array, cache: Any, first: Any
        ) -> tuple[jax.Array, Any]:
            logits, cache = reader.read(tree(weights), tokens, cache, first)
            return logits[:, -1], cache

        self._last = jax.jit(last, donate_argnums=2)

    def continue_sequences(
        self,
        weights: list[jax.Array],
        prompts: np.ndarray,
        numbers: np.ndarray,
        tokens: int,
        temperature: float,
        top_k: int | None,
        before_each: Callable[[], None],
    ) -> np.ndarray:
        """Continues prompts, int64 (n, m), to int64 (n, length), like Sampler.continue_sequences().
        numbers: (n, length)."""
        (n, at_first), length, context = prompts.shape, numbers.shape[1], self._reader.context
        sequences = np.concatenate([prompts, np.zeros((n, length - at_first), np.int64)], 1)
        begin = read = 0  # the cache has positions begin ... read - 1
        cache = None
        for at in range(at_first, length):
            before_each()
            if not n:  # other ranks have the sequences
                continue
            if at - begin > context:  # the second half of the context is read again
                begin = read = at - max(1, context // 2)
                cache = None
            with self._target.enable_x64():
                cache = self._empty_cache(n) if cache is None else cache
                logits, cache = self._last(
                    weights, sequences[:, read:at].astype(np.int32), cache, np.int32(read - begin)
                )
            read = at
            sequences[:, at] = draw(
                most_probable(np.asarray(logits, np.float64)[:, :tokens], top_k),
                temperature,
                numbers[:, at],
            )
        return sequences

    def _empty_cache(self, sequences: int) -> Any:
        return jax.tree.map(
            self._target.to_device, self._reader.empty_cache(sequences, self._target.dtype)
        )


def most_probable(logits: np.ndarray, top_k: int | None) -> np.ndarray:
    """Returns the logits (n, tokens), -inf for those below the top_k largest of a row."""
    if top_k is None or top_k >= logits.shape[1]:
        return logits
    least = np.partition(logits, -top_k, axis=1)[:, [-top_k]]
    found: np.ndarray = np.where(logits < least, -np.inf, logits)
    return found


def draw(logits: np.ndarray, temperature: float, numbers: np.ndarray) -> np.ndarray:
    """Draws tokens (n,) by inverting the cumulative distribution; with temperature 0, the most
    probable tokens."""
    if temperature == 0:
        return logits.argmax(1)
    scaled = logits / temperature
    cumulative = np.exp(scaled - scaled.max(1, keepdims=True)).cumsum(1)
    drawn = (cumulative <= (numbers * cumulative[:, -1])[:, None]).sum(1)
    return np.minimum(drawn, logits.shape[1] - 1)
