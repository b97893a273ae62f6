"""The names of an optimizer's parameters, and which gradients are reduced as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch

from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.objects import broadcast_object
from hvdtrain.horovod.process_sets import ProcessSet

Names = dict[torch.Tensor, str]
_WHERE = "hvd.DistributedOptimizer()"


def named(optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None) -> Names:
    """The name of each parameter of the optimizer. Raises ValueError where they are not named one by one."""
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        groups = enumerate(optimizer.param_groups)
        return {parameter: f"allreduce.noname.{i}.{j}" for i, group in groups for j, parameter in enumerate(group["params"])}
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in pairs):
        what = "named_parameters should be a sequence of tuples (name, parameter)"
        raise BadCall(what, _WHERE, "model.named_parameters()")
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        what = f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}"
        raise BadCall(what, _WHERE, "model.named_parameters()")
    names = {parameter: name for name, parameter in pairs}
    without = [tuple(parameter.shape) for parameter in own if parameter not in names]
    if without:
        what = f"named_parameters was specified, but one or more model parameters were not named: those of shapes {without[:8]}"
        raise BadCall(what, _WHERE, "the named_parameters() of every module that the optimizer updates")
    return {parameter: names[parameter] for parameter in own}


def load_in_place(optimizer: torch.optim.Optimizer, load: Callable[[], None]) -> None:
    """Calls load(), which makes new groups for the optimizer, and puts them into the list that it has.

    The optimizer that was wrapped has the same list, and by it a schedule that was made of it before.
    """
    groups = optimizer.param_groups
    load()
    groups[:] = list(optimizer.param_groups)
    optimizer.param_groups = groups


def parameter_groups(
    names: Names, groups: int | Sequence[Sequence[torch.Tensor]] | None, process_set: ProcessSet
) -> list[tuple[torch.Tensor, ...]]:
    """The groups, which are the same on every rank; none where `groups` is None or 0. Raises ValueError for what are no groups."""
    if groups is None or groups == 0:
        return []
    trained = [parameter for parameter in names if parameter.requires_grad]
    order = broadcast_object([names[parameter] for parameter in trained], (process_set.ranks or [0])[0], None, process_set)
    strange = [names[parameter] for parameter in trained if names[parameter] not in order] or ([] if len(order) == len(trained) else order)
    if strange:
        what = f"ranks do not train the same parameters: {len(trained)} here, {len(order)} on the first rank; {', '.join(strange[:3])}"
        raise BadCall(what, _WHERE, "the same model, with the same requires_grad, on every rank")
    trained.sort(key=lambda parameter: order.index(names[parameter]))
    if isinstance(groups, int):
        if groups < 0:
            raise BadCall("groups should be a non-negative integer or a list of lists of torch.Tensor", _WHERE, "groups=4")
        least, more = divmod(len(trained), groups)
        ends = [least * (i + 1) + min(i + 1, more) for i in range(groups)]
        return [tuple(trained[start:end]) for start, end in zip([0, *ends], ends, strict=False) if end > start]
    given = [parameter for group in groups for parameter in group]
    if any(not isinstance(parameter, torch.Tensor) for parameter in given):
        raise BadCall("groups must consist of torch.Tensor", _WHERE, "lists of parameters")
    if len(set(given)) < len(given):
        raise BadCall("A parameter can only appear once in groups", _WHERE, "lists without a common parameter")
    known = set(trained)
    found = [tuple(parameter for parameter in group if parameter in known) for group in groups]
    return [group for group in found if group] + [(parameter,) for parameter in trained if parameter not in set(given)]
