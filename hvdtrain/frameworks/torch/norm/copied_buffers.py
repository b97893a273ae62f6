"""The buffers of a model, which its norms change in a forward pass, as they were before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn


@contextlib.contextmanager
def copied_buffers(block: nn.Module) -> Iterator[None]:
    """Inside, the block has copies of its buffers: the running statistics of its norms have been updated already."""
    tables: list[dict[str, Tensor | None]] = [module._buffers for module in block.modules() if module._buffers]
    before = [dict(table) for table in tables]
    for table in tables:
        table.update({name: None if buffer is None else buffer.detach().clone() for name, buffer in table.items()})
    try:
        yield
    finally:
        for table, own in zip(tables, before, strict=True):
            table.update(own)
