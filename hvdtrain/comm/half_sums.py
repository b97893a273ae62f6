"""Sums of float16 and bfloat16 for MPI, which knows neither: the numbers travel as they are and are added by torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

HALVES = ("float16", "bfloat16")


def adder(dtype: str) -> Callable[[Any, Any, Any], None]:
    """A function for MPI.Op.Create: b += a, of numbers that MPI takes for integers of 16 bits. Each addition rounds."""
    torch = importlib.import_module("torch")
    kind = getattr(torch, dtype)

    def add(a: Any, b: Any, _: Any) -> None:
        if len(b):
            torch.frombuffer(b, dtype=kind).add_(torch.frombuffer(bytearray(a) if a.readonly else a, dtype=kind))

    return add
