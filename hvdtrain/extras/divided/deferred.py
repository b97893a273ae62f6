"""Creates a model without memory for its large tensors, and computes each tensor on request, with
bit-identical values.

The operations of the constructor on a large tensor are recorded instead of executed. Random numbers
are still drawn, one tensor at a time, to advance the generator. The generator's state before each
draw, 5 kB, is kept to draw them again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from hvdtrain.frameworks.torch.private_api import (
    TorchDispatchMode,
    storage_of,
    tree_leaves,
    tree_map,
)

# elements; a smaller tensor is created immediately, so that a constructor may read its values
SMALL = 4096


class RecordedOperation(NamedTuple):
    """An operation that was recorded."""

    operation: Any  # an operation of torch.ops.aten
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    result: Any  # meta tensors
    # the state of the default generator before the operation, if it draws
    generator: torch.Tensor | None
    written: set[int]  # the memory that it may have changed


class Deferred(TorchDispatchMode):
    """Within the `with` block, new host tensors with SMALL elements or more are meta tensors, which
    have no memory.

    An operation that needs to read more than one value raises RuntimeError or NotImplementedError,
    as with any meta tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[RecordedOperation] = []
        self._made = set[int]()  # memory that has a call
        # scratch memory for drawn numbers; freeing it each time would fragment the memory
        self._scratch = torch.empty(0)

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        is_new = not tensors and _is_large(operation, args, kwargs)
        if not is_new and not any(tensor.is_meta for tensor in tensors):
            return operation(*args, **kwargs)
        if operation is torch.ops.aten._local_scalar_dense.default:
            # for a loop that draws until all numbers are in range
            return self.value(tensors[0]).item()
        if operation._schema.is_mutable and not tensors[0].is_meta:
            raise NotImplementedError(f"{operation} writes to a tensor without memory")
        generator = None
        if torch.Tag.nondeterministic_seeded in operation.tags and kwargs.get("generator") is None:
            generator = torch.get_rng_state()
            self._draw(operation, args, kwargs)
        on_meta = tree_map(_to_meta, kwargs) | ({"device": torch.device("meta")} if is_new else {})
        result = operation(*tree_map(_to_meta, args), **on_meta)
        written = _memory((result, (args, kwargs) if operation._schema.is_mutable else ()))
        self._made |= written
        self._calls.append(
            RecordedOperation(
                operation, tree_map(_kept, (args, kwargs)), result, generator, written
            )
        )
        return result

    def __exit__(self, *error: Any) -> None:
        self._scratch = torch.empty(0)
        super().__exit__(*error)

    def _draw(self, operation: Any, args: Any, kwargs: Any) -> None:
        """Draws random numbers into memory with the tensors' layout, because their number depends
        on it."""
        first = next((x for x in args if isinstance(x, torch.Tensor)), None)

        def memory(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or not x.is_meta:
                return x
            if x is not first or not x.numel():
                return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
            extent = 1 + sum(
                (size - 1) * stride for size, stride in zip(x.size(), x.stride(), strict=True)
            )
            if len(self._scratch) < extent or self._scratch.dtype != x.dtype:
                self._scratch = torch.empty(extent, dtype=x.dtype)
            return self._scratch.as_strided(x.size(), x.stride())

        operation(*tree_map(memory, args), **tree_map(memory, kwargs))

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether value() can compute the tensor."""
        return _memory(tensor) <= self._made

    @torch.no_grad()
    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Computes a tensor that was created in the block, on the host. Needs memory for it and for
        the tensors that it depends on."""
        if not tensor.is_meta:
            return tensor.detach()
        memory: dict[int, torch.UntypedStorage] = {}
        before = torch.get_rng_state()
        for call in self._calls_for(tensor):
            if call.generator is not None:
                torch.set_rng_state(call.generator)
            args, kwargs = tree_map(lambda x: _real(x, memory), call.arguments)
            result = call.operation(*args, **kwargs)
            for meta, real in zip(tree_leaves(call.result), tree_leaves(result), strict=True):
                if isinstance(meta, torch.Tensor):
                    memory.setdefault(storage_of(meta), real.untyped_storage())
        torch.set_rng_state(before)
        computed: torch.Tensor = _real(tensor.detach(), memory)
        return computed

    def _calls_for(self, tensor: torch.Tensor) -> list[RecordedOperation]:
        """Calls that wrote the tensor, or one that it was computed from, in order."""
        needed = _memory(tensor)
        found = []
        for call in reversed(self._calls):
            if needed & call.written:
                needed |= _memory((call.arguments, call.result))
                found.append(call)
        return found[::-1]


def make_deferred(make: Callable[[], torch.nn.Module]) -> tuple[torch.nn.Module, Deferred | None]:
    """Returns the result of make(), and the object that can compute its large tensors.

    The object is None if the constructor reads values of large tensors; then the model is created
    with all of its memory.
    """
    before = torch.get_rng_state()
    deferred = Deferred()
    try:
        with _LooksReal(), deferred:
            model = make()
        if all(deferred.knows(tensor) for tensor in (*model.parameters(), *model.buffers())):
            return model, deferred
    except (
        RuntimeError,
        NotImplementedError,
    ):  # raised by an operation on a meta tensor; any other error is raised again later
        pass
    torch.set_rng_state(before)
    return make(), None


class _LooksReal(TorchFunctionMode):
    """Within the context, tensors do not report that they are meta tensors, which torch.nn.init
    would skip."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return False if function == _IS_META else function(*args, **(kwargs or {}))


_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


def _is_large(operation: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation creates a host tensor of SMALL elements or more, like torch.empty() and
    torch.randn()."""
    makes = any(argument.name == "device" for argument in operation._schema.arguments)
    on_host = torch.device(kwargs.get("device") or "cpu").type == "cpu"
    size = args[0] if args and isinstance(args[0], (list, tuple)) else ()
    return makes and on_host and torch.Size(size).numel() >= SMALL


def _memory(tree: Any) -> set[int]:
    return {storage_of(x) for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.is_meta}


def _to_meta(x: Any) -> Any:
    return x.to("meta") if isinstance(x, torch.Tensor) and not x.is_meta else x


def _kept(x: Any) -> Any:
    """Returns a copy of an argument for later, because the constructor may change a small
    tensor."""
    return (
        x.detach().clone()
        if isinstance(x, torch.Tensor) and not x.is_meta and x.numel() < SMALL
        else x
    )


def _real(x: Any, memory: dict[int, torch.UntypedStorage]) -> Any:
    if not isinstance(x, torch.Tensor) or not x.is_meta:
        return x
    return torch.empty(0, dtype=x.dtype).set_(
        memory[storage_of(x)], x.storage_offset(), x.size(), x.stride()
    )
