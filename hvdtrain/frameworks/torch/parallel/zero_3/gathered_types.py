"""The dtypes in which FSDP2 gathers weights: 16 bits for weights that a pass under autocast only
reads after a cast.

Gathered in float32, each of them would be cast again in every pass, and autograd would keep the
copies of all blocks until backward. All others stay as they are (norms, embeddings, what a model
computes in float32), so that passes have the numbers of shard.stage=0. A policy of FSDP2's own
(MixedPrecisionPolicy) is for all weights of a unit: it would round those too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from hvdtrain.comm.communicator import Communicator
from hvdtrain.frameworks.torch.parallel.cast_weights import Pass, Reads, watch_passes

# Since torch 2.13. An older one reduces the parameters that this rank's samples reach, and would
# add up other ranks' other parameters.
REDUCES_UNREACHED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def gather_in_16_bits(
    model: torch.nn.Module,
    make_pass: Pass,
    device: torch.device,
    dtype: torch.dtype,
    world: Communicator,
) -> float:
    """Gathers weights in 16 bits from now on, for passes under autocast of this dtype; returns
    their share of all weights. A collective.

    make_pass: of the model, called in training, which may change buffers, and in evaluation. Rank 0
    decides for all.
    """
    groups = [
        group
        for module in model.modules()
        if isinstance(module, FSDPModule) and (group := group_of(module))
    ]
    cast = world.broadcast_object(_cast_alone(model, groups, make_pass, device, dtype))
    for group, flags in zip(groups, cast, strict=True):
        for each in (
            each for each, is_cast in zip(group.fsdp_params, flags, strict=True) if is_cast
        ):
            each.init_dtype_attrs(MixedPrecisionPolicy(dtype, reduce_dtype=each.orig_dtype))
            each.all_gather_outputs = []  # of the other type, without memory now
            del each._unsharded_param
        if any(flags) and REDUCES_UNREACHED:
            reduce_all_of(group)
    sizes = [
        (each.sharded_param.numel(), each.param_dtype is dtype)
        for group in groups
        for each in group.fsdp_params
    ]
    return sum(size for size, is_cast in sizes if is_cast) / sum(size for size, _ in sizes)


def group_of(module: Any) -> Any:
    """Returns FSDP2's parameter group of this module; None if it has no parameters of its own."""
    return module._get_fsdp_state()._fsdp_param_group


def reduce_all_of(group: Any) -> None:
    """Makes the group reduce gradients in the dtype of its weights, with zeros for parameters that
    this rank's samples do not reach."""
    group.post_backward = functools.partial(_post_backward_of_all, group, group.post_backward)


def _post_backward_of_all(group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
    """In place of a group's post_backward, which takes gradients of one type alone, and before
    torch 2.13 those that are there."""
    for each in group.fsdp_params if group.reduce_grads else ():
        gathered = getattr(each, "_unsharded_param", None)
        if gathered is None or not gathered.requires_grad:
            continue
        if gathered.grad is None and each.unsharded_accumulated_grad is None:
            gathered.grad = torch.zeros_like(gathered)
        each.to_accumulated_grad_if_needed()
    post_backward(*unused)


def _cast_alone(
    model: torch.nn.Module,
    groups: Sequence[Any],
    make_pass: Pass,
    device: torch.device,
    dtype: torch.dtype,
) -> list[list[bool]]:
    """Returns, for each parameter of each group, whether passes only read it after a cast. The
    model is in evaluation mode then."""
    reads = Reads(dtype, groups=groups)
    watch_passes(model, reads, make_pass, device, dtype)
    return [
        [each in reads.cast and each not in reads.read for each in group.fsdp_params]
        for group in groups
    ]
