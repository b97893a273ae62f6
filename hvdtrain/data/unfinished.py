"""A data set that needs an array computed from its training samples, the same on all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import numpy as np

from hvdtrain.data.source import Source


class Unfinished(ABC):
    """Returned by build() of a data set whose samples depend on an array computed from the training
    samples, as tokens depend on a codebook.

    Rank 0 computes it once (training/common_array.py), and Source.run_files keeps it.
    """

    array: ClassVar[str]  # what ranks call it when they broadcast it

    @abstractmethod
    def compute(self) -> np.ndarray:
        """Completes the data set with the array, computed from these samples. Raises UserError."""

    @abstractmethod
    def read(self, run: Path) -> np.ndarray:
        """The array that a run folder has kept. Raises UserError if it is absent or damaged."""

    @abstractmethod
    def finish(self, array: np.ndarray) -> Source: ...
