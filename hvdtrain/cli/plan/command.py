"""hvdtrain plan: what a job would do on several numbers of ranks, as a table and a picture; nothing
is trained."""

from __future__ import annotations

import argparse
import importlib
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.cli.options import CommandParser
from hvdtrain.cli.output import STANDARD_OUTPUT, print_result, with_json_value
from hvdtrain.cli.plan.forecast import (
    RANKS,
    Forecast,
    Infeasible,
    find_conflict,
    forecast,
    group_by_recipe,
    memory_json,
    memory_plan,
    read_size,
    with_memory_value,
)
from hvdtrain.cli.plan.table import Plan, batch_label, one_line, plan_lines, ranks_label, to_json
from hvdtrain.config import extras, plugins
from hvdtrain.config.schema import Config
from hvdtrain.data.configured.unwritten import published, unwritten
from hvdtrain.data.files.folders import FilesMissing
from hvdtrain.errors import DONE, UserError
from hvdtrain.features.every_feature import configure
from hvdtrain.frameworks.by_name import build_rule, check_patterns, is_made_with_the_model
from hvdtrain.optim.rule import Rule
from hvdtrain.recipe import from_config
from hvdtrain.recipe.summary import lr_summary
from hvdtrain.report.figures.commands import RecipeCurve, draw_layout, draw_recipe
from hvdtrain.tasks.classification import without_statistics
from hvdtrain.tasks.task import Task, tokens_of_sample
from hvdtrain.training.build import planned_task
from hvdtrain.training.datasets import build_source, check_augmentation
from hvdtrain.training.job_memory import resident_bytes

USAGE = """\
hvdtrain plan [--config FILE] [--ranks 1,8,64,512] [--json [FILE]] [--png FILE] [--parallel-picture FILE] [key=value ...]
  prints what the job would do on each number of ranks: batch, steps, learning rate, memory; trains nothing
  --config FILE, key=value   the configuration of the job
  --ranks 1,8,64,512         numbers of ranks
  --samples 1281167 --image 224x224x3 --classes 1000   the data, which then is not read; without it: read, not downloaded
  --all                      the names of all parameters without weight decay
  --json FILE                write the plan as JSON too; --json or --json - prints it instead of the text
  --memory [16GiB]           the memory of a rank, for 1, 2, 4, 8 ranks (or --ranks) and each shard.stage, with and without recomputation:
                             what fits in so much, the largest batch.micro, which to take; computed without memory, in seconds
{extras}\
  --png FILE                 draw learning rate and batch
  --parallel-picture FILE    draw as PNG which rank has which part of each layer, and what is sent, on the first of --ranks\
"""  # noqa: E501
_RANKS = (1, 8, 64, 512)
_PICTURE = "--parallel-picture"
_CURVE_POINTS = 2000


class TrainingData(NamedTuple):
    samples: int
    task: Task
    origin: str  # for people


def plan(arguments: Sequence[str]) -> int:
    """Runs `plan`; returns the exit code. Raises UserError."""
    if {"-h", "--help"} & set(arguments):
        of_extras = "".join(f"{each.usage}\n" for each in extras.plan_options().values())
        print(USAGE.replace("{extras}", of_extras))
        for each in extras.plans().values():
            print(each.usage)
        return DONE
    options, config_arguments = _parse(arguments)
    others = _plans_of_extras()
    for module in others:
        module.refuse_options(options)
    config = configure(options.config, config_arguments)
    plugins.check_names(config)
    if any(module.run(options, config) for module in others):
        return DONE
    options.ranks = options.ranks or list(_RANKS if options.memory is None else RANKS)
    conflicts = [conflict for ranks in options.ranks if (conflict := find_conflict(config, ranks))]
    if len(conflicts) == len(options.ranks):  # before data are read
        raise _none_feasible(conflicts)
    limit = read_size(options.memory) if options.memory else None
    added = {
        name: _of_extra(name).read(getattr(options, name))
        for name in extras.plan_options()
        if getattr(options, name) is not None
    }
    data = training_data(options, config)
    forecasts = [
        forecast(config, data.samples, ranks, tokens_of_sample(data.task))
        for ranks in options.ranks
    ]
    feasible = [one for one in forecasts if isinstance(one, Forecast)]
    if not feasible:
        raise _none_feasible([one for one in forecasts if isinstance(one, Infeasible)])
    rule = _rule(config)
    framework = plugins.load("frameworks", config.framework, config.where("framework"))
    shapes = framework.shapes(config, data.task)
    frozen = getattr(framework, "frozen", lambda *_: ())
    check_patterns(config, shapes, frozen=lambda: frozen(config, data.task))
    planned = Plan(config, data.task, data.samples, data.origin, forecasts, shapes, rule)
    of_memory = None
    if options.memory is not None:
        of_memory = memory_plan(config, data.task, feasible, limit, resident_bytes())
    lines = plan_lines(planned, options.all, of_memory)
    found = to_json(planned)
    for name, add in added.items():
        more, result = add()
        lines += ["", *more]
        found |= {name: result}
    print_result(
        options.json, lines, found | ({"memory": memory_json(of_memory)} if of_memory else {})
    )
    if options.png is not None:
        curves = [_curve(group) for group in group_by_recipe(feasible)]
        drawn = draw_recipe(Path(options.png), _title(config, data.samples, feasible[-1]), curves)
        if options.json != STANDARD_OUTPUT:
            print(f"\n{drawn}")
    if options.parallel_picture is not None:
        drawn = _draw_parallel(
            options.parallel_picture, feasible[0].config, data.task, feasible[0].ranks
        )
        if options.json != STANDARD_OUTPUT:
            print(f"\n{drawn}")
    return DONE


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of plan, and the other arguments, which belong to the configuration."""
    parser = CommandParser("plan")
    parser.add_argument("--config")
    parser.add_argument("--ranks", type=_read_ranks, default=None)
    parser.add_argument("--memory")
    for name in extras.plan_options():
        parser.add_argument(f"--{name}")
    parser.add_argument("--png")
    parser.add_argument("--parallel-picture")
    parser.add_argument("--json")
    add_data_options(parser)
    parser.add_argument("--all", action="store_true")
    for module in _plans_of_extras():
        module.add_options(parser)
    arguments = with_memory_value(with_json_value(arguments))
    for name in extras.plan_options():
        if f"--{name}" in arguments:
            arguments = _of_extra(name).with_value(arguments)
    return parser.parse_known_args(arguments)


def _plans_of_extras() -> list[Any]:
    """The modules of other plans, each once."""
    names = dict.fromkeys(each.module for each in extras.plans().values())
    return [importlib.import_module(name) for name in names]


def _of_extra(name: str) -> Any:
    """The module of an extra's option."""
    return importlib.import_module(extras.plan_options()[name].module)


def add_data_options(parser: CommandParser) -> None:
    """Sizes of data that are not read."""
    parser.add_argument("--samples", type=_read_count)
    parser.add_argument("--image", type=_read_image)
    parser.add_argument("--classes", type=_read_count)


def _read_count(value: str) -> int:
    if not (value.isdecimal() and int(value)):
        raise UserError(
            f"{value} is no number of samples or classes",
            "--samples, --classes",
            "give 1 or more, as in --samples 1281167",
        )
    return int(value)


def _read_ranks(value: str) -> list[int]:
    ranks = value.split(",")
    if not all(number.isdecimal() and int(number) for number in ranks):
        raise UserError(
            f"cannot read the numbers of ranks {value!r}",
            "--ranks",
            "give them as in --ranks 1,8,64,512",
        )
    return sorted({int(number) for number in ranks})


def _read_image(value: str) -> tuple[int, ...]:
    """(height, width, channels)"""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", value)
    if not match:
        raise UserError(
            f"cannot read the shape {value!r}",
            "--image",
            "give height x width x channels, as in --image 224x224x3",
        )
    return tuple(map(int, match.groups()))


def training_data(options: argparse.Namespace, config: Config) -> TrainingData:
    """From the command line; without that read as a job reads it, but for the statistics, which
    take a pass over all pixels."""
    given = [options.samples, options.image, options.classes]
    example = "--samples 1281167 --image 224x224x3 --classes 1000"
    if None not in given:
        origin = "by --samples, --image and --classes; no data is read"
        return TrainingData(
            options.samples, without_statistics(options.image, options.classes), origin
        )
    if any(given):
        raise UserError(
            "--samples, --image and --classes need each other",
            "command line",
            f"give all three: {example}",
        )
    without_data = f"plan without data, as in {example}"
    try:
        with tempfile.TemporaryDirectory(prefix="hvdtrain-plan-") as scratch:
            source = build_source(unwritten(config, Path(scratch)), "train")
            check_augmentation(config, source)
            return TrainingData(
                len(source), planned_task(config, source), f"data.name={config.data.name}"
            )
    except FilesMissing as error:
        sizes = published(config) if config.task.name == "classification" else None
        if sizes is None:
            what = error.what.replace("data.download is false", "plan downloads nothing")
            raise UserError(what, error.where, f"{error.fix}; or {without_data}") from None
        samples, shape, classes = sizes
        origin = (
            f"as data.name={config.data.name} is published; its files are not here, and plan "
            "downloads nothing"
        )
        return TrainingData(samples, without_statistics(shape, classes), origin)
    except UserError as error:
        raise UserError(
            error.what,
            error.where,
            f"{error.fix}; or {without_data}" if error.fix else without_data,
        ) from None


def _draw_parallel(path: str, config: Config, task: Task, ranks: int) -> str:
    """Writes a PNG; returns a line for people. Raises UserError where the framework has no such
    picture, or the file cannot be written."""
    framework = plugins.load("frameworks", config.framework, config.where("framework"))
    if not hasattr(framework, "layout"):
        raise UserError(
            f"framework={config.framework} has every model whole on each rank",
            _PICTURE,
            "framework=torch",
        )
    return draw_layout(Path(path), framework.layout(config, task, ranks), _PICTURE)


def _rule(config: Config) -> Rule | None:
    """The optimizer; None for a user's own or one of torch.optim or optax, whose state is known
    only after its first step."""
    if is_made_with_the_model(config):
        plugins.load("frameworks", config.framework, config.where("framework")).check_optimizer(
            config
        )
        return None
    return build_rule(config)


def _none_feasible(rejected: list[Infeasible]) -> UserError:
    """The common reason where there is one, else the reason for each number of ranks."""
    if len({str(one.error) for one in rejected}) == 1:
        return rejected[0].error
    reasons = "".join(f"\n  {one.ranks}: {one_line(one.error)}" for one in rejected)
    return UserError(
        f"the job can run on none of these numbers of ranks:{reasons}",
        rejected[0].error.where,
        "other --ranks, or another batch",
    )


def _curve(group: list[Forecast]) -> RecipeCurve:
    """The curve of forecasts with equal recipes: all steps, or about as many as a picture can show,
    and every change of the batch."""
    one = group[0]
    evenly_spaced = {point * one.steps // _CURVE_POINTS for point in range(_CURVE_POINTS)}
    steps = sorted(evenly_spaced | {phase.first_step for phase in one.batch_phases})
    hypers = [one.hyper(step) for step in steps]
    hypers.append(hypers[-1])  # holds up to the end of the job
    label = (
        f"{ranks_label(group)}: batch {batch_label(one)}, lr {from_config.peak_lr(one.config):g}"
    )
    epochs = [*(one.progress(step).epochs for step in steps), one.epochs]
    return RecipeCurve(label, epochs, [h.lr for h in hypers], [h.batch for h in hypers])


def _title(config: Config, samples: int, shown: Forecast) -> str:
    job = f"{config.model.name} on {samples:,} samples with {config.optim.name}"
    return f"{job}\n{ranks_label([shown])}: {lr_summary(shown.config, samples, shown.context)}"
