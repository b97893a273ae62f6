"""Gradients that a library reduces: PyTorch with comm.reduce=ddp, Horovod with
comm.reduce=distributed_optimizer."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Sequence, Sized
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvdtrain.comm.communicator import Communicator
from hvdtrain.core.metrics import Sums
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.strategy import (
    NamedParameters,
    OnePass,
    Strategy,
    Wrapped,
    fill_missing,
    run_passes,
)

# argument names changed in torch 2.13
_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters


class Ddp(Strategy):
    """The hooks of DistributedDataParallel start the allreduces of its buckets, and its backward
    waits for them."""

    summary = "gradients by DDP"
    waits_in_passes = True

    def __init__(self, named: NamedParameters, bucket_mb: float, timeout: timedelta) -> None:
        """timeout: of a collective."""
        self._named = named
        self._timeout = timeout
        self._bucket_mb = bucket_mb
        self._is_called = (
            # whether DDP's module was called since the last step; calling the inner module would
            # reduce nothing
            False
        )

    @property
    def equal_ranks(self) -> int:
        return dist.get_world_size()

    def wrap(self, forward: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
        # sync_buffers() does that
        no_buffers: dict[str, Any] = {
            "forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False
        }
        # a warning about channels_last gradients, which it copies; once per process
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        self._ddp = DistributedDataParallel(
            forward,
            # a separate group, so that its collectives do not wait for others, whatever their order
            process_group=dist.new_group(timeout=self._timeout),
            bucket_cap_mb=self._bucket_mb,
            gradient_as_bucket_view=True,
            **no_buffers,
        )
        self._ddp.register_forward_pre_hook(self._note_call)
        return Wrapped(self._ddp, optimizer)

    def _note_call(self, module: torch.nn.Module, inputs: Any) -> None:
        self._is_called = self._is_called or torch.is_grad_enabled()

    def run(self, micro: Sequence[Sized], divisor: float, one_pass: OnePass) -> Sums:
        with contextlib.ExitStack() as no_sync:
            if len(micro) > 1:
                no_sync.enter_context(self._ddp.no_sync())
            return run_passes(micro, divisor, one_pass, before_last=no_sync.close)

    def reduce(self) -> None:
        """Converts DDP's mean over ranks back to the sum: the loss is already divided by the global
        batch.

        DDP waits for all gradients of a bucket, so a parameter that does not affect the loss raises
        UserError. A custom loop that calls the unwrapped module raises it, too, because each rank
        would keep its local gradient.
        """
        if not self._is_called:
            what = (
                "the script called the module inside the prepared model, so its gradients are "
                "not reduced"
            )
            raise UserError(
                what,
                "comm.reduce=ddp",
                "model, optimizer = ctx.prepare(net, optimizer); compute the loss from model(x), "
                "not net(x)",
            )
        self._is_called = False
        if missing := [name for name, p in self._named if p.grad is None]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise UserError(
                f"the loss does not depend on {missing[0]}{more}: DDP would wait for its gradient",
                "comm.reduce=ddp",
                "comm.reduce=auto",
            )
        torch._foreach_mul_(
            [p.grad for _, p in self._named if p.grad is not None], self.equal_ranks
        )


class HorovodOptimizer(Strategy):
    """hvd.DistributedOptimizer: its hooks start the allreduces, its synchronize() waits for
    them."""

    summary = "gradients by hvd.DistributedOptimizer"

    def __init__(self, named: NamedParameters, communicator: Communicator) -> None:
        self._named = named
        self._passes = 1
        self._communicator = communicator

    @property
    def equal_ranks(self) -> int:
        return self._communicator.size

    def wrap(self, forward: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
        self._optimizer = wrap_optimizer(optimizer, self._named)
        return Wrapped(forward, self._optimizer)

    def run(self, micro: Sequence[Sized], divisor: float, one_pass: OnePass) -> Sums:
        if len(micro) != self._passes:
            self._optimizer.set_backward_passes_per_step(len(micro))
            self._passes = len(micro)
        return run_passes(micro, divisor, one_pass)

    def reduce(self) -> None:
        # Horovod does this itself, except on a single rank
        fill_missing([p for _, p in self._named])
        self._optimizer.synchronize()

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        with self._optimizer.skip_synchronize():
            optimizer.step()


def wrap_optimizer(optimizer: torch.optim.Optimizer, named: NamedParameters) -> Any:
    """hvd.DistributedOptimizer with op=Sum: the loss is already divided by the global batch. Wrap
    before any state exists."""
    import horovod.torch as hvd

    # The constructor is called again with only the groups, and earlier state is dropped; hvdtrain
    # creates state later. A class that creates state in its constructor (Adagrad) only recreates it
    # if that needs no option, so fits_horovod() rejects options.
    return hvd.DistributedOptimizer(optimizer, named_parameters=named, op=hvd.Sum)


def fits_horovod(optimizer: torch.optim.Optimizer, named: NamedParameters) -> str:
    """Returns why hvd.DistributedOptimizer does not support this optimizer with these parameters;
    empty if it does."""
    required = [
        p.name
        for p in list(inspect.signature(type(optimizer)).parameters.values())[1:]
        if _is_required(p)
    ]
    if required:  # it constructs the optimizer again from its parameter groups only
        return (
            f"Horovod cannot construct {type(optimizer).__name__} again without its "
            f"{', '.join(required)}"
        )
    construction = optimizer.param_groups[0].get("construction")
    if (
        construction is not None and construction.options
    ):  # the constructor may act on them, or keep them outside of the groups
        return (
            f"Horovod would construct {type(optimizer).__name__} again without its "
            f"{', '.join(construction.options)}"
        )
    for name, p in named:
        if not p.is_contiguous():
            return f"Horovod cannot reduce channels_last or otherwise strided tensors ({name})"
    return ""


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind in (
        parameter.POSITIONAL_OR_KEYWORD,
        parameter.KEYWORD_ONLY,
    )
