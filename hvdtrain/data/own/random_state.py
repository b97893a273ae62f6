"""The random generators that code of the user's own draws from: Python's, numpy's and torch's, seeded for each sample by counters."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import numpy as np

from hvdtrain.core.seeds import fold

_TRAINING, _EVALUATION = 0x747261, 0x6576616C  # two streams of counters


def training_seeds(indices: np.ndarray, epochs: np.ndarray, seed: int) -> np.ndarray:
    """uint64 (n,): of the samples at `indices` in their epochs, whatever process reads them."""
    return np.asarray(fold(fold(_TRAINING, seed), epochs.astype(np.uint64), indices.astype(np.uint64)), np.uint64)


def evaluation_seeds(indices: np.ndarray) -> np.ndarray:
    """Seeds of samples, equal in every evaluation and for every seed of a job."""
    return np.asarray(fold(_EVALUATION, indices.astype(np.uint64)), np.uint64)


def set_random_state(seed: int) -> None:
    """20 microseconds. torch's generator is seeded where torch is imported; that of a device is not."""
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(seed)


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Inside it torch computes on one thread, as in a worker process; at its end all is as before."""
    torch = sys.modules.get("torch")
    states = random.getstate(), np.random.get_state()
    of_torch = (torch.default_generator.get_state(), torch.get_num_threads()) if torch else None
    if torch and of_torch and of_torch[1] != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if torch and of_torch:
            torch.default_generator.set_state(of_torch[0])
            if of_torch[1] != 1:
                torch.set_num_threads(of_torch[1])
