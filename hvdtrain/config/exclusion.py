"""Values of keys that exclude each other, as data, and the texts of their messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from hvdtrain.config.schema import SECTIONS, Config
from hvdtrain.errors import UserError

When = Callable[[Config], bool]


class Values(NamedTuple):
    """Some values of a key."""

    hold: Callable[[Any], bool]
    example: Any  # one of these values


def among(*values: Any) -> Values:
    return Values(lambda value: value in values, values[0])


def above(limit: int) -> Values:
    return Values(lambda value: value > limit, limit + 1)


def other_than(usual: Any, example: Any) -> Values:
    return Values(lambda value: value != usual, example)


class Exclusion(NamedTuple):
    """Values of a key that are rejected, and the texts of the message.

    The texts are templates: {set} is the key with its value, {key} the key, {config} the
    configuration of the job. In rows of a feature {chosen} turns the feature on, {off} turns it
    off, {mesh} is the job's parallel.tensor and parallel.pipeline, {engine} its engine, {ranks} its
    number of ranks. For an empty text, the feature's text is used.
    """

    key: str
    values: Values
    what: str = ""
    fix: str = ""
    where: str = ""  # the message shows where this key was set; empty: the excluded key
    when: When | None = None  # None: whenever the feature is on
    why: str = ""  # reason for docs/combinations.md; empty: the feature's reason
    words: str = ""  # more settings that the example needs to be valid

    def holds(self, config: Config, otherwise: bool = True) -> bool:
        """Whether a configuration has a rejected value. otherwise: whether a row without a
        condition applies."""
        applies = self.when(config) if self.when else otherwise
        return applies and bool(self.values.hold(value_of(config, self.key)))

    def errors(self, config: Config) -> Iterator[UserError]:
        """Yields the error of a row that belongs to no feature."""
        if self.holds(config):
            yield worded(self.key, self.where or self.key, self.what, self.fix, config, {})


def no_effect(
    key: str, values: Values, without: str, fix: str = "", when: When | None = None
) -> Exclusion:
    """Returns a row for values that have no effect without other settings. fix: the settings for
    the message, if they differ."""
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
    """Returns rows for keys that have no effect without other settings. examples: for each key a
    value other than its default."""
    return tuple(
        no_effect(key, other_than(default_of(key), example), without, fix, when)
        for key, example in examples.items()
    )


def worded(
    key: str, where: str, what: str, fix: str, config: Config, texts: Mapping[str, Any]
) -> UserError:
    """Fills in the templates of an error; texts: further names besides {key}, {set} and
    {config}."""
    named = {"key": key, "set": as_set(config, key), "config": config, **texts}
    return UserError(what.format(**named), config.where(where), fix.format(**named))


def default_of(key: str) -> Any:
    """Returns the default of a key."""
    section, _, name = key.rpartition(".")
    fields = (SECTIONS[section] if section else Config).model_fields
    return fields[name].get_default(call_default_factory=True)


def value_of(config: Config, key: str) -> Any:
    """Returns the value of `shard.stage`, or of `framework`."""
    section, _, name = key.rpartition(".")
    return getattr(getattr(config, section) if section else config, name)


def as_yaml(value: Any) -> str:
    """Formats a value as in YAML: true, null, {tokens: 0}."""
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
    """Formats the key and its value as an argument: shard.reshard=false."""
    return f"{key}={as_yaml(value_of(config, key))}"
