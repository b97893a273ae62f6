"""hvdtrain summary: the layers of a model with shapes, parameters and operations; nothing is
trained."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvdtrain.cli.options import CommandParser
from hvdtrain.cli.output import align, print_result, with_json_value
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.errors import DONE
from hvdtrain.extras.plan.forecast.data import add_data_options, training_data
from hvdtrain.extras.plan.forecast.layers import LayerSummary
from hvdtrain.features.every_feature import configure
from hvdtrain.tasks.task import Task

USAGE = """\
hvdtrain summary [--json [FILE]] [--config FILE] [key=value ...]
  prints the layers of the model: shapes, parameters trained and frozen, operations of a forward pass of one sample; trains nothing
  --samples 1281167 --image 224x224x3 --classes 1000   the data, which then is not read; without it: read, not downloaded
  --json FILE   the rows as JSON; --json or --json - prints them instead of the text"""  # noqa: E501


def summary(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code. Raises UserError."""
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return DONE
    parser = CommandParser("summary")
    parser.add_argument("--config")
    parser.add_argument("--json")
    add_data_options(parser)
    options, overrides = parser.parse_known_args(with_json_value(arguments))
    config = configure(options.config, overrides)
    plugins.check_names(config)
    rows = layers_of(config, training_data(options, config).task)
    print_result(
        options.json,
        text(config, rows),
        {"layers": [row._asdict() for row in rows], **totals(rows)},
    )
    return DONE


def layers_of(config: Config, task: Task) -> list[LayerSummary]:
    """Returns the layers; only the parameters if the framework counts nothing else."""
    if config.framework == "torch":
        from hvdtrain.extras.plan.of_torch.summary import summarize  # torch

        return summarize(config, task)
    framework = plugins.load("frameworks", config.framework, config.where("framework"))
    sizes = {name: math.prod(shape) for name, shape in framework.shapes(config, task).items()}
    return [LayerSummary(name, "parameter", None, size, size, None) for name, size in sizes.items()]


def _operations(flops: int) -> str:
    """Formats operations: 8.18 Gflop."""
    unit, factor = next(
        (unit, factor)
        for unit, factor in (("Tflop", 1e12), ("Gflop", 1e9), ("Mflop", 1e6), ("flop", 1))
        if flops >= factor
    )
    return f"{flops / factor:.3g} {unit}"


def totals(rows: Sequence[LayerSummary]) -> dict[str, int | None]:
    """Sums over the layers; "flops" is None if they are not counted."""
    flops = [row.flops for row in rows if row.flops is not None]  # either none or all are counted
    return {
        "parameters": sum(row.parameters for row in rows),
        "trained": sum(row.trained for row in rows),
        "flops": sum(flops) if flops else None,
    }


def text(config: Config, rows: Sequence[LayerSummary]) -> list[str]:
    """Returns lines for people."""
    has_frozen = any(row.trained != row.parameters for row in rows)
    header = (
        "layer",
        "kind",
        "outputs",
        "parameters",
        *(["trained"] if has_frozen else []),
        "Mflop",
    )
    cells = [
        (
            row.name or "(the model)",
            row.kind,
            "" if row.outputs is None else "x".join(map(str, row.outputs)) or "1",
            f"{row.parameters:,}" if row.parameters else "",
            *([f"{row.trained:,}" if row.parameters else ""] if has_frozen else []),
            "" if not row.flops else f"{row.flops / 1e6:.3g}",
        )
        for row in rows
    ]
    total = totals(rows)
    line = f"{config.model.name}: {total['parameters']:,} parameters"
    line += f", {total['trained']:,} of them trained" if has_frozen else ", all of them trained"
    if not total["flops"]:
        line += f"; framework={config.framework} has counted no operations"
    else:
        work = _operations(total["flops"])
        line += (
            f"; {work} for a forward pass of one sample (matrix products and convolutions, 2 for "
            "a multiply-add)"
        )
    return [*align([header, *cells], left=(0, 1)), "", line]
