"""A model's buffers: saved before a step and restored if it is skipped, synchronized over ranks, or
copied for a forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hvdtrain.comm.communicator import Communicator, Handle
from hvdtrain.frameworks.torch.strategy import reduction_device

# a module's live table: a forward pass may store another tensor under a name
Table = dict[str, torch.Tensor | None]
# names in torch and in Keras
RUNNING = ("running_mean", "running_var", "moving_mean", "moving_variance")


class Buffers:
    """The running statistics of norms, and all other buffers, of the modules that the model has
    now."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._tables: list[Table] = [module._buffers for module in model.modules()]
        self._device = device
        self._saved: list[tuple[Table, Table, dict[str, torch.Tensor]]] = []

    def save(self) -> None:
        """Saves buffers before a step that may be skipped; copies each buffer."""
        self._saved = [
            (
                table,
                dict(table),
                {name: b.detach().clone() for name, b in table.items() if b is not None},
            )
            for table in self._tables
            if table
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restores the buffers of the last save() bit by bit, in the same tensors."""
        for table, before, copies in self._saved:
            table.clear()
            table.update(before)
            for name, copy in copies.items():
                live = before[name]
                assert live is not None, name
                live.copy_(copy)

    @torch.no_grad()
    def sync_buffers(self, communicator: Communicator, first: int = 0) -> None:
        """Averages running statistics over ranks and copies other buffers from the first rank, with
        one collective for each kind.

        first: the first rank that reads samples.
        """
        if communicator.size == 1:
            return
        device = reduction_device(self._device, communicator)
        named = [
            (name, b)
            for table in self._tables
            for name, b in table.items()
            if b is not None and b.numel()
        ]
        running = [b for name, b in named if name in RUNNING]
        others = [b for name, b in named if name not in RUNNING]
        # so that each begins at a multiple of its element size
        others.sort(key=torch.Tensor.element_size, reverse=True)
        handle: Handle | None = None
        if running:
            flat = torch.cat([b.to(self._device).flatten() for b in running]) / (
                communicator.size - first
            )
            flat = flat if communicator.rank >= first else torch.zeros_like(flat)
            handle = communicator.start_allreduce(flat.to(device), "settle")
        if others:
            flat = torch.cat(
                [b.to(self._device).flatten().contiguous().view(torch.uint8) for b in others]
            )
            flat = communicator.broadcast(flat.to(device), "settle.others", root=first).to(
                self._device
            )
            received = flat.split([b.nbytes for b in others])
            torch._foreach_copy_(
                others,
                [
                    bytes_.view(b.dtype).view_as(b)
                    for b, bytes_ in zip(others, received, strict=True)
                ],
            )
        if handle:
            means = handle.wait().to(self._device).split([b.numel() for b in running])
            torch._foreach_copy_(
                running, [mean.view_as(b) for b, mean in zip(running, means, strict=True)]
            )


@contextlib.contextmanager
def copied_buffers(block: nn.Module) -> Iterator[None]:
    """Gives a block copies of its buffers within the context, because the running statistics of its
    norms were already updated."""
    tables: list[dict[str, Tensor | None]] = [
        module._buffers for module in block.modules() if module._buffers
    ]
    before = [dict(table) for table in tables]
    for table in tables:
        table.update(
            {
                name: None if buffer is None else buffer.detach().clone()
                for name, buffer in table.items()
            }
        )
    try:
        yield
    finally:
        for table, own in zip(tables, before, strict=True):
            table.update(own)
