"""Sums of float16 and bfloat16 for MPI, which has neither type: the buffers are sent as 16-bit integers, and torch adds them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

HALF_TYPES = ("float16", "bfloat16")


def sum_function(dtype: str) -> Callable[[Any, Any, Any], None]:
    """A function for MPI.Op.Create: b += a, elementwise, for buffers of `dtype` that MPI takes for integers. Each addition rounds."""
    torch = importlib.import_module("torch")
    half_type = getattr(torch, dtype)

    def add(a: Any, b: Any, _: Any) -> None:
        if len(b):
            torch.frombuffer(b, dtype=half_type).add_(torch.frombuffer(bytearray(a) if a.readonly else a, dtype=half_type))

    return add
