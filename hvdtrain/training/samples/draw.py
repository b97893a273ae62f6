"""Sequences drawn by all ranks together: each continues its share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.data.sampler import evaluation_batches
from hvdtrain.frameworks.learner import Sampler


def draw_on_all_ranks(
    communicator: Communicator,
    learner: Sampler,
    prompts: np.ndarray,
    length: int,
    *,
    tokens: int,
    temperature: float,
    seed: int,
    at_once: int,
    before_each: Callable[[], None],
) -> np.ndarray:
    """int64 (n, length): the prompts, int64 (n, m), continued as Sampler.continue_sequences() says. A collective.

    at_once: sequences that a rank continues together. before_each() is called before each position, equally often on every rank.
    """
    mine = [np.empty((0, length), np.int64)]
    for rows in evaluation_batches(len(prompts), at_once, communicator.rank, communicator.size):
        first = int(rows[0]) if len(rows) else 0
        mine.append(
            learner.continue_sequences(
                prompts[rows], length, tokens=tokens, temperature=temperature, seed=seed, first=first, before_each=before_each
            )
        )
    return communicator.allgather(np.concatenate(mine), "sample.tokens")
