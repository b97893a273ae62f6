"""A feature of a job: the words that turn it on, as data what it cannot go with, and what the
header and the event "start" say of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvdtrain.comm.engines import Feature
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.recipe.recipe import Recipe


class PlannedJob(NamedTuple):
    """What is known of a job before anything is built."""

    config: Config
    engine: str
    features: frozenset[Feature]  # of the engine, on every machine
    ranks: int

    def where(self, key: str) -> str:
        """The key and where it was set."""
        return self.config.where(key)


Rule = Callable[[PlannedJob], Iterator[UserError]]
When = Callable[[Config], bool]


class Values(NamedTuple):
    """Some values of a key."""

    hold: Callable[[Any], bool]
    example: Any  # one of them


def among(*values: Any) -> Values:
    return Values(lambda value: value in values, values[0])


def above(limit: int) -> Values:
    return Values(lambda value: value > limit, limit + 1)


def other_than(usual: Any, example: Any) -> Values:
    return Values(lambda value: value != usual, example)


class Exclusion(NamedTuple):
    """Values of a key that a feature cannot go with; what a message says of them, and what it says
    to do instead.

    The texts are templates: {set} is the key with its value, {key} the key, {chosen} the words that
    turn the feature on, {off} those that turn it off, {mesh} the parallel.tensor and
    parallel.pipeline of the job, {config} its configuration. An empty text is that of the feature.
    """

    key: str
    values: Values
    what: str = ""
    fix: str = ""
    where: str = ""  # the key that a message gives the place of; empty: the excluded one
    when: When | None = None  # None: wherever the feature is on
    why: str = ""  # for docs/combinations.md; empty: that of the feature
    words: str = ""  # what an example needs besides: a value that is an error by itself elsewhere


@dataclass(frozen=True, kw_only=True, eq=False)  # rows may have lists, which have no hash
class JobFeature:
    """Something that a configuration turns on.

    Its conflicts come in this order: of values that mean nothing without it, of the rules that come
    first, of what it excludes, of its other rules.
    """

    key: str  # that turns it on; a message calls the feature by this key and its value
    on: When
    examples: tuple[
        str, ...
    ] = ()  # words that turn it on, in a job of classification that is large enough; mine:NAME is a user's object  # noqa: E501
    no_examples: str = ""  # why a test of pairs cannot turn it on; every other feature has examples
    chosen: Callable[[Config], str] | None = None  # what a message calls it instead
    off: str | Callable[[Config], str] = ""  # the words that turn it off
    why: str = ""  # it cannot go with what it excludes, in a few words
    what: str = "{chosen} does not support {set}"
    fix: str = "leave {key} out, or {off}"
    without: tuple[Exclusion, ...] = ()  # values that mean nothing where the feature is off
    first: tuple[Rule, ...] = ()
    excludes: tuple[Exclusion, ...] = ()
    rules: tuple[Rule, ...] = ()
    lines_of_ranks: Callable[[Config, Sequence[str]], Sequence[str]] = lambda config, hosts: ()
    lines_of_recipe: Callable[[Config, Recipe, int], Sequence[str]] = (
        lambda config, recipe, samples: ()
    )
    fields_of_start: Callable[[Config, int], Mapping[str, Any]] = lambda config, ranks: {}

    def ranks_lines(self, config: Config, hosts: Sequence[str]) -> Sequence[str]:
        """Lines of the header below that of the ranks; hosts: of each rank."""
        return self.lines_of_ranks(config, hosts) if self.on(config) else ()

    def recipe_lines(self, config: Config, recipe: Recipe, samples: int) -> Sequence[str]:
        """Lines of the header below that of the recipe; samples: of the training set."""
        return self.lines_of_recipe(config, recipe, samples) if self.on(config) else ()

    def start_fields(self, config: Config, ranks: int) -> Mapping[str, Any]:
        """Fields of the event "start", of every job."""
        return self.fields_of_start(config, ranks)

    def conflicts(self, job: PlannedJob) -> Iterator[UserError]:
        """Every conflict of a job that is this feature's, in order."""
        is_on = self.on(job.config)
        yield from self._excluded(job, self.without, otherwise=not is_on)
        if not is_on:
            return
        for rule in self.first:
            yield from rule(job)
        yield from self._excluded(job, self.excludes, otherwise=True)
        for rule in self.rules:
            yield from rule(job)

    def unread_keys(self, config: Config) -> list[str]:
        """Keys that are set and mean nothing, since the feature is off."""
        return [row.key for row in _holding(self.without, config, not self.on(config))]

    def name(self, config: Config) -> str:
        """What a message calls the feature: shard.stage=1."""
        return self.chosen(config) if self.chosen else as_set(config, self.key)

    def _excluded(
        self, job: PlannedJob, rows: tuple[Exclusion, ...], otherwise: bool
    ) -> Iterator[UserError]:
        for row in _holding(rows, job.config, otherwise):
            yield self.error(row, job)

    def error(self, row: Exclusion, job: PlannedJob) -> UserError:
        """What a job is told that has the feature and an excluded value."""
        off = self.off if isinstance(self.off, str) else self.off(job.config)
        texts = {
            "key": row.key,
            "set": as_set(job.config, row.key),
            "chosen": self.name(job.config),
            "off": off,
        }
        texts["mesh"] = job.config.parallel.summary()

        def text(template: str) -> str:
            return template.format(config=job.config, **texts)

        return UserError(
            text(row.what or self.what), job.where(row.where or row.key), text(row.fix or self.fix)
        )


def _holding(rows: Sequence[Exclusion], config: Config, otherwise: bool) -> Iterator[Exclusion]:
    for row in rows:
        holds = row.when(config) if row.when else otherwise
        if holds and row.values.hold(value_of(config, row.key)):
            yield row


def value_of(config: Config, key: str) -> Any:
    """The value of `shard.stage`, or of `framework`."""
    section, _, name = key.rpartition(".")
    return getattr(getattr(config, section) if section else config, name)


def as_yaml(value: Any) -> str:
    """A value as a user writes it: true, null, {tokens: 0}."""
    if isinstance(value, Mapping):
        pairs = [
            f"{name}: {one:g}" if isinstance(one, float) else f"{name}: {as_yaml(one)}"
            for name, one in value.items()
        ]
        return "{" + ", ".join(pairs) + "}"
    return (
        {True: "true", False: "false", None: "null"}[value]
        if value is None or isinstance(value, bool)
        else f"{value}"
    )


def as_set(config: Config, key: str) -> str:
    """The key and its value as a user writes them: shard.reshard=false."""
    return f"{key}={as_yaml(value_of(config, key))}"
