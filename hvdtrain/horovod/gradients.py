"""Gradients on their way: started by hooks of backward, waited for by step()."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from hvdtrain.horovod.compression import Compressor
from hvdtrain.horovod.handles import synchronize
from hvdtrain.horovod.parameter_groups import Names
from hvdtrain.horovod.process_sets import ProcessSet
from hvdtrain.horovod.reductions import allreduce_async_, grouped_allreduce_async_, sparse_allreduce_async

Group = tuple[torch.Tensor, ...]  # parameters that are reduced as one


class UnderWay(NamedTuple):
    """The reduction of a group."""

    handle: int | Callable[[], torch.Tensor]  # what waits for a sparse one
    ctxs: tuple[Any, ...]  # of the compression
    wires: tuple[torch.Tensor, ...]


class Gradients:
    """Of an optimizer's parameters: starts their reductions, and takes the results."""

    def __init__(
        self,
        names: Names,
        groups: Sequence[Group],
        compression: type[Compressor],
        op: int,
        factors: tuple[float, float],
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        """groups: of all parameters that are trained, or none. factors: prescale, postscale of an average."""
        self._names, self._compression, self._op, self._factors = names, compression, op, factors
        self._sparse_as_dense, self._process_set = sparse_as_dense, process_set
        self.trained = [parameter for parameter in names if parameter.requires_grad]
        self.groups: list[Group] = list(groups) or [(parameter,) for parameter in self.trained]
        self._is_grouped = bool(groups)
        self.group_of = {parameter: group for group in self.groups for parameter in group}
        self.under_way: dict[Group, UnderWay] = {}

    def start(self, group: Group) -> None:
        """A gradient that was not computed counts as zeros: another rank may have computed it."""
        for parameter in group:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        (first, *_), name = group, self._names[group[0]]
        is_sparse = first.grad is not None and first.grad.is_sparse
        if is_sparse and not self._sparse_as_dense and not self._is_grouped:
            assert first.grad is not None
            self.under_way[group] = UnderWay(sparse_allreduce_async(first.grad, name, self._op, self._process_set), (), ())
            return
        compressed = [self._compression.compress(_dense(parameter)) for parameter in group]
        wires, ctxs = tuple(wire for wire, _ in compressed), tuple(ctx for _, ctx in compressed)
        before, after = self._factors
        if self._is_grouped:
            handle = grouped_allreduce_async_(wires, None, name, self._op, before, after, self._process_set)
        else:
            handle = allreduce_async_(wires[0], None, name, self._op, before, after, self._process_set)
        self.under_way[group] = UnderWay(handle, ctxs, wires)

    def finish(self) -> None:
        """The reductions that are under way, in the order in which they were started."""
        for group, found in self.under_way.items():
            if not isinstance(found.handle, int):
                group[0].grad = found.handle()
                continue
            synchronize(found.handle)
            for parameter, wire, ctx in zip(group, found.wires, found.ctxs, strict=True):
                self._take(parameter, wire, ctx)
        self.under_way.clear()

    def _take(self, parameter: torch.Tensor, wire: torch.Tensor, ctx: Any) -> None:
        grad = parameter.grad
        assert grad is not None, self._names[parameter]
        if wire is grad:
            return
        reduced = self._compression.decompress(wire, ctx)
        if grad.is_sparse:
            parameter.grad = reduced.to_sparse()
        else:
            grad.copy_(reduced)


def _dense(parameter: torch.Tensor) -> torch.Tensor:
    grad = parameter.grad
    assert grad is not None
    return grad.to_dense() if grad.is_sparse else grad


class GradientSteps:
    """The methods that DistributedOptimizer() puts before those of an optimizer."""

    def begin(self, gradients: Gradients, passes: int, takes_part: bool) -> None:
        """takes_part: whether there are other ranks to reduce with."""
        self._gradients, self._takes_part = gradients, takes_part
        self._synchronized, self._should_synchronize = False, True
        self._passes_left: dict[torch.Tensor, int] = {}
        self.set_backward_passes_per_step(passes)
        self._hooks = [self._hook(parameter) for parameter in gradients.trained] if takes_part else []

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From the next backward pass on."""
        self.backward_passes_per_step = passes
        self._passes_left = dict.fromkeys(self._gradients.trained, passes)

    def _hook(self, parameter: torch.Tensor) -> Any:
        return parameter.register_post_accumulate_grad_hook(self._after_backward)

    def _after_backward(self, parameter: torch.Tensor) -> None:
        """Of a parameter's gradient."""
        gradients, group = self._gradients, self._gradients.group_of[parameter]
        if self._passes_left[parameter] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                "Increase backward_passes_per_step to accumulate gradients locally."
            )
        self._passes_left[parameter] -= 1
        if all(self._passes_left[other] == 0 for other in group):
            gradients.start(group)

    def synchronize(self) -> None:
        """Waits until every gradient is reduced."""
        if self._takes_part:
            for group in self._gradients.groups:
                if group not in self._gradients.under_way:
                    self._gradients.start(group)
            self._gradients.finish()
            self._passes_left = dict.fromkeys(self._gradients.trained, self.backward_passes_per_step)
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """step() inside of it does not synchronize, because synchronize() was called."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As the optimizer's own. A closure's gradients are reduced each time it was called."""
        base: Any = super()
        if not self._should_synchronize:
            self._synchronized = False
            return base.step(closure)
        if self._synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "This can cause training slowdown.",
                stacklevel=2,
            )
        if closure is None:
            self.synchronize()
            self._synchronized = False
            return base.step()
        if self._gradients.under_way:
            self.synchronize()
        found = base.step(lambda: self._computed(closure))
        self._synchronized = False
        return found

    def _computed(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = closure()
        self.synchronize()
        return loss

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's own. Raises AssertionError while gradients are under way."""
        if self._gradients.under_way:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
                "This is prohibited as it can cause a race condition."
            )
        base: Any = super()
        base.zero_grad(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's own; a step that was begun is forgotten."""
        self._gradients.finish()
        self._synchronized, self._should_synchronize = False, True
        self.set_backward_passes_per_step(self.backward_passes_per_step)
        base: Any = super()
        base.load_state_dict(*args, **kwargs)
