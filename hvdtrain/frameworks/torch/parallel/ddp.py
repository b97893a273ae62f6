"""comm.reduce=ddp: PyTorch's DistributedDataParallel as one more way for gradients to meet, on the torchdist engine."""

from __future__ import annotations

import inspect
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvdtrain.errors import UserError

_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters  # of torch 2.13


class Ddp:
    """Its hooks start the allreduces of its buckets."""

    words = "gradients by DDP"
    local_mean = False

    def __init__(self, forward: torch.nn.Module, bucket_mb: float) -> None:
        buffers: dict[str, Any] = {"forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False}  # ranks settle them where they meet
        # of channels_last gradients, which it copies; once in each process
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        self.wrapped = DistributedDataParallel(
            forward,
            process_group=dist.new_group(),  # its collectives never wait for those of others, whatever their order
            bucket_cap_mb=bucket_mb,
            gradient_as_bucket_view=True,
            **buffers,
        )
        self._size = dist.get_world_size()
        self._named = [(name.removeprefix("model."), p) for name, p in forward.named_parameters() if p.requires_grad]
        self._quiet: AbstractContextManager[Any] | None = None

    def begin(self, passes: int) -> None:
        if passes > 1:
            self._quiet = self.wrapped.no_sync()
            self._quiet.__enter__()

    def last_pass(self) -> None:
        if self._quiet:
            self._quiet.__exit__(None, None, None)
            self._quiet = None

    def finish(self) -> None:
        """From DDP's mean over ranks back to the sum: the loss is already divided by the global batch.

        DDP reduces no bucket whose gradients are not all there, so a parameter that no loss reaches is refused, not waited for.
        """
        if missing := [name for name, p in self._named if p.grad is None]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise UserError(f"no loss reaches {missing[0]}{more}: DDP would wait for the gradient", "comm.reduce=ddp", "comm.reduce=auto")
        torch._foreach_mul_([p.grad for _, p in self._named if p.grad is not None], self._size)

    def apply(self, optimizer: Any) -> None:
        optimizer.step()
