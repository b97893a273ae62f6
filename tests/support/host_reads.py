"""Operations for whose numbers a host would wait on a GPU, seen on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# a number of a tensor becomes one of Python, or the other way round; results whose shape depends
# on numbers
READS = {
    aten._local_scalar_dense.default,
    aten.lift_fresh.default,
    aten.bincount.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten._unique2.default,
}


class HostReads(TorchDispatchMode):
    """Lists the operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if function in READS or _takes_a_mask(function, arguments):
            self.found.append(str(function))
        return function(*arguments, **options or {})


class NoReading(HostReads):
    """Raises AssertionError at the first one."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(function, types, arguments, options)
        assert not self.found, self.found
        return result


def _takes_a_mask(function: Any, arguments: Any) -> bool:
    """x[mask] has as many numbers as the mask says."""
    return function is aten.index.Tensor and any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in arguments[1]
    )
