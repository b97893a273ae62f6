"""A model is counted while it is created, also by threads at the same time."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hvdtrain.frameworks.torch.foreign.counted import TooLarge, counted


def test_threads_make_models_at_the_same_time() -> None:
    """torch calls its hooks from one dict of the process; each thread counts its own."""

    def make(width: int) -> None:
        for _ in range(100):
            with counted(4 * 2 * 5 * (4 * 4 + 4)):
                torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(5)))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(make, [2, 3, 4, 2]))
    finally:
        sys.setswitchinterval(before)
    with pytest.raises(TooLarge):
        make(20)
