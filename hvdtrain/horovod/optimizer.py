"""DistributedOptimizer: an optimizer whose gradients, or steps with Adasum, are combined over ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from hvdtrain.horovod.call import Adasum, Average, synchronize
from hvdtrain.horovod.compression import Compression, Compressor
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.gradients import Gradients, GradientSteps, Names, load_in_place, named, parameter_groups
from hvdtrain.horovod.job import JOB
from hvdtrain.horovod.process_sets import ProcessSet, global_process_set
from hvdtrain.horovod.reductions import allreduce_async_

_WHERE = "hvd.DistributedOptimizer()"


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The optimizer, of a class below its own: backward begins to reduce each gradient, step() waits for them.

    named_parameters: model.named_parameters(). compression: of gradients on the wire.
    backward_passes_per_step: they are reduced in the last of so many. gradient_predivide_factor: with Average, gradients are divided by it
    before the sum, and the sum by size / factor. groups: a number of groups of gradients that are reduced as one, or lists of parameters;
    num_groups is its former name.
    sparse_as_dense: sparse gradients are reduced as dense ones. Its state and its groups are those of `optimizer`.

    synchronize() waits before step(): to clip gradients, say; step() goes inside skip_synchronize() then. With op=Adasum each rank makes
    its own step, and the changes of the weights are combined.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise BadCall("gradient_predivide_factor not supported with op != Average", _WHERE, "op=hvd.Average")
    if num_groups:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise BadCall("backward_passes_per_step must be > 0", _WHERE, "1 or more")
    if isinstance(optimizer, (GradientSteps, AdasumSteps)):
        raise BadCall("this optimizer is a DistributedOptimizer already", _WHERE, "wrap the optimizer of torch, once")
    names = named(optimizer, named_parameters)
    if op == Adasum and JOB.engine.size > 1:
        found = _below(optimizer, AdasumSteps)
        found.begin(names, compression, backward_passes_per_step, process_set)
        return found
    found = _below(optimizer, GradientSteps)
    factors = (1.0 / gradient_predivide_factor, gradient_predivide_factor)
    takes_part = bool(process_set.included()) and JOB.engine.size > 1
    together = parameter_groups(names, groups, process_set) if takes_part else []
    gradients = Gradients(names, together, compression, op, factors, sparse_as_dense, process_set)
    found.begin(gradients, backward_passes_per_step, takes_part)
    return found


def _below(optimizer: torch.optim.Optimizer, steps: type) -> Any:
    """This optimizer, of a class that has its class' name and the methods of `steps` before its own."""
    kind = type(optimizer)
    found: Any = object.__new__(type(kind.__name__, (steps, kind), {}))
    # A schedule that was made before has put the optimizer's own step() into its attributes, which would step without the other ranks.
    found.__dict__.update((name, value) for name, value in optimizer.__dict__.items() if name != "step")
    return found


class AdasumSteps:
    """The methods that DistributedOptimizer(op=Adasum) puts before those of an optimizer.

    Each rank makes its own step, and the changes of the weights are combined (Maleki et al. 2020, arXiv:2006.02924).
    """

    def begin(self, names: Names, compression: type[Compressor], passes: int, process_set: ProcessSet) -> None:
        self._names, self._compression, self._process_set = names, compression, process_set
        self._trained = [parameter for parameter in names if parameter.requires_grad]
        self.backward_passes_per_step = passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Gradients accumulate until step(), whatever their number."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Nothing: what is combined are the changes of the weights."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Loads a state as the optimizer's own method does."""
        base: Any = super()
        load: Callable[[], None] = partial(base.load_state_dict, *args, **kwargs)
        optimizer: Any = self
        load_in_place(optimizer, load)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's own, of which the changes on all ranks are combined."""
        starts = [parameter.detach().clone() for parameter in self._trained]
        base: Any = super()
        if closure is None:
            loss = base.step()
        else:
            with torch.enable_grad():
                loss = base.step(closure)
        if not self._process_set.included():
            return loss
        under_way = []
        for parameter, start in zip(self._trained, starts, strict=True):
            wire, ctx = self._compression.compress(parameter.detach() - start)
            name = self._names[parameter]
            under_way.append((allreduce_async_(wire, None, name, Adasum, process_set=self._process_set), wire, ctx))
        for parameter, start, (handle, wire, ctx) in zip(self._trained, starts, under_way, strict=True):
            synchronize(handle)
            parameter.copy_(start + self._compression.decompress(wire, ctx))
        return loss
