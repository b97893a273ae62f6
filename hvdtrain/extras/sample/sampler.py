"""Sampler: draws tokens from the model of a learner, on one rank or on all."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Protocol

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.progress import fold
from hvdtrain.data.sampler import evaluation_batches
from hvdtrain.frameworks.learner import Learner

_SAMPLING = 0x73616D70  # a stream of counters, distinct from the streams of other random numbers
# by the name of the learner's class
_MODULES = {
    "TorchLearner": "hvdtrain.extras.sample.of_torch",
    "JaxLearner": "hvdtrain.extras.sample.of_jax",
}


class Sampler(Protocol):
    """Draws tokens from the model of a learner."""

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
        """Continues prompts, int64 (n, m), to int64 (n, length) with tokens 0 ... tokens - 1; n may
        be 0.

        Each is drawn from softmax(logits / temperature), with top_k from the most probable ones.
        Sequence i uses the random numbers of (seed, first + i). before_each() is called before each
        position. The training state does not change. Raises UserError if the model cannot
        run token by token.
        """


def sampler_of(learner: Learner, config: Config) -> Sampler | None:
    """Returns a sampler of a learner; None if its framework does not draw tokens."""
    module = _MODULES.get(type(learner).__name__)
    if module is None:
        return None
    made: Sampler = importlib.import_module(module).make_sampler(learner, config)
    return made


def sampling_numbers(seed: int, sequences: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns the random numbers that tokens are drawn with in every framework, float64 (sequences,
    positions) in [0, 1)."""
    bits = fold(
        seed, _SAMPLING, sequences.astype(np.uint64)[:, None], positions.astype(np.uint64)[None, :]
    )
    return (bits >> np.uint64(11)) * 2.0**-53


def draw_on_all_ranks(
    communicator: Communicator,
    sampler: Sampler,
    prompts: np.ndarray,
    length: int,
    *,
    tokens: int,
    temperature: float,
    top_k: int | None = None,
    seed: int,
    at_once: int,
    before_each: Callable[[], None],
) -> np.ndarray:
    """Continues prompts, int64 (n, m), to int64 (n, length), as Sampler.continue_sequences() does.
    A collective.

    at_once: sequences that a rank continues together. before_each() is called before each position,
    equally often on every rank.
    """
    mine = [np.empty((0, length), np.int64)]
    for rows in evaluation_batches(len(prompts), at_once, communicator.rank, communicator.size):
        first = int(rows[0]) if len(rows) else 0
        mine.append(
            sampler.continue_sequences(
                prompts[rows],
                length,
                tokens=tokens,
                temperature=temperature,
                top_k=top_k,
                seed=seed,
                first=first,
                before_each=before_each,
            )
        )
    return communicator.allgather(np.concatenate(mine), "sample.tokens")
