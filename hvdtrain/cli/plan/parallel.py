"""plan --parallel: from options and configuration to the printed plan."""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

from hvdtrain.cli.json_output import print_result
from hvdtrain.cli.plan.machine import machine_of
from hvdtrain.cli.plan.memory import read_size
from hvdtrain.cli.plan.mesh_table import mesh_json, mesh_lines
from hvdtrain.cli.plan.meshes import Data, framework_of, plain_work, plan_meshes, without_mesh
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.report.figures import layout
from hvdtrain.tasks.task import Task
from hvdtrain.training.memory.meter import resident_bytes

PARALLEL_RANKS = 4  # without --ranks
_QUIET_S = 5.0  # after that, progress is printed


def plan_parallel(options: argparse.Namespace, config: Config, data: Data) -> None:
    """Raises UserError."""
    if len(options.ranks) > 1:
        raise UserError("plan --parallel ranks the meshes of one number of ranks", "--ranks", "one number, as in --ranks 8")
    (ranks,) = options.ranks
    limit = read_size(options.memory) if options.memory else None
    framework = framework_of(config)
    plain = without_mesh(config, ranks)
    shapes = framework.shapes(plain, data.task)
    weight_bytes = sum(math.prod(shape) for shape in shapes.values()) * (8 if config.speed.precision == "fp64" else 4)
    machine = machine_of(options, ranks, weight_bytes, plain_work(config, data, ranks))
    room = math.inf if limit is None else max(0, limit - resident_bytes())
    start = time.monotonic()

    def says(name: str) -> None:
        if time.monotonic() - start > _QUIET_S:
            print(f"plan --parallel: {name}", file=sys.stderr, flush=True)

    plan = plan_meshes(config, data, ranks, machine, room, framework.has_dense_part(plain, data.task), says)
    print_result(options.json, mesh_lines(plan), mesh_json(plan))


_OPTION = "--parallel-picture"


def draw_parallel(path: str, config: Config, task: Task, ranks: int) -> str:
    """Writes a PNG; returns a line for people. Raises UserError where the framework has no such picture, or the file cannot be written."""
    framework = plugins.load("frameworks", config.framework, config.where("framework"))
    if not hasattr(framework, "layout"):
        raise UserError(f"framework={config.framework} has every model whole on each rank", _OPTION, "framework=torch")
    return layout.draw(Path(path), framework.layout(config, task, ranks), _OPTION)
