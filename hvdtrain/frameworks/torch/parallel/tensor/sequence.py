"""Sequence parallelism: between cut layers a rank has its part of the positions of each sample.

(Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.)

Tensors are (..., positions, features). Where all ranks had a sum, each has its own positions of it, by a reduce-scatter; where a layer
reads what all of them had, positions are gathered. A rank keeps its own positions for backward, and gathers them again there.

Ranks send rows, which are whole positions: axis -2 comes first in memory, so that a part of it is one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hvdtrain.frameworks.torch.parallel.tensor.collectives import Link, Positions

Waiting = Callable[[], torch.Tensor]  # of a collective that was started: waits for its result


def linear_of_all_positions(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, link: Link) -> torch.Tensor:
    """x (..., m / ranks, inputs), a rank's positions -> (..., m, outputs) of its part of the layer; the conjugate is a reduce-scatter."""
    device = x.device.type
    if torch.is_autocast_enabled(device):  # before it is sent
        dtype = torch.get_autocast_dtype(device)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    found: torch.Tensor = _LinearOfAllPositions.apply(x, weight, bias, link)
    return found


def sum_of_own_positions(rows: torch.Tensor, link: Link) -> torch.Tensor:
    """rows (m, ..., features) on every rank -> (..., m / ranks, features), their sum at this rank's positions; the conjugate gathers.

    `rows` may be overwritten.
    """
    found: torch.Tensor = _SumOfOwnPositions.apply(rows, link)
    return found


class _LinearOfAllPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, link: Link) -> torch.Tensor:
        positions = _positions(link)
        ctx.save_for_backward(x, weight)
        ctx.link, ctx.count = link, positions.count
        rows = _start_gather(x, link, positions.count, "forward")()
        return functional.linear(rows, weight, bias).movedim(0, -2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None]:
        """A product of matrices while x is gathered, the other one while the gradient of x is summed, with an asynchronous engine."""
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        rows = dy.movedim(-2, 0)  # (m, ..., outputs)
        gathered = _start_gather(x, ctx.link, ctx.count, "again") if wants_weight else None
        dx = _start_sum(rows @ weight, ctx.link, "backward") if wants_x else None
        flat = rows.flatten(0, -2)
        dweight = flat.T @ gathered().flatten(0, -2) if gathered else None
        return dx() if dx else None, dweight, flat.sum(0) if wants_bias else None, None


class _SumOfOwnPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, link: Link) -> torch.Tensor:
        ctx.link, ctx.count = link, len(rows)
        _positions(link).count = len(rows)
        return _start_sum(rows, link, "forward")()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _start_gather(dy, ctx.link, ctx.count, "backward")(), None


def _positions(link: Link) -> Positions:
    assert link.positions is not None, link.layer
    return link.positions


def _start_gather(x: torch.Tensor, link: Link, count: int, direction: str) -> Waiting:
    """x (..., m / ranks, features) -> rows (m, ..., features) of all ranks, m = count."""
    own = x.detach().movedim(-2, 0)
    part = Positions(count).part(link.communicator)
    assert len(own) == part.stop - part.start, f"{link.layer} has {len(own)} positions, which are no part of {count}"
    with torch.inference_mode(False):
        whole = own.new_empty((count, *own.shape[1:]), device=link.device_of(x))
        whole[part] = own
        dtype = torch.int16 if x.dtype == torch.bfloat16 else x.dtype  # no engine moves bfloat16 by its name
        handle = link.communicator.start_spread(whole.view(dtype), link.name_of(direction))

    def wait() -> torch.Tensor:
        with torch.inference_mode(False):
            found: torch.Tensor = handle.wait()
        return found.view(x.dtype).to(x.device)

    return wait


def _start_sum(rows: torch.Tensor, link: Link, direction: str) -> Waiting:
    """rows (m, ..., features) -> (..., m / ranks, features) of their sum over ranks, in memory of its own."""
    with torch.inference_mode(False):
        operand = link.ready(rows.detach().to(link.sum_dtype(rows)))
        handle = link.communicator.start_reduce_scatter(operand, link.name_of(direction))

    def wait() -> torch.Tensor:
        with torch.inference_mode(False):
            found: torch.Tensor = handle.wait()
        # a copy, also of one sample: the result may be a view of all rows, which would keep them
        return found.to(rows.device, rows.dtype).movedim(0, -2).clone(memory_format=torch.contiguous_format)

    return wait
