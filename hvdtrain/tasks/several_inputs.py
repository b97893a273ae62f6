"""Tasks whose model is called with several fields: their facts in a checkpoint. An extra has the
tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hvdtrain.core.extras import implementing_module
from hvdtrain.data.field import field_of_facts
from hvdtrain.data.source import Source
from hvdtrain.tasks.task import Task
from hvdtrain.tasks.transform import Transform, Transforms, check_stats

INPUTS = "data.inputs"  # the key that the extra implements


def restore_inputs(facts: Mapping[str, Any], restore: Callable[[dict[str, Any]], Task]) -> Task:
    """Rebuilds a task from Task.facts(), with several inputs if the facts contain them. Raises what
    restore() raises."""
    if not isinstance(facts, Mapping):
        raise TypeError("no facts of a task")
    one = {name: value for name, value in facts.items() if name != "inputs"}
    task = restore(one)
    if "inputs" not in facts:
        return task
    found: Task = implementing_module(INPUTS).with_inputs(task, transforms_of_facts(facts))
    return found


def with_several_inputs(
    build: Callable[[Source], Task], source: Source, facts: Mapping[str, Any]
) -> Task:
    """Builds the task for samples of a checkpoint's model, whose inputs are transformed as in
    training. build: builds the task of a source with one x.

    Raises what transforms_of_facts() raises.
    """
    transforms = transforms_of_facts(facts)
    found: Task = implementing_module(INPUTS).around(build, source, transforms)
    return found


def transforms_of_facts(facts: Mapping[str, Any]) -> Transforms:
    """Returns the transforms of the inputs, from SeveralInputs.facts(). Raises KeyError, TypeError
    or ValueError if the facts are invalid."""
    found = {}
    for name, dtype, shape, mean, std, *padding in facts["inputs"]:
        x = field_of_facts([dtype, shape, 0, *padding])
        stats = (np.array(mean, np.float64), np.array(std, np.float64))
        if not f"{name}".isidentifier() or not all(
            type(size) is int and size >= 1 for size in x.shape
        ):
            raise ValueError("impossible inputs")
        check_stats(x, *stats)
        found[name] = Transform(x, *stats)
    if not found:
        raise ValueError("no inputs")
    return Transforms(found)
