"""The command line of `sweep`, and what is refused before a trial starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hvdtrain.cli.options import CommandParser
from hvdtrain.cli.output import with_json_value
from hvdtrain.config.plugins import check_names
from hvdtrain.config.read import assignments, expand, to_yaml
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError, closest, nearest, short
from hvdtrain.extras.sweep import optuna_study
from hvdtrain.extras.sweep.space import (
    GRID_EXAMPLE,
    MOST_TRIALS,
    Point,
    Space,
    grid_points,
    probes,
    random_points,
    read_space,
)
from hvdtrain.extras.sweep.trials import Sweep
from hvdtrain.features.every_feature import configure
from hvdtrain.recipe.batch import resolve_batch_size
from hvdtrain.training.conflicts import refuse_on_every_engine

USAGE = """\
hvdtrain sweep [--config FILE] [key=value ...] --grid KEY=VALUE,VALUE [--random KEY=log:LOW:HIGH] [--trials 20] --out FOLDER
  --config FILE, key=value   what all trials share, as in train
  --grid KEY=V1,V2           values of a key; several --grid: all combinations. seed=1,2,3 repeats: a row of the table is their mean
  --random KEY=KIND:LOW:HIGH numbers of a range: uniform, log (their logarithms are uniform), int, logint
  --sampler grid             grid: all combinations; random: draws, also from the lists of --grid, each with all seeds of --grid seed=...;
                             optuna: from the results so far, stopping poor trials early (pip install optuna).
                             default: random where there is a --random, else grid
  --trials 20                how many; a larger number later adds trials. Default: those of the grid; a larger grid is refused
  --seed 1                   of random and optuna: the same trials again
  --out FOLDER               trial-0001, ... in it are run folders, trial-0001.log what they print. The same command resumes the sweep:
                             trials that are done (or diverged, or stopped by optuna) are kept, others are resumed or tried again
  --at-once 1                trials side by side
  --ranks-per-trial 1        more than 1: each trial by `hvdtrain launch -np N`
  --json [FILE]              the result as JSON
prints a table, the best first, and writes it with a figure into FOLDER (sweep.txt, sweep.png). Ctrl-C or SIGUSR2 stops all trials with
a checkpoint. Exit codes: 0: all trials ended, at least one is done; 82: none is done, all diverged; 1: none is done, at least one failed
(the table says why; the same command tries it again); 75: stopped, the same command resumes"""  # noqa: E501
_COMMAND_LINE = "command line of sweep"
_SAMPLERS = ("grid", "random", "optuna")
_OF_THE_SWEEP = {
    "run": "each trial has a run folder of its own, in --out",
    "resume": "each trial resumes its own run folder",
}


class SweepOptions(NamedTuple):
    config: str | None
    shared: list[str]  # key=value of all trials
    space: Space
    sampler: str
    trials: int | None
    seed: int
    out: Path
    at_once: int
    ranks: int  # of each trial
    json: str | None

    @property
    def arguments(self) -> list[str]:
        """Arguments of hvdtrain, in each trial."""
        return [*(["--config", self.config] if self.config is not None else []), *self.shared]


def _parser() -> CommandParser:
    parser = CommandParser("sweep")
    for option in ("--config", "--sampler", "--trials", "--out", "--json"):
        parser.add_argument(option)
    for option in ("--seed", "--at-once", "--ranks-per-trial"):
        parser.add_argument(option, default="1")
    for option in ("--grid", "--random"):
        parser.add_argument(option, action="append", default=[])
    return parser


def read_options(arguments: Sequence[str]) -> tuple[SweepOptions, Sweep]:
    """The options, and the sweep that they make. Raises UserError for what no trial could start
    with."""
    parser = _parser()
    parsed, shared = parser.parse_known_args(with_json_value(arguments))
    _refuse_unknown(shared, parser.names())
    if not parsed.out:
        raise UserError(
            "the folder of the trials is missing",
            _COMMAND_LINE,
            "--out FOLDER, as in --out sweeps/rates",
        )
    sampler = parsed.sampler or ("random" if parsed.random else "grid")
    if sampler not in _SAMPLERS:
        raise UserError(
            f"there is no sampler {short(sampler)}",
            f"--sampler {short(sampler)}",
            nearest(sampler, _SAMPLERS),
        )
    options = SweepOptions(
        config=parsed.config,
        shared=shared,
        space=read_space(parsed.grid, parsed.random),
        sampler=sampler,
        trials=None if parsed.trials is None else _count(parsed.trials, "--trials", MOST_TRIALS),
        seed=_count(parsed.seed, "--seed", 2**32 - 1, least=0),
        out=expand(parsed.out, "--out"),
        at_once=_count(parsed.at_once, "--at-once", 1024),
        ranks=_count(parsed.ranks_per_trial, "--ranks-per-trial", 10**6),
        json=parsed.json,
    )
    config = _check_shared(options)
    points = _points(options)
    for point in points or probes(options.space):
        _check_point(options, point)
    lines = to_yaml(config).splitlines()
    return options, Sweep(
        sampler, options.seed, parsed.grid, parsed.random, options.ranks, lines, points
    )


def _refuse_unknown(shared: Sequence[str], known: Sequence[str]) -> None:
    """Refuses an unknown argument that is not key=value."""
    for argument in shared:
        if "=" not in argument:
            fix = (
                _option(argument, known)
                if argument.startswith("-")
                else f"key=value; a list to try: {GRID_EXAMPLE}"
            )
            raise UserError(f"unknown argument '{short(argument)}'", _COMMAND_LINE, fix)


def _option(argument: str, known: Sequence[str]) -> str:
    """The option that was meant, or all: dashes, which all have, do not make two alike."""
    meant = closest(argument.lstrip("-"), [option.lstrip("-") for option in known])
    return f"known: {', '.join(known)}" if meant is None else f"did you mean --{meant}?"


def _count(text: str, option: str, most: int, least: int = 1) -> int:
    if not re.fullmatch("[0-9]{1,10}", text) or not least <= int(text) <= most:
        raise UserError(
            f"{option} {short(text)} is not a number from {least} to {most:,}",
            option,
            f"{option} {max(least, 4)}",
        )
    return int(text)


def _check_shared(options: SweepOptions) -> Config:
    """What all trials share. Raises UserError if it has a key that the sweep sets, or one that
    is swept."""
    swept = options.space.keys
    for key, fix in _OF_THE_SWEEP.items():
        if key in swept:
            raise UserError(f"{key} cannot be swept", "--grid, --random", fix)
    given = {
        assignment.key: assignment.origin
        for assignment in assignments(options.config, options.shared)
    }
    for key, fix in _OF_THE_SWEEP.items():
        if key in given:
            raise UserError(
                f"a sweep sets {key} itself", f"{key}, {given[key]}", f"leave it out: {fix}"
            )
    for key in {assignment.key for assignment in assignments(None, options.shared)} & set(swept):
        raise UserError(
            f"{key} is both given and swept",
            f"{key}, command line",
            f"leave {key}= out, or its --grid or --random",
        )
    return configure(options.config, options.shared)


def _points(options: SweepOptions) -> list[Point]:
    """All trials; none if they depend on results."""
    if options.sampler == "grid":
        return grid_points(options.space, options.trials)
    if options.trials is None:
        raise UserError(
            "the number of trials is missing", f"--sampler {options.sampler}", "--trials 20"
        )
    if options.sampler == "random":
        return random_points(options.space, options.trials, options.seed)
    optuna_study.check_space(options.space)
    return []


def _check_point(options: SweepOptions, point: Point) -> None:
    """Raises UserError if the trial would refuse its configuration."""
    try:
        config = configure(options.config, [*options.shared, *point])
        check_names(config)
        refuse_on_every_engine(resolve_batch_size(config, options.ranks), options.ranks)
    except UserError as error:
        raise UserError(
            error.what, f"{error.where}; in the trial {' '.join(point)}", error.fix
        ) from None
