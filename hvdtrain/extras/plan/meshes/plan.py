"""plan --parallel, and the modes of plan in other extras: their options, and the choice between
them."""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import time

from hvdtrain.cli.output import print_result
from hvdtrain.config.schema import Config, known_keys
from hvdtrain.core.extras import Mode, modes
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
from hvdtrain.extras.plan.meshes.table import mesh_json, mesh_lines
from hvdtrain.training.job_memory import resident_bytes

PARALLEL_RANKS = 4  # without --ranks
_OPTIONS_OF_JOBS = ("png", "parallel_picture", "all")  # without --parallel and modes
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
    for option in modes("plan"):
        parser.add_argument(option, action="store_true")
    add_machine_options(parser)


def refuse_options(options: argparse.Namespace) -> None:
    """Raises UserError for an option that the kind of plan does not read."""
    of_modes = tuple(map(_attribute, modes("plan")))
    kind = next((kind for kind in (*of_modes, "parallel") if getattr(options, kind)), None)
    others: tuple[str, ...]
    if kind is None:
        others = _OPTIONS_OF_MESHES
    elif kind == "parallel":
        others = (*_OPTIONS_OF_JOBS, *of_modes)
    else:
        others = (*_OPTIONS_OF_JOBS, "parallel", "memory", *_OPTIONS_OF_MESHES)
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
    for option, mode in modes("plan").items():
        if getattr(options, _attribute(option)):
            _run_mode(option, mode, options, config)
            return True
    if options.parallel:
        options.ranks = options.ranks or [PARALLEL_RANKS]
        data = training_data(options, config)
        plan_parallel(options, config, Data(data.task, data.samples))
    return bool(options.parallel)


def _attribute(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _run_mode(option: str, mode: Mode, options: argparse.Namespace, config: Config) -> None:
    """Runs an extra's function for an option, and prints the lines and the values for programs that
    it returns. The function gets the numbers of ranks of --ranks, if any, and a function that reads
    the data and returns the task."""
    function = getattr(importlib.import_module(mode.module), f"plan_{_attribute(option)}")
    lines, found = function(config, options.ranks, lambda: training_data(options, config).task)
    print_result(options.json, lines, found)


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
