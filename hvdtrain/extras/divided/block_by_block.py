"""BlockByBlock: a large model before it is partitioned over ranks. A forward pass has the weights
of one block at a time, and each rank then takes its part of them.

The values are bit-identical to a model that is created as a whole (deferred.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from hvdtrain.comm.communicator import Communicator
from hvdtrain.core.arrays import WHOLE, Cut
from hvdtrain.extras.divided.blocks import units
from hvdtrain.extras.divided.deferred import Deferred, make_deferred
from hvdtrain.extras.divided.same_weights import as_on_rank_0
from hvdtrain.frameworks.torch.arrangement import bytes_of
from hvdtrain.frameworks.torch.foreign.counted import counted
from hvdtrain.frameworks.torch.private_api import TorchDispatchMode, tree_leaves

# a smaller model is created as a whole, so that its weights are drawn only once and not for each
# pass
WHOLE_BYTES = 2**28


class _NotSmall(BaseException):
    """The model has WHOLE_BYTES or more."""


class ModuleBefore(NamedTuple):
    """A module and its parameters before these were given memory."""

    module: nn.Module
    parameters: dict[str, nn.Parameter | None]


class BlockByBlock:
    """A model whose parameters have memory only when a pass, or the rank's part, needs it. Its
    buffers always have memory."""

    def __init__(
        self,
        model: nn.Module,
        deferred: Deferred | None,
        device: torch.device,
        dtype: torch.dtype,
        world: Communicator,
    ) -> None:
        """deferred: computes the values of meta tensors; None: all values are in host memory."""
        self.model = model
        self._deferred = deferred
        self._device = device
        self._dtype = dtype
        self._world = world
        self._cut_of: dict[nn.Parameter, tuple[nn.Parameter, Cut]] = {}  # part -> whole, cut
        self._is_agreed = False
        self.is_giving = False  # memory
        self._in_memory = set[nn.Module]()
        self._hooks: list[Any] = []
        self._rest: list[ModuleBefore] = []
        buffers: dict[int, torch.Tensor] = {}  # one that two modules have stays one
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    if id(buffer) not in buffers:
                        buffers[id(buffer)] = self._numbers(buffer).to(device)
                    module._buffers[name] = buffers[id(buffer)]
            # for example, a mask that is not registered
            for name, tensor in list(vars(module).items()):
                if isinstance(tensor, torch.Tensor) and tensor.is_meta and deferred is not None:
                    setattr(module, name, deferred.value(tensor))
        self.begin()

    def begin(self, *, agreed: bool = False) -> None:
        """From now on, a pass has the weights of one block at a time, and of the rest of the model.
        agreed: use rank 0's values; then each pass is a collective."""
        self.end()
        self._is_agreed = agreed
        blocks = units(self.model)
        inside = {module for block in blocks for module in block.modules()}
        self._rest = self._give([m for m in self.model.modules() if m not in inside])
        for block in blocks:
            under_way: list[list[ModuleBefore]] = []  # the state of each call of this block

            def give(
                block: nn.Module, inputs: Any, calls: list[list[ModuleBefore]] = under_way
            ) -> None:
                calls.append(self._give(block.modules()))

            def take(
                block: nn.Module,
                inputs: Any,
                outputs: Any,
                calls: list[list[ModuleBefore]] = under_way,
            ) -> None:
                self._take(calls.pop())

            self._hooks += [
                block.register_forward_pre_hook(give, prepend=True),
                block.register_forward_hook(take, always_call=True),
            ]

    def end(self) -> None:
        """From now on, no parameter has memory."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._take(self._rest)
        self._rest = []

    @contextlib.contextmanager
    def in_memory(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Gives memory to the parameters of these modules and their submodules within the
        context."""
        given = self._give([each for module in modules for each in module.modules()])
        try:
            yield
        finally:
            self._take(given)

    def cut(self, cut_of: dict[nn.Parameter, tuple[nn.Parameter, Cut]]) -> None:
        """Called after layers were partitioned, between end() and begin(): from now on a part has
        its values of the whole. cut_of: part -> whole, cut."""
        self._cut_of = cut_of

    def place(
        self, is_here: Callable[[nn.Parameter], bool] = lambda p: True
    ) -> dict[nn.Parameter, nn.Parameter]:
        """Allocates each parameter that this rank has, with rank 0's values; others only keep their
        shapes. Returns the parameter that each became. A collective; the last call."""
        self.end()
        self._is_agreed = True
        placed: dict[nn.Parameter, nn.Parameter] = {}
        self._give(self.model.modules(), placed, is_here)
        for buffer in self.model.buffers():
            found = as_on_rank_0(buffer, self._world)
            if found is not buffer:
                buffer.copy_(found)
        return placed

    def _give(
        self,
        modules: Iterable[nn.Module],
        placed: dict[nn.Parameter, nn.Parameter] | None = None,
        is_here: Callable[[nn.Parameter], bool] = lambda p: True,
    ) -> list[ModuleBefore]:
        """Gives memory to the parameters of these modules; returns the arguments for _take()."""
        placed = {} if placed is None else placed  # a tied parameter stays one
        given = []
        self.is_giving = True
        for module in modules:
            if module in self._in_memory:
                continue
            self._in_memory.add(module)
            given.append(ModuleBefore(module, dict(module._parameters)))
            for name, p in module._parameters.items():
                if p is not None:
                    if p not in placed:
                        placed[p] = self._placed(p, is_here(p))
                    module._parameters[name] = placed[p]
        self.is_giving = False
        return given

    def _take(self, given: list[ModuleBefore]) -> None:
        for module, parameters in given:
            self._in_memory.discard(module)
            module._parameters.update(parameters)

    @torch.no_grad()
    def _placed(self, p: nn.Parameter, is_here: bool) -> nn.Parameter:
        whole, cut = self._cut_of.get(p, (p, WHOLE))
        numbers = self._numbers(whole, is_used=is_here)
        if not is_here:  # the shape, without its memory
            tensor = torch.zeros((), dtype=numbers.dtype, device=self._device).expand(p.shape)
        elif cut == WHOLE:
            tensor = numbers.to(self._device)
        else:
            tensor = cut.take(numbers).to(self._device, copy=True)
        new = nn.Parameter(tensor, p.requires_grad)
        vars(new).update(vars(p))  # attributes that a script has set
        return new

    def _numbers(self, tensor: torch.Tensor, *, is_used: bool = True) -> torch.Tensor:
        """Returns a tensor's values on the host. is_used: whether this rank needs them."""
        kind = self._dtype if tensor.is_floating_point() else tensor.dtype
        is_used = is_used or (self._is_agreed and self._world.rank == 0)
        if not is_used:
            numbers = torch.empty(tensor.shape, dtype=kind, device="meta")
        elif self._deferred is None:
            numbers = tensor.detach().to(kind).contiguous()
        else:
            numbers = self._deferred.value(tensor).to(kind).contiguous()
        return as_on_rank_0(numbers, self._world, is_used=is_used) if self._is_agreed else numbers


def start_bytes_of(model: nn.Module) -> int:
    """Returns the most bytes that a model's weights and buffers take on a rank before they are
    partitioned."""
    whole = bytes_of(model)
    blocks = list(map(bytes_of, units(model)))
    if whole < WHOLE_BYTES or not blocks:
        return whole
    return whole - sum(blocks) + max(blocks)


class _RefusesMeta(TorchDispatchMode):
    """Within the context, an operation on a tensor without memory raises RuntimeError. Otherwise a
    CPU matrix product with such a tensor would return uninitialized memory (torch 2.13)."""

    def __init__(self, blocks: BlockByBlock) -> None:
        super().__init__()
        self._blocks = blocks

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not self._blocks.is_giving and any(
            isinstance(x, torch.Tensor) and x.is_meta for x in tree_leaves((args, kwargs))
        ):
            raise RuntimeError(f"{operation} on a tensor without memory")
        return operation(*args, **(kwargs or {}))


def make_block_by_block(
    make: Callable[[], nn.Module],
    device: torch.device,
    dtype: torch.dtype,
    world: Communicator,
    runs: Callable[[nn.Module], None],
) -> BlockByBlock | nn.Module:
    """Returns the result of make(), block by block if it is large and has blocks; else the model,
    with all of its memory on the host.

    runs: makes a forward pass. A model that reads the weights of a block without calling it is
    created as a whole.
    """
    before = torch.get_rng_state()
    try:
        with counted(WHOLE_BYTES, error=_NotSmall):
            return make()
    except _NotSmall:
        torch.set_rng_state(before)
    model, deferred = make_deferred(make)
    after = torch.get_rng_state()
    if units(model) and (deferred is not None or device.type != "cpu"):
        found = BlockByBlock(model, deferred, device, dtype, world)
        # the error is raised again if the model itself is wrong
        with contextlib.suppress(Exception):
            with _RefusesMeta(found):
                runs(model)
            return found
    if deferred is None:
        return model
    torch.set_rng_state(before)
    model = make()
    torch.set_rng_state(after)
    return model
