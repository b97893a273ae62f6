"""DistributedOptimizer: combines gradients over ranks, or steps with Adasum. Hooks of backward
start reductions, and step() waits for them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from hvdtrain.horovod.basics import ProcessSet, global_process_set
from hvdtrain.horovod.call import (
    Adasum,
    Average,
    CollectiveCall,
    Compression,
    Compressor,
    synchronize,
)
from hvdtrain.horovod.collectives import sparse_allreduce_async
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.job import JOB
from hvdtrain.horovod.objects import broadcast_object
from hvdtrain.horovod.reductions import allreduce_async_

Names = dict[torch.Tensor, str]
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
    """Returns the optimizer, as a subclass of its class: backward starts to reduce each gradient,
    and step() waits for them.

    named_parameters: model.named_parameters(). compression: of gradients on the wire.
    backward_passes_per_step: they are reduced in the last of this many passes.
    gradient_predivide_factor: with Average, gradients are divided by it before the sum, and the sum
    by size / factor. groups: the number of groups of gradients that are reduced together, or lists
    of parameters; num_groups is the former name. sparse_as_dense: sparse gradients are reduced as
    dense ones. It shares its state and groups with `optimizer`.

    To clip gradients, call synchronize() first and then step() inside skip_synchronize(). With
    op=Adasum each rank takes its own step, and the changes of the weights are combined.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise BadCall(
            "gradient_predivide_factor not supported with op != Average", _WHERE, "op=hvd.Average"
        )
    if num_groups:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=2
        )
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise BadCall("backward_passes_per_step must be > 0", _WHERE, "1 or more")
    if isinstance(optimizer, (GradientSteps, AdasumSteps)):
        raise BadCall(
            "this optimizer is already a DistributedOptimizer",
            _WHERE,
            "wrap the torch optimizer once",
        )
    names = named(optimizer, named_parameters)
    if op == Adasum and JOB.engine.size > 1:
        distributed = _below(optimizer, AdasumSteps)
        distributed.begin(names, compression, backward_passes_per_step, process_set)
        return distributed
    distributed = _below(optimizer, GradientSteps)
    factors = (1.0 / gradient_predivide_factor, gradient_predivide_factor)
    takes_part = bool(process_set.included()) and JOB.engine.size > 1
    together = parameter_groups(names, groups, process_set) if takes_part else []
    gradients = Gradients(names, together, compression, op, factors, sparse_as_dense, process_set)
    distributed.begin(gradients, backward_passes_per_step, takes_part)
    return distributed


def _below(optimizer: torch.optim.Optimizer, steps: type) -> Any:
    """Changes this optimizer's class to a subclass with the same name and the methods of
    `steps`."""
    kind = type(optimizer)
    wrapped: Any = object.__new__(type(kind.__name__, (steps, kind), {}))
    # A schedule that was created before has stored the optimizer's step() in its attributes, which
    # would step without the other ranks.
    wrapped.__dict__.update(
        (name, value) for name, value in optimizer.__dict__.items() if name != "step"
    )
    return wrapped


class ReductionGroup:
    """Parameters that are reduced as one."""

    def __init__(self, parameters: Sequence[torch.Tensor], name: str) -> None:
        self.parameters = tuple(parameters)
        self.name = name
        self.passes_left: list[int] = []  # passes of each parameter until it is reduced


class PendingReduction(NamedTuple):
    """The pending reduction of a group."""

    handle: int | Callable[[], torch.Tensor]  # for a sparse gradient, a function that waits
    ctxs: Sequence[Any]  # contexts of the compression
    wires: Sequence[torch.Tensor]
    job: int  # JOB.first_handle then


class Gradients:
    """Gradients of an optimizer's parameters: starts their reductions, and takes the results."""

    def __init__(
        self,
        names: Names,
        groups: Sequence[Sequence[torch.Tensor]],
        compression: type[Compressor],
        op: int,
        factors: tuple[float, float],
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        """groups: groups of all trained parameters, or none. factors: prescale and postscale of an
        average."""
        self.op = op
        self.process_set = process_set
        self._compression = compression
        self._factors = factors
        self._sparse_as_dense = sparse_as_dense
        trained = [(parameter,) for parameter in names if parameter.requires_grad]
        self.groups = [
            ReductionGroup(parameters, names[parameters[0]]) for parameters in groups or trained
        ]
        self._is_grouped = bool(groups)
        self.under_way: dict[ReductionGroup, PendingReduction] = {}

    def start(self, group: ReductionGroup) -> None:
        """Starts the reduction of a group. A gradient that was not computed counts as zeros:
        another rank may have computed it."""
        grads = [_gradient(parameter) for parameter in group.parameters]
        if grads[0].is_sparse and not self._sparse_as_dense and not self._is_grouped:
            self.under_way[group] = PendingReduction(
                sparse_allreduce_async(grads[0], group.name, self.op, self.process_set),
                (),
                (),
                JOB.first_handle,
            )
            return
        compressed = [
            self._compression.compress(grad.to_dense() if grad.is_sparse else grad)
            for grad in grads
        ]
        wires = [wire for wire, _ in compressed]
        ctxs = [ctx for _, ctx in compressed]
        given = wires if self._is_grouped else wires[0]
        call = CollectiveCall(
            "allreduce",
            given,
            group.name,
            self.process_set,
            grouped=self._is_grouped,
            in_place=True,
        )
        self.under_way[group] = PendingReduction(
            call.start_reduction(self.op, *self._factors), ctxs, wires, JOB.first_handle
        )

    def finish(self) -> None:
        """Waits for pending reductions, in the order in which they were started."""
        under_way = self.under_way
        self.under_way = {}
        for group, found in under_way.items():
            if not isinstance(found.handle, int):
                group.parameters[0].grad = found.handle()
                continue
            synchronize(found.handle)
            for parameter, wire, ctx in zip(group.parameters, found.wires, found.ctxs, strict=True):
                self._take(parameter, wire, ctx)

    def forget(self) -> None:
        """Drops pending reductions. If their job still runs, it waits for them, to free their
        names."""
        under_way = self.under_way
        self.under_way = {}
        if any(found.job != JOB.first_handle for found in under_way.values()):
            return
        for found in under_way.values():
            if isinstance(found.handle, int):
                synchronize(found.handle)
            else:
                found.handle()

    def _take(self, parameter: torch.Tensor, wire: torch.Tensor, ctx: Any) -> None:
        grad = parameter.grad
        assert grad is not None, "it was reduced"
        if wire is grad:
            return
        reduced = self._compression.decompress(wire, ctx)
        if grad.is_sparse:
            parameter.grad = reduced.to_sparse()
        else:
            grad.copy_(reduced)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class GradientSteps:
    """The methods of an optimizer that DistributedOptimizer() overrides."""

    def begin(self, gradients: Gradients, passes: int, takes_part: bool) -> None:
        """takes_part: whether there are other ranks to reduce with."""
        self._gradients = gradients
        self._takes_part = takes_part
        self._synchronized = False
        self._should_synchronize = True
        self.set_backward_passes_per_step(passes)
        if takes_part:
            for group in gradients.groups:
                for place, parameter in enumerate(group.parameters):
                    parameter.register_post_accumulate_grad_hook(
                        partial(self._after_backward, group, place)
                    )

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets the number of passes, from the next backward pass on."""
        self.backward_passes_per_step = passes
        for group in self._gradients.groups:
            group.passes_left = [passes] * len(group.parameters)

    def _after_backward(self, group: ReductionGroup, place: int, _: torch.Tensor) -> None:
        """Takes the gradient of a parameter of the group."""
        if group.passes_left[place] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to "
                "step(). "
                "Increase backward_passes_per_step to accumulate gradients locally."
            )
        group.passes_left[place] -= 1
        if not any(group.passes_left):
            self._gradients.start(group)

    def synchronize(self) -> None:
        """Waits until every gradient is reduced."""
        if self._takes_part:
            for group in self._gradients.groups:
                if group not in self._gradients.under_way:
                    self._gradients.start(group)
            self._gradients.finish()
            self.set_backward_passes_per_step(self.backward_passes_per_step)
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Makes step() inside of it not synchronize, because synchronize() was called."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs a step of the optimizer. A closure's gradients are reduced after each call."""
        base: Any = super()
        if not self._should_synchronize:
            self._synchronized = False
            return base.step(closure)
        if self._synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(). "
                "This can cause training slowdown.",
                stacklevel=2,
            )
        if closure is None:
            self.synchronize()
            self._synchronized = False
            return base.step()
        if self._gradients.under_way:
            self.synchronize()
        loss = base.step(lambda: self._computed(closure))
        self._synchronized = False
        return loss

    def _computed(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = closure()
        self.synchronize()
        return (
            self._over_ranks(loss)
            if self._takes_part and isinstance(self, torch.optim.LBFGS)
            else loss
        )

    def _over_ranks(self, loss: Any) -> Any:
        """Returns the loss over all ranks, because LBFGS uses it to choose how often it calls the
        closure, which must be equal on all ranks."""
        value = (
            loss.detach()
            if isinstance(loss, torch.Tensor)
            else torch.tensor(float(loss), dtype=torch.float64, device="cpu")
        )
        call = CollectiveCall("allreduce", value, "loss.of.closure", self._gradients.process_set)
        return synchronize(call.start_reduction(self._gradients.op, 1.0, 1.0))

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears gradients like the optimizer's method. Raises AssertionError between backward and
        step()."""
        passes = self.backward_passes_per_step
        if self._gradients.under_way or any(
            left < passes for group in self._gradients.groups for left in group.passes_left
        ):
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(). "
                "This is prohibited as it can cause a race condition."
            )
        base: Any = super()
        base.zero_grad(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Loads a state like the optimizer's method; discards a step that was begun."""
        self._gradients.forget()
        self._synchronized = False
        self._should_synchronize = True
        self.set_backward_passes_per_step(self.backward_passes_per_step)
        base: Any = super()
        load: Callable[[], None] = partial(base.load_state_dict, *args, **kwargs)
        optimizer: Any = self
        load_in_place(optimizer, load)


def named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> Names:
    """Returns the name of each parameter of the optimizer. Raises ValueError unless each has a
    unique name."""
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        groups = enumerate(optimizer.param_groups)
        return {
            parameter: f"allreduce.noname.{i}.{j}"
            for i, group in groups
            for j, parameter in enumerate(group["params"])
        }
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in pairs):
        what = "named_parameters should be a sequence of tuples (name, parameter)"
        raise BadCall(what, _WHERE, "model.named_parameters()")
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        what = (
            "Parameter names in named_parameters must be unique. Found duplicates: "
            f"{', '.join(twice)}"
        )
        raise BadCall(what, _WHERE, "model.named_parameters()")
    names = {parameter: name for name, parameter in pairs}
    without = [tuple(parameter.shape) for parameter in own if parameter not in names]
    if without:
        what = (
            "named_parameters was specified, but one or more model parameters were not named: "
            f"with shapes {without[:8]}"
        )
        raise BadCall(
            what, _WHERE, "the named_parameters() of every module that the optimizer updates"
        )
    return {parameter: names[parameter] for parameter in own}


def parameter_groups(
    names: Names, groups: int | Sequence[Sequence[torch.Tensor]] | None, process_set: ProcessSet
) -> list[tuple[torch.Tensor, ...]]:
    """Returns the groups, which are the same on every rank; none if `groups` is None or 0. Raises
    ValueError for anything but groups."""
    if groups is None or groups == 0:
        return []
    trained = [parameter for parameter in names if parameter.requires_grad]
    order = broadcast_object(
        [names[parameter] for parameter in trained],
        (process_set.ranks or [0])[0],
        None,
        process_set,
    )
    strange = [names[parameter] for parameter in trained if names[parameter] not in order] or (
        [] if len(order) == len(trained) else order
    )
    if strange:
        what = (
            f"ranks do not train the same parameters: {len(trained)} here, {len(order)} on the "
            f"first rank; {', '.join(strange[:3])}"
        )
        raise BadCall(what, _WHERE, "the same model, with the same requires_grad, on every rank")
    trained.sort(key=lambda parameter: order.index(names[parameter]))
    if isinstance(groups, int):
        if groups < 0:
            raise BadCall(
                "groups should be a non-negative integer or a list of lists of torch.Tensor",
                _WHERE,
                "groups=4",
            )
        least, more = divmod(len(trained), groups)
        ends = [least * (i + 1) + min(i + 1, more) for i in range(groups)]
        return [
            tuple(trained[start:end])
            for start, end in zip([0, *ends], ends, strict=False)
            if end > start
        ]
    given = [parameter for group in groups for parameter in group]
    if any(not isinstance(parameter, torch.Tensor) for parameter in given):
        raise BadCall("groups must consist of torch.Tensor", _WHERE, "lists of parameters")
    if len(set(given)) < len(given):
        raise BadCall(
            "A parameter can only appear once in groups", _WHERE, "lists without a common parameter"
        )
    known = set(trained)
    found = [tuple(parameter for parameter in group if parameter in known) for group in groups]
    return [group for group in found if group] + [
        (parameter,) for parameter in trained if parameter not in set(given)
    ]


def load_in_place(optimizer: torch.optim.Optimizer, load: Callable[[], None]) -> None:
    """Calls load(), which creates new groups for the optimizer, and puts them into its existing
    list.

    The wrapped optimizer, and schedules created from it before, share that list.
    """
    groups = optimizer.param_groups
    load()
    groups[:] = list(optimizer.param_groups)
    optimizer.param_groups = groups


class AdasumSteps:
    """The methods of an optimizer that DistributedOptimizer(op=Adasum) overrides.

    Each rank takes its own step, and the changes of the weights are combined (Maleki et al. 2020,
    arXiv:2006.02924).
    """

    def begin(
        self, names: Names, compression: type[Compressor], passes: int, process_set: ProcessSet
    ) -> None:
        self._names = names
        self._compression = compression
        self._process_set = process_set
        self._trained = [parameter for parameter in names if parameter.requires_grad]
        self.backward_passes_per_step = passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Does nothing: gradients accumulate until step(), however many there are."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Does nothing: changes of the weights are combined, not gradients."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        raise AssertionError(
            "Skipping synchronization is not supported when using Adasum optimizer."
        )

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Loads a state like the optimizer's method."""
        base: Any = super()
        load: Callable[[], None] = partial(base.load_state_dict, *args, **kwargs)
        optimizer: Any = self
        load_in_place(optimizer, load)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs the optimizer's local step and combines the changes of all ranks."""
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
            under_way.append(
                (
                    allreduce_async_(wire, None, name, Adasum, process_set=self._process_set),
                    wire,
                    ctx,
                )
            )
        for parameter, start, (handle, wire, ctx) in zip(
            self._trained, starts, under_way, strict=True
        ):
            synchronize(handle)
            parameter.copy_(start + self._compression.decompress(wire, ctx))
        return loss
