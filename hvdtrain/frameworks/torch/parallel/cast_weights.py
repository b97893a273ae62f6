"""Which weights passes under autocast cast to 16 bits and read in no other way: ranks need no more
of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hvdtrain.frameworks.torch.device import fork_rng
from hvdtrain.frameworks.torch.private_api import TorchDispatchMode, storage_of, tree_leaves

Pass = Callable[[torch.nn.Module], Any]  # a forward pass

# operations on weights that are being gathered; prim.device, in a prediction
_READ_NOTHING = (
    "fsdp",
    "prim",
)
# as when einsum reorders a weight
_MOVE_ALONE = (
    torch.ops.aten.clone.default,
    torch.ops.aten._unsafe_view.default,
)


def cast_alone(
    model: torch.nn.Module,
    parameters: Sequence[torch.nn.Parameter],
    make_pass: Pass,
    device: torch.device,
    dtype: torch.dtype,
) -> list[bool]:
    """For each parameter, whether passes of the model cast it and do not read it otherwise. Leaves
    the model in evaluation mode.

    make_pass: called in training, which may change buffers, and in evaluation.
    """
    # a tensor that shares its memory with another one may be read by that one's name
    owners = Counter(map(storage_of, (*model.parameters(), *model.buffers())))
    alone = [p for p in parameters if owners[storage_of(p)] == 1]
    reads = Reads(dtype, alone)
    watch_passes(model, reads, make_pass, device, dtype)
    return [p in reads.cast and p not in reads.read for p in parameters]


@torch.no_grad()
def watch_passes(
    model: torch.nn.Module,
    reads: Reads,
    make_pass: Pass,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Makes a pass in training and one in evaluation, in which mode it leaves the model."""
    autocast = torch.autocast(device.type, dtype, cache_enabled=False)
    with fork_rng([device]), autocast, reads:
        # a model that draws which blocks it calls draws the same ones on all ranks
        torch.manual_seed(0)
        for training in (True, False):
            make_pass(model.train(training))


class Reads(TorchDispatchMode):
    """Which parameters operations cast to the type of autocast, and which they read in another
    way."""

    def __init__(
        self, dtype: torch.dtype, parameters: Iterable[Any] = (), groups: Sequence[Any] = ()
    ) -> None:
        """parameters: each of a storage of its own; groups: of FSDP2, whose parameters are those
        that it gathers."""
        super().__init__()
        self.cast = set[Any]()
        self.read = set[Any]()
        self._to = dtype
        self._pending = list(groups)  # still to be gathered
        # by its address; FSDP2 keeps and resizes it
        self._of_storage: dict[int, Any] = {storage_of(p): p for p in parameters}
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
        known = self._of_storage | ({} if of is None else {storage_of(moved): of})
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
    """The arguments that an operation reads, without those that it writes to."""
    written = {
        argument.name
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    names = [argument.name for argument in func._schema.arguments]
    by_name = [*zip(names, args, strict=False), *kwargs.items()]
    return [value for name, value in by_name if name not in written]
