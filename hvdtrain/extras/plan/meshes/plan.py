"""plan --parallel and plan --pipeline: their options, and the choice between them."""

from __future__ import annotations

import argparse
import math
import sys
import time

from hvdtrain.cli.output import print_result
from hvdtrain.config.schema import Config, known_keys
from hvdtrain.errors import UserError
from hvdtrain.extras.plan.forecast.data import training_data
from hvdtrain.extras.plan.forecast.memory import read_size
from hvdtrain.extras.plan.meshes.machine import add_options as add_machine_options
from hvdtrain.extras.plan.meshes.machine import machine_of
from hvdtrain.extras.plan.meshes.meshes import (
    Data,
    framework_of,
    plain_work,
    plan_meshes,
    without_mesh,
)
from hvdtrain.extras.plan.meshes.pipeline import pipeline_json, pipeline_lines, pipeline_plan
from hvdtrain.extras.plan.meshes.table import mesh_json, mesh_lines
from hvdtrain.training.job_memory import resident_bytes

PARALLEL_RANKS = 4  # without --ranks
_OPTIONS_OF_JOBS = ("png", "parallel_picture", "all")  # without --pipeline and --parallel
# with --parallel
_OPTIONS_OF_MESHES = (
    "gflops",
    "inside",
    "between",
    "ranks_per_node",
    "measured",
)
_QUIET_S = 5.0  # after that, progress is printed


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pipeline", action="store_true")
    add_machine_options(parser)


def refuse_options(options: argparse.Namespace) -> None:
    """Raises UserError for an option that the kind of plan does not read."""
    kind = next((kind for kind in ("pipeline", "parallel") if getattr(options, kind)), None)
    others = _OPTIONS_OF_JOBS + (
        ("pipeline",) if kind == "parallel" else ("parallel", "memory", *_OPTIONS_OF_MESHES)
    )
    if kind is None:
        others = _OPTIONS_OF_MESHES
    for name in others:
        if getattr(options, name) not in (None, False):
            option = f"--{name.replace('_', '-')}"
            if kind is None:
                raise UserError(
                    f"plan without --parallel does not read {option}",
                    option,
                    f"plan --parallel ..., or leave {option} out",
                )
            raise UserError(
                f"plan --{kind} does not read {option}",
                option,
                f"leave one of them out: --{kind} or {option}",
            )


def run(options: argparse.Namespace, config: Config) -> bool:
    """Prints the requested plan; returns False if none is requested. Raises UserError."""
    if options.pipeline:
        _plan_pipelines(options, config)
    elif options.parallel:
        options.ranks = options.ranks or [PARALLEL_RANKS]
        data = training_data(options, config)
        plan_parallel(options, config, Data(data.task, data.samples))
    return bool(options.pipeline or options.parallel)


def _plan_pipelines(options: argparse.Namespace, config: Config) -> None:
    """Prints plans for parallel.pipeline ranks or, if that key is not set, for --ranks."""
    sizes = [config.parallel.pipeline] if config.parallel.pipeline > 1 else options.ranks or [2]
    if 1 in sizes:
        raise UserError(
            "a pipeline has 2 ranks or more",
            "--ranks",
            "plan --pipeline --ranks 2,4, or parallel.pipeline=2",
        )
    task = training_data(options, config).task
    plans = [pipeline_plan(config, task, size) for size in sizes]
    lines = [line for each in plans for line in ["", *pipeline_lines(each)]]
    print_result(options.json, lines[1:], {"pipelines": [pipeline_json(each) for each in plans]})


def plan_parallel(options: argparse.Namespace, config: Config, data: Data) -> None:
    """Raises UserError."""
    if len(options.ranks) > 1:
        raise UserError(
            "plan --parallel compares meshes of one number of ranks only",
            "--ranks",
            "one number, as in --ranks 8",
        )
    (ranks,) = options.ranks
    limit = read_size(options.memory) if options.memory else None
    framework = framework_of(config)
    plain = without_mesh(config, ranks)
    shapes = framework.shapes(plain, data.task)
    weight_bytes = sum(math.prod(shape) for shape in shapes.values()) * (
        8 if config.speed.precision == "fp64" else 4
    )
    machine = machine_of(options, ranks, weight_bytes, plain_work(config, data, ranks))
    room = math.inf if limit is None else max(0, limit - resident_bytes())
    start = time.monotonic()

    def says(name: str) -> None:
        if time.monotonic() - start > _QUIET_S:
            print(f"plan --parallel: {name}", file=sys.stderr, flush=True)

    # this copy may lack the extra that cuts it
    cuts_dense = "parallel.dense" in known_keys() and framework.has_dense_part(plain, data.task)
    plan = plan_meshes(config, data, ranks, machine, room, cuts_dense, says)
    print_result(options.json, mesh_lines(plan), mesh_json(plan))
