"""Staging: the one page-locked buffer through which the tensors of a GPU come to the host, one at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch


class Staging:
    """Host memory of one rank, as large as the largest tensor on its GPU; none where all lie in host memory."""

    def __init__(self) -> None:
        self._largest_bytes = 0
        self._buffer: torch.Tensor | None = None

    def expect(self, tensors: Iterable[torch.Tensor]) -> None:
        """These may be read next: the buffer gets the size of the largest with the first of them."""
        self._largest_bytes = max((tensor.nbytes for tensor in tensors if not self.is_on_host(tensor)), default=0)

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether its numbers are read where they lie."""
        return tensor.device.type == "cpu"

    def read(self, tensor: torch.Tensor) -> np.ndarray:
        """The numbers of a tensor in its shape: where they lie in host memory, or in the buffer, where the next call overwrites them.

        The host waits for the GPU.
        """
        tensor = tensor.detach()
        return (tensor if self.is_on_host(tensor) else self.copy(tensor)).numpy()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in the buffer, whose numbers are in the same order in memory: the GPU needs no other one in between."""
        nbytes = max(tensor.nbytes, self._largest_bytes)
        if self._buffer is None or self._buffer.nbytes < nbytes:
            self._buffer = None  # before there is a larger one
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=tensor.is_cuda)
        numbers = self._buffer[: tensor.nbytes].view(tensor.dtype)
        strides = torch.empty_like(tensor, device="meta").stride()  # as tensor.cpu() would have
        return numbers.as_strided(tensor.shape, strides).copy_(tensor)


@functools.cache
def numpy_type(dtype: torch.dtype) -> np.dtype[Any]:
    """Raises TypeError for a number type that numpy does not have, as bfloat16."""
    found: np.dtype[Any] = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    return found
