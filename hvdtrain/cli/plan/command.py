"""python -m hvdtrain plan: what a job would do on several numbers of ranks, as a table and a picture; nothing is trained."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from hvdtrain.cli.plan.forecast import Forecast, Infeasible, find_conflict, forecast, group_by_recipe
from hvdtrain.cli.plan.table import Plan, batch_label, one_line, plan_lines, ranks_label
from hvdtrain.config import plugins
from hvdtrain.config.read import configure
from hvdtrain.config.schema import Config
from hvdtrain.data.images import augment
from hvdtrain.errors import DONE, UserError
from hvdtrain.frameworks.build_rule import build_rule
from hvdtrain.frameworks.learner import Task
from hvdtrain.optim.rule import Rule
from hvdtrain.recipe import from_config
from hvdtrain.recipe.summary import lr_summary
from hvdtrain.report.figures.recipe_curves import RecipeCurve, draw
from hvdtrain.training.datasets import build_source, unstaged

_CURVE_POINTS = 2000


class _TrainingData(NamedTuple):
    samples: int
    task: Task
    origin: str  # for people


def plan(arguments: Sequence[str]) -> int:
    """Runs `plan`; returns the exit code. Raises UserError."""
    options, config_arguments = _parse(arguments)
    config = configure(options.config, config_arguments)
    plugins.check_names(config)
    conflicts = [conflict for ranks in options.ranks if (conflict := find_conflict(config, ranks))]
    if len(conflicts) == len(options.ranks):  # before data are read
        raise _none_feasible(conflicts)
    data = _training_data(options, config)
    forecasts = [forecast(config, data.samples, ranks) for ranks in options.ranks]
    feasible = [one for one in forecasts if isinstance(one, Forecast)]
    if not feasible:
        raise _none_feasible([one for one in forecasts if isinstance(one, Infeasible)])
    rule = _rule(config)
    shapes = plugins.load("frameworks", config.framework, config.where("framework")).shapes(config, data.task)
    planned = Plan(config, data.task, data.samples, data.origin, forecasts, shapes, rule)
    print("\n".join(plan_lines(planned, all_names=options.all)))
    if options.png is not None:
        curves = [_curve(group) for group in group_by_recipe(feasible)]
        print()
        print(draw(Path(options.png), _title(config, data.samples, feasible[-1]), curves))
    return DONE


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message, "command line of plan", "python -m hvdtrain --help shows the options of plan")


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of plan, and the other arguments, which belong to the configuration."""
    parser = _Parser(prog="python -m hvdtrain plan", add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--ranks", type=_read_ranks, default=[1, 8, 64, 512])
    parser.add_argument("--png")
    parser.add_argument("--samples", type=_read_count)
    parser.add_argument("--image", type=_read_image)
    parser.add_argument("--classes", type=_read_count)
    parser.add_argument("--all", action="store_true")
    return parser.parse_known_args(arguments)


def _read_count(value: str) -> int:
    if not (value.isdecimal() and int(value)):
        raise UserError(f"{value} is no number of samples or classes", "--samples, --classes", "give 1 or more, as in --samples 1281167")
    return int(value)


def _read_ranks(value: str) -> list[int]:
    ranks = value.split(",")
    if not all(number.isdecimal() and int(number) for number in ranks):
        raise UserError(f"cannot read the numbers of ranks {value!r}", "--ranks", "give them as in --ranks 1,8,64,512")
    return sorted({int(number) for number in ranks})


def _read_image(value: str) -> tuple[int, ...]:
    """(height, width, channels)"""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", value)
    if not match:
        raise UserError(f"cannot read the shape {value!r}", "--image", "give height x width x channels, as in --image 224x224x3")
    return tuple(map(int, match.groups()))


def _training_data(options: argparse.Namespace, config: Config) -> _TrainingData:
    """From the command line; without that read as a job reads it, but for the statistics, which take a pass over all pixels."""
    given = [options.samples, options.image, options.classes]
    example = "--samples 1281167 --image 224x224x3 --classes 1000"
    if None not in given:
        origin = "by --samples, --image and --classes; no data is read"
        return _TrainingData(options.samples, _task(options.image, options.classes), origin)
    if any(given):
        raise UserError("--samples, --image and --classes need each other", "command line of plan", f"give all three: {example}")
    try:
        source = build_source(unstaged(config), "train")
        augment.check_augmentation(config.augment, source.shape)
    except UserError as error:
        without_data = f"plan without data, as in {example}"
        raise UserError(error.what, error.where, f"{error.fix}; or {without_data}" if error.fix else without_data) from None
    return _TrainingData(len(source), _task(source.shape, source.classes), f"data.name={config.data.name}")


def _task(shape: tuple[int, int, int], classes: int) -> Task:
    """Without the statistics of the pixels: mean 0, deviation 1."""
    return Task(shape, classes, np.zeros(shape[2]), np.ones(shape[2]))


def _rule(config: Config) -> Rule | None:
    """The optimizer; None for a class of torch.optim, whose state is known only after its first step."""
    if plugins.is_dotted(config.optim.name) and config.framework == "torch":
        plugins.load("frameworks", config.framework, config.where("framework")).check_optimizer(config)
        return None
    return build_rule(config)


def _none_feasible(rejected: list[Infeasible]) -> UserError:
    """The common reason where there is one, else the reason for each number of ranks."""
    if len({str(one.error) for one in rejected}) == 1:
        return rejected[0].error
    reasons = "".join(f"\n  {one.ranks}: {one_line(one.error)}" for one in rejected)
    return UserError(
        f"the job can run on none of these numbers of ranks:{reasons}", rejected[0].error.where, "other --ranks, or another batch"
    )


def _curve(group: list[Forecast]) -> RecipeCurve:
    """The curve of forecasts with equal recipes: all steps, or about as many as a picture can show, and every change of the batch."""
    one = group[0]
    evenly_spaced = {point * one.steps // _CURVE_POINTS for point in range(_CURVE_POINTS)}
    steps = sorted(evenly_spaced | {phase.first_step for phase in one.batch_phases})
    hypers = [one.hyper(step) for step in steps]
    hypers.append(hypers[-1])  # holds up to the end of the job
    label = f"{ranks_label(group)}: batch {batch_label(one)}, lr {from_config.peak_lr(one.config):g}"
    epochs = [*(one.progress(step).epochs for step in steps), one.epochs]
    return RecipeCurve(label, epochs, [h.lr for h in hypers], [h.batch for h in hypers])


def _title(config: Config, samples: int, shown: Forecast) -> str:
    job = f"{config.model.name} on {samples:,} samples with {config.optim.name}"
    return f"{job}\n{ranks_label([shown])}: {lr_summary(shown.config, samples)}"
