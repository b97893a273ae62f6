"""Steps of Adasum: each rank makes its own, and the changes of the weights are combined (Maleki et al. 2020, arXiv:2006.02924)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from hvdtrain.horovod.compression import Compressor
from hvdtrain.horovod.handles import synchronize
from hvdtrain.horovod.ops import Adasum
from hvdtrain.horovod.parameter_groups import Names, load_in_place
from hvdtrain.horovod.process_sets import ProcessSet
from hvdtrain.horovod.reductions import allreduce_async_


class AdasumSteps:
    """The methods that DistributedOptimizer(op=Adasum) puts before those of an optimizer."""

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
