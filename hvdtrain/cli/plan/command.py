"""python -m hvdtrain plan: what a configuration would do on several numbers of ranks, in a table and a picture; nothing is trained."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from hvdtrain.cli.plan.forecast import Forecast, Impossible, alike, forecast
from hvdtrain.cli.plan.table import Plan, batch_of, ranks_words, reason, text
from hvdtrain.config import plugins
from hvdtrain.config.read import Provenance, configure
from hvdtrain.config.schema import Config
from hvdtrain.data.images import augment
from hvdtrain.errors import DONE, UserError
from hvdtrain.frameworks.learner import Task, build_rule
from hvdtrain.optim.rule import Rule
from hvdtrain.recipe import from_config
from hvdtrain.recipe.summary import lr_summary
from hvdtrain.report.figures.recipe_curves import RecipeCurve, draw
from hvdtrain.train.build import build_source, unstaged

_POINTS = 2000  # of a curve


class Data(NamedTuple):
    """What is known of the training data."""

    samples: int
    task: Task
    origin: str  # for people


def plan(words: Sequence[str]) -> int:
    """The command behind `plan`; returns the exit code."""
    asked, rest = _parse(words)
    config, provenance = configure(asked.config, rest)
    plugins.check_names(config, provenance)
    data = _data(asked, config, provenance)
    rows = [forecast(config, provenance, data.samples, ranks) for ranks in asked.ranks]
    possible = [row for row in rows if isinstance(row, Forecast)]
    if not possible:
        raise _none([row for row in rows if isinstance(row, Impossible)])
    rule = _rule(config, provenance)
    shapes = plugins.load("frameworks", config.framework, provenance.where("framework")).shapes(config, provenance, data.task)
    print("\n".join(text(Plan(config, data.task, data.samples, data.origin, rows, shapes, rule), asked.all)))
    if asked.png is not None:
        curves = [_curve(group) for group in alike(possible)]
        print(f"\n{draw(Path(asked.png), _title(config, data.samples, possible[-1]), curves)}")
    return DONE


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message, "command line of plan", "python -m hvdtrain --help shows how plan is called")


def _parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of plan, and all other words, which are the configuration's."""
    parser = _Parser(prog="python -m hvdtrain plan", add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--ranks", type=_read_ranks, default=[1, 8, 64, 512])
    parser.add_argument("--png")
    parser.add_argument("--samples", type=_read_count)
    parser.add_argument("--image", type=_read_image)
    parser.add_argument("--classes", type=_read_count)
    parser.add_argument("--all", action="store_true")
    return parser.parse_known_args(words)


def _read_count(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise UserError(f"{text} is no number of samples or classes", "--samples, --classes", "give 1 or more, as in --samples 1281167")
    return int(text)


def _read_ranks(text: str) -> list[int]:
    ranks = text.split(",")
    if not all(part.isdecimal() and int(part) for part in ranks):
        raise UserError(f"cannot read the numbers of ranks {text!r}", "--ranks", "give them as in --ranks 1,8,64,512")
    return sorted({int(part) for part in ranks})


def _read_image(text: str) -> tuple[int, ...]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise UserError(f"cannot read the shape {text!r}", "--image", "give height x width x channels, as in --image 224x224x3")
    return tuple(map(int, match.groups()))


def _data(asked: argparse.Namespace, config: Config, provenance: Provenance) -> Data:
    """From the command line, or else read as a job reads it; no statistics, which take a pass over all pixels."""
    told = [asked.samples, asked.image, asked.classes]
    instead = "--samples 1281167 --image 224x224x3 --classes 1000"
    if None not in told:
        return Data(asked.samples, _task(asked.image, asked.classes), "by --samples, --image and --classes; no data is read")
    if any(told):
        raise UserError("--samples, --image and --classes belong together", "command line of plan", f"give all three: {instead}")
    try:
        source = build_source(unstaged(config), provenance, "train")
        augment.check_augmentation(config.augment, source.shape, provenance)
    except UserError as error:
        fix = f"{error.fix}; or plan without data: {instead}, say" if error.fix else f"plan without data: {instead}, say"
        raise UserError(error.what, error.where, fix) from None
    return Data(len(source), _task(source.shape, source.classes), f"data.name={config.data.name}")


def _task(shape: tuple[int, int, int], classes: int) -> Task:
    return Task(shape, classes, np.zeros(shape[2]), np.ones(shape[2]))


def _rule(config: Config, provenance: Provenance) -> Rule | None:
    """The optimizer; None where it is a class of torch.optim, which is known only after its first step."""
    if plugins.is_dotted(config.optim.name) and config.framework == "torch":
        plugins.load("frameworks", config.framework, provenance.where("framework")).check_optimizer(config, provenance)
        return None
    return build_rule(config, provenance)


def _none(rows: list[Impossible]) -> UserError:
    """No row is possible: one reason for all of them, or each with its own."""
    if len({str(row.error) for row in rows}) == 1:
        return rows[0].error
    reasons = "".join(f"\n  {row.ranks}: {reason(row.error)}" for row in rows)
    return UserError(f"no number of ranks fits:{reasons}", rows[0].error.where, "other --ranks, or another batch")


def _curve(group: list[Forecast]) -> RecipeCurve:
    """Steps of the job that those ranks do alike: all of them, or about as many as a picture can show."""
    row = group[0]
    steps = sorted({point * row.steps // _POINTS for point in range(_POINTS)} | {s.step for s in row.stretches})
    hypers = [row.hyper(step) for step in steps]
    hypers.append(hypers[-1])  # which holds up to the end of the job
    label = f"{ranks_words(group)}: batch {batch_of(row)}, lr {from_config.peak_lr(row.config):g}"
    epochs = [*(row.progress(step).epochs for step in steps), row.epochs]
    return RecipeCurve(label, epochs, [h.lr for h in hypers], [h.batch for h in hypers])


def _title(config: Config, samples: int, row: Forecast) -> str:
    first = f"{config.model.name} on {samples:,} samples with {config.optim.name}"
    return f"{first}\n{ranks_words([row])}: {lr_summary(row.config, samples)}"
