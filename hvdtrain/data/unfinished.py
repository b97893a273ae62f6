"""A data set that needs an array computed from its training samples, the same on all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import numpy as np

from hvdtrain.data.source import Source


class Unfinished(ABC):
    """The result of build() if the samples depend on an array that is computed from the training
    samples, such as a codebook.

    Rank 0 computes the array once (training/common_array.py), and Source.run_files keeps it.
    """

    array: ClassVar[str]  # the name under which ranks broadcast it

    @abstractmethod
    def compute(self) -> np.ndarray:
        """Computes the array from these samples. Raises UserError."""

    @abstractmethod
    def read(self, run: Path) -> np.ndarray:
        """Reads the array from a run folder. Raises UserError if it is absent or damaged."""

    @abstractmethod
    def finish(self, array: np.ndarray) -> Source: ...
