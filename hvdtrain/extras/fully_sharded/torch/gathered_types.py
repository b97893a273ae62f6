"""Dtypes in which FSDP2 gathers weights: 16 bits for weights that a pass under autocast reads only
after a cast.

If they were gathered in float32, every pass would cast them again, and autograd would keep the
copies of all blocks until backward. All other weights keep their dtype (norms, embeddings, and what
a model computes in float32), so passes compute the same numbers as with shard.stage=0. FSDP2's
MixedPrecisionPolicy applies to all weights of a unit, so it would round these too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from hvdtrain.comm.communicator import Communicator
from hvdtrain.frameworks.torch.device import fork_rng
from hvdtrain.frameworks.torch.private_api import TorchDispatchMode, storage_of, tree_leaves

# Since torch 2.13. An older torch reduces only the parameters that this rank's samples reach, so
# ranks that reach different parameters would add up gradients that do not belong together.
REDUCES_UNREACHED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")

Pass = Callable[[torch.nn.Module], Any]  # a forward pass

# operations on weights that are being gathered; prim.device, in a prediction
_READ_NOTHING = (
    "fsdp",
    "prim",
)
# such as einsum, which may reorder a weight
_MOVE_ALONE = (
    torch.ops.aten.clone.default,
    torch.ops.aten._unsafe_view.default,
)


def gather_in_16_bits(
    model: torch.nn.Module,
    make_pass: Pass,
    device: torch.device,
    dtype: torch.dtype,
    world: Communicator,
) -> float:
    """Gathers weights in 16 bits from now on, for passes under autocast with this dtype. A
    collective. Returns the share of all weights that is gathered in 16 bits.

    make_pass: runs a pass of the model; called in training mode, in which it may change buffers,
    and in evaluation mode. Rank 0 decides for all ranks.
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
            each.all_gather_outputs = []  # they have the other dtype, and no memory now
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
    """Replaces a group's post_backward, which supports only gradients of one dtype, and before
    torch 2.13 only gradients that exist."""
    for each in group.fsdp_params if group.reduce_grads else ():
        gathered = getattr(each, "_unsharded_param", None)
        if gathered is None or not gathered.requires_grad:
            continue
        if gathered.grad is None and each.unsharded_accumulated_grad is None:
            gathered.grad = torch.zeros_like(gathered)
        each.to_accumulated_grad_if_needed()
    post_backward(*unused)


@torch.no_grad()
def _cast_alone(
    model: torch.nn.Module,
    groups: Sequence[Any],
    make_pass: Pass,
    device: torch.device,
    dtype: torch.dtype,
) -> list[list[bool]]:
    """Returns, for each parameter of each group, whether passes read it only after a cast. Leaves
    the model in evaluation mode."""
    autocast = torch.autocast(device.type, dtype, cache_enabled=False)
    with fork_rng([device]), autocast, _Reads(groups, dtype) as reads:
        # a model that chooses its blocks at random chooses the same blocks on all ranks
        torch.manual_seed(0)
        for training in (True, False):
            make_pass(model.train(training))
    return [
        [each in reads.cast and each not in reads.read for each in group.fsdp_params]
        for group in groups
    ]


class _Reads(TorchDispatchMode):
    """Records which gathered parameters operations cast to autocast's dtype, and which they read in
    another way."""

    def __init__(self, groups: Sequence[Any], dtype: torch.dtype) -> None:
        super().__init__()
        self.cast = set[Any]()
        self.read = set[Any]()
        self._to = dtype
        self._pending = list(groups)  # still to be gathered
        # key: address of the storage, which FSDP2 keeps and resizes
        self._of_storage: dict[int, Any] = {}
        # the last copy in another order, and the parameter that it copies
        self._moved: tuple[Any, Any] = (
            None,
            None,
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._find_gathered()
        result = func(*args, **(kwargs or {}))
        if _is_view(func) or func.namespace in _READ_NOTHING:
            return result
        parameters = self._parameters_in(_inputs(func, args, kwargs or {}))
        if func in _MOVE_ALONE and parameters:
            self._moved = result, parameters[0]
        elif func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is self._to:
            self.cast.update(parameters)
        else:
            self.read.update(parameters)
        return result

    def _find_gathered(self) -> None:
        for group in [group for group in self._pending if group.is_unsharded]:
            self._pending.remove(group)
            self._of_storage |= {
                storage_of(each._unsharded_param): each for each in group.fsdp_params
            }

    def _parameters_in(self, tree: Any) -> list[Any]:
        moved, of = self._moved
        known = self._of_storage | ({storage_of(moved): of} if of else {})
        tensors = [
            leaf
            for leaf in tree_leaves(tree)
            if isinstance(leaf, torch.Tensor) and not hasattr(leaf, "_local_tensor")
        ]
        addresses = [storage_of(tensor) for tensor in tensors if tensor.layout == torch.strided]
        return [known[address] for address in addresses if address in known]


def _is_view(func: Any) -> bool:
    return any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in func._schema.returns
    )


def _inputs(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Returns the arguments that an operation reads, without those that it writes to."""
    written = {
        argument.name
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    names = [argument.name for argument in func._schema.arguments]
    by_name = [*zip(names, args, strict=False), *kwargs.items()]
    return [value for name, value in by_name if name not in written]
