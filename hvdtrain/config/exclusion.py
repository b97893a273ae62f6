"""Values of keys that do not go together, as data, and how a message words them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from hvdtrain.config.schema import SECTIONS, Config
from hvdtrain.errors import UserError

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
    """Values of a key that are rejected, what a message says of them, and what it says to do
    instead.

    The texts are templates: {set} is the key with its value, {key} the key, {config} the
    configuration of the job. In rows of a feature {chosen} is what turns the feature on, {off} what
    turns it off, {mesh} the parallel.tensor and parallel.pipeline of the job, {engine} its engine,
    {ranks} their number. An empty text is that of the feature.
    """

    key: str
    values: Values
    what: str = ""
    fix: str = ""
    where: str = ""  # the key that a message gives the place of; empty: the excluded one
    when: When | None = None  # None: wherever the feature is on
    why: str = ""  # for docs/combinations.md; empty: that of the feature
    words: str = ""  # what an example needs besides: a value that is an error by itself elsewhere

    def holds(self, config: Config, otherwise: bool = True) -> bool:
        """Whether a configuration has a rejected value; otherwise: whether a row without a
        condition applies."""
        applies = self.when(config) if self.when else otherwise
        return applies and bool(self.values.hold(value_of(config, self.key)))

    def errors(self, config: Config) -> Iterator[UserError]:
        """The error of a row that belongs to no feature."""
        if self.holds(config):
            yield worded(self.key, self.where or self.key, self.what, self.fix, config, {})


def no_effect(
    key: str, values: Values, without: str, fix: str = "", when: When | None = None
) -> Exclusion:
    """A row for values that mean nothing without other words; fix: these, where they differ."""
    return Exclusion(
        key,
        values,
        what=f"{{set}} has no effect without {without}",
        fix=f"{fix or without}, or leave {{key}} out",
        when=when,
    )


def options(
    without: str, examples: Mapping[str, Any], fix: str = "", when: When | None = None
) -> tuple[Exclusion, ...]:
    """Rows for keys that mean nothing without other words; examples: for each key another value
    than its default."""
    return tuple(
        no_effect(key, other_than(default_of(key), example), without, fix, when)
        for key, example in examples.items()
    )


def worded(
    key: str, where: str, what: str, fix: str, config: Config, texts: Mapping[str, Any]
) -> UserError:
    """An error from templates; texts: what they name besides {key}, {set} and {config}."""
    named = {"key": key, "set": as_set(config, key), "config": config, **texts}
    return UserError(what.format(**named), config.where(where), fix.format(**named))


def default_of(key: str) -> Any:
    """The value of a key that is not set."""
    section, _, name = key.rpartition(".")
    fields = (SECTIONS[section] if section else Config).model_fields
    return fields[name].get_default(call_default_factory=True)


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
