"""Pairs of features: the words that turn both on, and the refusal on each engine before data or a
model exist."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from hvdtrain.comm.engines import features_of
from hvdtrain.config.exclusion import Exclusion, as_yaml
from hvdtrain.config.read import configure
from hvdtrain.errors import UserError
from hvdtrain.features.every_feature import FEATURES
from hvdtrain.features.job_feature import JobFeature, PlannedJob
from hvdtrain.training.conflicts import refuse_conflicts

# a pair runs on the first engine that accepts it
ENGINES = (
    "mpi",
    "torchdist",
    "horovod",
)
RANKS = 4  # that every example is for


class Example(NamedTuple):
    """Words that turn a feature on."""

    feature: JobFeature
    words: str

    @property
    def keys(self) -> set[str]:
        return set(assigned(self.words))


EXAMPLES = [  # without Keras, whose ranks need other packages
    Example(feature, words)
    for feature in FEATURES
    for words in feature.examples
    if "framework=keras" not in words and feature.is_installed_for(configure(None, words.split()))
]


class Pair(NamedTuple):
    one: Example
    other: Example
    more: str = ""  # words of both, and of what they are compared with: framework=jax

    @property
    def both(self) -> tuple[Example, Example]:
        return self.one, self.other

    @property
    def words(self) -> str:
        return joined(self.more, self.one.words, self.other.words)

    @property
    def name(self) -> str:
        return " + ".join(filter(None, (self.one.words, self.other.words, self.more)))


def assigned(words: str) -> dict[str, str]:
    """key -> value of `key=value key=value`; the last one counts."""
    return {key: value for key, _, value in (word.partition("=") for word in words.split())}


def joined(*parts: str) -> str:
    """The words of all parts, a key once, with its last value."""
    return " ".join(f"{key}={value}" for key, value in assigned(" ".join(parts)).items())


def reverse(words: str) -> str:
    return " ".join(reversed(words.split()))


def all_pairs(more: str = "") -> list[Pair]:
    """Every two examples that do not give one key two values, with these words."""
    examples = [example for example in EXAMPLES if not assigned(more).keys() & example.keys]
    pairs = [Pair(one, other, more) for one, other in itertools.combinations(examples, 2)]
    return [pair for pair in pairs if not _contradict(pair.one.words, pair.other.words)]


def _contradict(one: str, other: str) -> bool:
    a = assigned(one)
    b = assigned(other)
    return any(a[key] != b[key] for key in a.keys() & b.keys())


_configured = functools.cache(lambda words: configure(None, words.split()))


@functools.cache
def verdict(words: str, engine: str, ranks: int = RANKS) -> UserError | None:
    """The first conflict of a job, or None."""
    try:
        refuse_conflicts(_configured(words), engine, ranks)
    except UserError as error:
        return error
    return None


def engines_of(words: str) -> list[str]:
    """The engines on which a job is not refused."""
    return [engine for engine in ENGINES if verdict(words, engine) is None]


def names(error: UserError | str, keys: Iterable[str]) -> bool:
    """Whether a message names one of the keys."""
    return any(re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.]*\w)", str(error)) for key in keys)


def refusal(pair: Pair) -> UserError | None:
    """Returns the refusal of a pair that no engine accepts, preferably one that names both
    features."""
    errors: list[UserError] = []
    for engine in ENGINES:
        error = verdict(pair.words, engine)
        if error is None:
            return None
        errors.append(error)
    return next(
        (
            error
            for error in errors
            if names(error, pair.one.keys) and names(error, pair.other.keys)
        ),
        errors[0],
    )


def rows(feature: JobFeature) -> Iterator[tuple[Exclusion, str, UserError]]:
    """What a feature cannot go with: the row, the words of a job that has both, and what it is
    told. Nothing if no plugin of this copy turns it on."""
    for row in feature.excludes if feature.examples else ():
        yield (
            row,
            (words := joined(feature.examples[0], row.words, _excluded(row))),
            _told(feature, row, words),
        )


def rows_without(feature: JobFeature) -> Iterator[tuple[Exclusion, str, UserError]]:
    """Values that mean nothing without a feature, in the same way."""
    for row in feature.without:
        yield row, (words := joined(row.words, _excluded(row))), _told(feature, row, words)


def _excluded(row: Exclusion) -> str:
    return f"{row.key}={as_yaml(row.values.example)}"


def _told(feature: JobFeature, row: Exclusion, words: str) -> UserError:
    return feature.error(
        row, PlannedJob(configure(None, words.split()), "mpi", features_of("mpi"), RANKS)
    )
