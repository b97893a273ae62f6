"""The search space of a sweep: the lists of --grid, the ranges of --random, and the resulting
trials."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from hvdtrain.config.read import read_argument
from hvdtrain.errors import UserError, nearest, short

Point = tuple[str, ...]  # the arguments of one trial: ("optim.base_lr=0.1", "seed=2")
SEED = "seed"  # trials that only differ in it are repetitions
KINDS = ("uniform", "log", "int", "logint")
RANGE_EXAMPLE = "--random optim.base_lr=log:0.01:1"
GRID_EXAMPLE = "--grid optim.base_lr=0.1,0.2,0.4"
MOST_TRIALS = 10_000
_MOST_TRIES = 1000  # tries for another draw that differs from the others


class Choice(NamedTuple):
    """A key with the values that it takes, as texts."""

    key: str
    values: tuple[str, ...]


class Range(NamedTuple):
    """A key with the numbers that it takes, both ends included."""

    key: str
    kind: str  # one of KINDS
    low: str
    high: str

    @property
    def is_int(self) -> bool:
        return self.kind in ("int", "logint")

    @property
    def is_log(self) -> bool:
        return self.kind in ("log", "logint")

    def text(self, value: float) -> str:
        """Formats a value for the command line: an integer, or four digits."""
        text = f"{round(value)}" if self.is_int else f"{value:.4g}"
        if float(text) < float(self.low):
            return self.low
        if float(text) > float(self.high):
            return self.high
        return text

    def draw(self, random: Random) -> str:
        low = float(self.low)
        high = float(self.high)
        if self.kind == "int":
            return str(random.randint(int(self.low), int(self.high)))
        if self.is_log:
            return self.text(math.exp(random.uniform(math.log(low), math.log(high))))
        return self.text(random.uniform(low, high))


class Space(NamedTuple):
    choices: tuple[Choice, ...]
    ranges: tuple[Range, ...]

    @property
    def keys(self) -> list[str]:
        return [choice.key for choice in self.choices] + [one.key for one in self.ranges]


def read_space(grids: Sequence[str], randoms: Sequence[str], *, as_typed: bool = False) -> Space:
    """The space that the options' texts describe. as_typed: the keys belong to a script, which may
    have any. Raises UserError."""
    space = Space(
        tuple(_read_choice(text, as_typed) for text in grids),
        tuple(_read_range(text, as_typed) for text in randoms),
    )
    if not space.keys:
        raise UserError(
            "nothing to sweep", "command line of sweep", f"{GRID_EXAMPLE}, or {RANGE_EXAMPLE}"
        )
    for key in space.keys:
        if space.keys.count(key) > 1:
            raise UserError(
                f"{key} is swept twice",
                "--grid, --random",
                f"one list or range for each key: {GRID_EXAMPLE}",
            )
    return space


def _read_choice(text: str, as_typed: bool) -> Choice:
    key, values = _split_key(text, "--grid", GRID_EXAMPLE)
    texts = _split_values(values)
    read = [_Value(key, value) if as_typed else _value(key, value) for value in texts]
    for index, one in enumerate(read):
        if not texts[index]:
            raise UserError(
                f"{key} has an empty value",
                f"--grid {short(text)}",
                f"null unsets a key; as in {GRID_EXAMPLE}",
            )
        if one.value in [other.value for other in read[:index]]:
            raise UserError(
                f"{key}={texts[index]} is listed twice", f"--grid {short(text)}", "each value once"
            )
    return Choice(read[0].key, tuple(texts))


class _Value(NamedTuple):
    """A key by its full name, and one of its values."""

    key: str
    value: Any


def _value(key: str, text: str) -> _Value:
    """Reads a value of a key of hvdtrain. Raises UserError."""
    assignment = read_argument(f"{key}={text}")
    return _Value(assignment.key, assignment.value)


def _split_values(text: str) -> list[str]:
    """Splits at commas that are not within brackets: "[64,64],[32]" has two values."""
    values = [""]
    depth = 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            values.append("")
        else:
            values[-1] += letter
    return [value.strip() for value in values]


def _read_range(text: str, as_typed: bool) -> Range:
    key, value = _split_key(text, "--random", RANGE_EXAMPLE)
    where = f"--random {short(text)}"
    kind, *ends = value.split(":")
    if kind not in KINDS and "," in value:
        raise UserError(
            f"{short(value)} is a list, not a range",
            where,
            f"--grid {short(text)}; --sampler random draws from it",
        )
    if kind not in KINDS:
        raise UserError(
            f"unknown range: {short(kind)}",
            where,
            f"{nearest(kind, KINDS)}; as in {RANGE_EXAMPLE}",
        )
    key = key if as_typed else _value(key, "0").key
    interval = Range(key, kind, *ends) if len(ends) == 2 else None
    if interval is None or not all(_is_number(end, interval.is_int) for end in ends):
        numbers = "two whole numbers" if kind in ("int", "logint") else "two numbers"
        raise UserError(
            f"{kind} takes {numbers}, its bounds",
            where,
            f"{kind}:1:16" if "int" in kind else f"{kind}:0.01:1",
        )
    if not float(interval.low) < float(interval.high):
        raise UserError(f"{interval.low} is not below {interval.high}", where, f"{kind}:LOW:HIGH")
    if interval.is_log and float(interval.low) <= 0:
        raise UserError(
            f"a logarithmic range begins above 0, not at {interval.low}",
            where,
            f"{kind.replace('log', '') or 'uniform'}, or more than 0",
        )
    return interval


def _is_number(text: str, whole: bool) -> bool:
    try:
        return math.isfinite(int(text) if whole else float(text))
    except (OverflowError, ValueError):
        return False


def _split_key(text: str, option: str, example: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key or not value:
        raise UserError(f"cannot read {option} {short(text)}", "command line of sweep", example)
    return key, value


def grid_points(space: Space, most: int | None) -> list[Point]:
    """Returns every combination; the last list varies fastest. Raises UserError for more than
    `most`."""
    if space.ranges:
        what = f"{space.ranges[0].key} has a range, but a grid needs lists"
        raise UserError(what, "--sampler grid", f"--sampler random; or {GRID_EXAMPLE}")
    count = math.prod(len(choice.values) for choice in space.choices)
    if count > (most or MOST_TRIALS):
        sizes = " x ".join(str(len(choice.values)) for choice in space.choices)
        fix = (
            f"--sampler random draws {most} of them"
            if most
            else "--sampler random --trials 20 draws some of them"
        )
        more = f"--trials {count}; or " if count <= MOST_TRIALS else ""
        raise UserError(
            f"the grid has {count:,} trials ({sizes})",
            f"--trials {most or MOST_TRIALS}",
            f"{more}shorter lists; or {fix}",
        )
    return list(
        itertools.product(
            *([f"{choice.key}={value}" for value in choice.values] for choice in space.choices)
        )
    )


def random_points(space: Space, trials: int, seed: int) -> list[Point]:
    """Returns at most `trials` trials, each draw with every value of `seed` if that is swept; a
    larger number begins with the same trials.

    Raises UserError if there are not enough distinct ones.
    """
    seeds = next((choice.values for choice in space.choices if choice.key == SEED), None)
    choices = [choice for choice in space.choices if choice.key != SEED]
    repetitions = [(f"{SEED}={value}",) for value in seeds] if seeds else [()]
    draws = trials // len(repetitions)
    if not choices and not space.ranges:
        raise UserError("only the seed is swept", "--sampler random", "--sampler grid")
    if not draws:
        what = (
            f"each draw is trained with {len(repetitions)} seeds, but there are only {trials} "
            "trials"
        )
        raise UserError(
            what, f"--trials {trials}", f"--trials {len(repetitions) * 10}, or fewer seeds"
        )
    random = Random(seed)
    drawn: dict[Point, None] = {}  # in order
    for _ in range(draws * _MOST_TRIES):
        if len(drawn) == draws:
            break
        listed = tuple(f"{choice.key}={random.choice(choice.values)}" for choice in choices)
        drawn[(*listed, *(f"{one.key}={one.draw(random)}" for one in space.ranges))] = None
    if len(drawn) < draws:
        raise UserError(
            f"these lists have {len(drawn)} combinations",
            f"--trials {trials}",
            "--sampler grid tries all of them",
        )
    return [(*point, *repetition) for point in drawn for repetition in repetitions]


def probes(space: Space) -> list[Point]:
    """Points that together have every value of the lists and both ends of the ranges."""
    texts = {choice.key: choice.values for choice in space.choices} | {
        one.key: (one.low, one.high) for one in space.ranges
    }
    first = {key: values[0] for key, values in texts.items()}
    return [
        tuple(f"{name}={text}" for name, text in (first | {key: value}).items())
        for key, values in texts.items()
        for value in values
    ]
