"""A plan as one JSON object: what `plan --json` writes. What is not known is null."""

from __future__ import annotations

import math
from typing import Any

from hvdtrain.cli.plan.forecast import BatchPhase, Forecast, Infeasible, memory
from hvdtrain.cli.plan.table import Plan, has_momentum_of_its_class
from hvdtrain.core.progress import Hyper
from hvdtrain.frameworks.build_rule import decay
from hvdtrain.optim.rule import is_excluded
from hvdtrain.tasks.task import Task


def to_json(plan: Plan) -> dict[str, Any]:
    """The data, the model, a forecast for each number of ranks, and the bytes of one rank."""
    config = plan.config
    excludes = config.optim.exclude == "norms_and_biases"
    return {
        "data": {
            "samples": plan.samples,
            **_sizes(plan.task),
            "from": plan.origin,
        },
        "model": {
            "name": config.model.name,
            "framework": config.framework,
            "precision": config.speed.precision,
            "parameters": sum(map(math.prod, plan.shapes.values())),
            "shapes": {name: list(shape) for name, shape in plan.shapes.items()},
            "not_decayed": [name for name, shape in plan.shapes.items() if excludes and is_excluded(shape)],
        },
        "forecasts": [_forecast(one) for one in plan.forecasts],
        "memory_bytes": memory(plan.shapes, plan.rule, config.speed.precision)._asdict(),
    }


def _forecast(one: Forecast | Infeasible) -> dict[str, Any]:
    """The forecast for one number of ranks: the job, or `impossible` with the error."""
    if isinstance(one, Infeasible):
        return {"ranks": one.ranks, "impossible": {"what": one.error.what, "where": one.error.where, "fix": one.error.fix}}
    warm = one.after_warmup()
    return {
        "ranks": one.ranks,
        "steps": one.steps,
        "epochs": one.epochs,
        "batches": [_batch(one, phase) for phase in one.batch_phases],
        "first_step": _hyper(one, one.hyper(0)),
        "after_warmup": None if warm is None else _hyper(one, warm),
        "last_step": _hyper(one, one.hyper(one.steps - 1)),
    }


def _batch(one: Forecast, phase: BatchPhase) -> dict[str, Any]:
    """Consecutive steps with one global batch."""
    return {
        "batch": phase.batch,
        "first_step": phase.first_step,
        "steps": phase.steps,
        "samples_per_rank": list(one.samples_per_rank(phase.batch)),
        "forward_passes": one.forward_passes(phase.batch),
    }


def _hyper(one: Forecast, hyper: Hyper) -> dict[str, Any]:
    momentum = None if has_momentum_of_its_class(one.config) else hyper.momentum
    return {"lr": hyper.lr, "momentum": momentum, "weight_decay": decay(one.config), "batch": hyper.batch}


def _sizes(task: Task) -> dict[str, Any]:
    """What models are built from, as JSON has it; of classes not also as outputs."""
    names = [name for name in task.sizes if name != "outputs" or "classes" not in task.sizes]
    return {name: list(size) if isinstance(size := task.sizes[name], tuple) else size for name in names}
