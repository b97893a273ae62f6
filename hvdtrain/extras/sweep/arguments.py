"""The command line of `sweep`, and checks before a trial starts."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from hvdtrain.cli.options import CommandParser
from hvdtrain.cli.output import with_json_value
from hvdtrain.config.plugins import check_names
from hvdtrain.config.read import assignments, expand, to_yaml
from hvdtrain.config.schema import Config
from hvdtrain.core.process import command_line
from hvdtrain.errors import UserError, closest, nearest, short
from hvdtrain.extras.launch.words import Program, check_exists, read_program
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
hvdtrain sweep [--config FILE] [key=value ...] --grid KEY=VALUE,VALUE [--random KEY=log:LOW:HIGH] [--trials 20] --out FOLDER [-- train.py ...]
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
  -- train.py [words]        each trial runs this script (or -m MODULE) instead: python train.py words KEY=VALUE run=FOLDER/trial-0001. It passes
                             sys.argv[1:] to hvdtrain.train() or hvdtrain.init(), and may take keys of its own from it
prints a table, the best first, and writes it with a figure into FOLDER (sweep.txt, sweep.png). Ctrl-C or SIGUSR2 stops all trials with
a checkpoint. Exit codes: 0: all trials ended, at least one is done; 82: none is done, all diverged; 1: none is done, at least one failed
(the table says why; the same command tries it again); 75: stopped, the same command resumes"""  # noqa: E501
_COMMAND_LINE = "command line of sweep"
_SAMPLERS = ("grid", "random", "optuna")
_OF_THE_SWEEP = {
    "run": "each trial has a run folder of its own, in --out",
    "resume": "each trial resumes its own run folder",
}


_SCRIPT_EXAMPLE = "-- train.py, a script that passes sys.argv[1:] to hvdtrain.train() or init()"


class SweepOptions(NamedTuple):
    script: Program | None  # None: each trial is a job of hvdtrain itself
    config: str | None
    shared: list[str]  # key=value of all trials
    space: Space
    sampler: str
    trials: int | None
    seed: int
    out: Path
    at_once: int
    ranks: int  # ranks of each trial
    json: str | None

    @property
    def arguments(self) -> list[str]:
        """What follows `hvdtrain`, or `python` for a script, in each trial."""
        if self.script is not None:
            module = ["-m"] if self.script.kind == "module" else []
            return [*module, *self.script.words, *self.shared]
        return [*(["--config", self.config] if self.config is not None else []), *self.shared]

    def trial_command(self, words: Sequence[str]) -> list[str]:
        """The command of a trial; words: its own arguments."""
        hvdtrain = [sys.executable, "-m", "hvdtrain"]
        if self.ranks > 1:
            launch = ["launch", "-np", str(self.ranks), "--"]
            return [*hvdtrain, *launch, *self.arguments, *words]
        python = hvdtrain if self.script is None else [sys.executable]
        return [*python, *self.arguments, *words]

    def command_to_type(self, words: Sequence[str]) -> str:
        """The command for these arguments, on one rank, as a user types it."""
        if self.script is None:
            return command_line(*self.arguments, *words)
        return shlex.join(["python", *self.arguments, *words])


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
    """Returns the options and the sweep. Raises UserError for options with which no trial could
    start."""
    parser = _parser()
    own, words = split_script(arguments)
    parsed, shared = parser.parse_known_args(with_json_value(own))
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
    script = None if words is None else _read_script(words)
    options = SweepOptions(
        script=script,
        config=parsed.config,
        shared=shared,
        space=read_space(parsed.grid, parsed.random, as_typed=script is not None),
        sampler=sampler,
        trials=None if parsed.trials is None else _count(parsed.trials, "--trials", MOST_TRIALS),
        seed=_count(parsed.seed, "--seed", 2**32 - 1, least=0),
        out=expand(parsed.out, "--out"),
        at_once=_count(parsed.at_once, "--at-once", 1024),
        ranks=_count(parsed.ranks_per_trial, "--ranks-per-trial", 10**6),
        json=parsed.json,
    )
    lines: list[str] = []
    if script is None:
        lines = to_yaml(_check_shared(options)).splitlines()
    else:
        _check_script(options)
    points = _points(options)
    if script is None:
        for point in points or probes(options.space):
            _check_point(options, point)
    return options, Sweep(
        sampler,
        options.seed,
        parsed.grid,
        parsed.random,
        options.ranks,
        lines,
        points,
        script=options.arguments if script is not None else [],
    )


def split_script(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str] | None]:
    """The arguments of the sweep, and those after `--`; None without it."""
    if "--" not in arguments:
        return arguments, None
    separator = list(arguments).index("--")
    return arguments[:separator], arguments[separator + 1 :]


def _read_script(words: Sequence[str]) -> Program:
    """Raises UserError for what is not a script or a module, or does not exist."""
    program = read_program(words, ())
    if program.kind not in ("script", "module"):
        what = f"'{short(' '.join(words))}' is not a script" if words else "the script is missing"
        raise UserError(what, "command line of sweep, after --", _SCRIPT_EXAMPLE)
    check_exists(program)
    return program


def _check_script(options: SweepOptions) -> None:
    """Raises UserError if the arguments of a script have a key that the sweep sets, or one that is
    swept. Only the script knows its keys."""
    if options.config is not None:
        raise UserError(
            "--config is for jobs of hvdtrain, not for a script",
            f"--config {short(options.config)}",
            "write it behind the script, if that reads it",
        )
    _refuse_swept(options.space)
    given = {word.partition("=")[0] for word in options.arguments if "=" in word}
    for key, fix in _OF_THE_SWEEP.items():
        if key in given:
            raise UserError(f"a sweep sets {key} itself", _COMMAND_LINE, f"leave it out: {fix}")
    _refuse_given(given.intersection(options.space.keys))


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
    """Returns the option that was probably meant, or all options; common dashes do not count as
    similarity."""
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
    """Returns the configuration shared by all trials. Raises UserError if it contains a key that
    the sweep sets or varies."""
    swept = options.space.keys
    _refuse_swept(options.space)
    given = {
        assignment.key: assignment.origin
        for assignment in assignments(options.config, options.shared)
    }
    for key, fix in _OF_THE_SWEEP.items():
        if key in given:
            raise UserError(
                f"a sweep sets {key} itself", f"{key}, {given[key]}", f"leave it out: {fix}"
            )
    _refuse_given({one.key for one in assignments(None, options.shared)}.intersection(swept))
    return configure(options.config, options.shared)


def _refuse_swept(space: Space) -> None:
    """Raises UserError if a key is swept that the sweep sets."""
    for key, fix in _OF_THE_SWEEP.items():
        if key in space.keys:
            raise UserError(f"{key} cannot be swept", "--grid, --random", fix)


def _refuse_given(keys: Collection[str]) -> None:
    """Raises UserError if there are keys that are both given and swept."""
    for key in keys:
        raise UserError(
            f"{key} is both given and swept",
            f"{key}, command line",
            f"leave {key}= out, or its --grid or --random",
        )


def _points(options: SweepOptions) -> list[Point]:
    """Returns all trials; none if they depend on results."""
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
    """Raises UserError if the trial would reject its configuration."""
    try:
        config = configure(options.config, [*options.shared, *point])
        check_names(config)
        refuse_on_every_engine(resolve_batch_size(config, options.ranks), options.ranks)
    except UserError as error:
        raise UserError(
            error.what, f"{error.where}; in the trial {' '.join(point)}", error.fix
        ) from None
