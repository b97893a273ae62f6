"""A section of the configuration: where its keys were set, copies with other values, and the object
that a script passes for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr

COMMAND_LINE = "command line"  # the origin of a key=value argument
DEFAULT = "default"  # the origin of a key that nothing set
_OBJECT = "<object of "


# a key -> the key that it belongs to, and the value without which it has no effect
Owners = Mapping[str, tuple[str, Any]]


class Provenance(dict[str, str]):
    """key -> where it was set: "configs/x.yaml:14" or "command line". A missing key has its
    default."""

    def where(self, key: str) -> str:
        """Returns the key and where it was set, for UserError.where: `batch.size,
        configs/x.yaml:14`."""
        return f"{key}, {self.get(key, DEFAULT)}"


class Section(BaseModel):
    """Frozen values of checked types and bounds. Two sections are equal if their values are equal,
    wherever the values were set."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        # "3" is not a number, and 1 is not true, just as in an editor with the JSON Schema
        strict=True,
        allow_inf_nan=False,
        # --help reads the fields only: validators are built when the first value is checked
        defer_build=True,
        protected_namespaces=(),
    )
    section: ClassVar[str] = ""  # its name in the configuration; Config itself has none
    # for keys of an extra: the section, or the key of this section, that they follow
    behind: ClassVar[str] = ""
    dividing: ClassVar[tuple[str, ...]] = ()  # keys that divide a model among ranks
    owners: ClassVar[Owners] = {}
    _provenance: Provenance = PrivateAttr(default_factory=Provenance)
    _given: Given | None = PrivateAttr(default=None)

    @property
    def given(self) -> Given | None:
        """The object that a script passes for this section, if any."""
        return self._given

    def with_given(self, given: Given) -> Self:
        """Returns a copy with an object that a script passes."""
        copy = self.model_copy()
        copy._given = given
        return copy

    @classmethod
    def of(cls, config: BaseModel) -> Self:
        """Returns the section of a configuration that has the keys of this class."""
        section = getattr(config, cls.section)
        assert isinstance(section, cls), cls.section
        return section

    @classmethod
    def full_key(cls, key: str) -> str:
        """Returns the full name of a key: `batch.size` for `size` in the section batch."""
        return f"{cls.section}.{key}" if cls.section else key

    def origin(self, key: str) -> str:
        """Returns where a key was set: "configs/x.yaml:14", "command line" or "default"."""
        return self._provenance.get(self.full_key(key), DEFAULT)

    def where(self, key: str) -> str:
        """Returns the key and where it was set, for UserError.where: `batch.size,
        configs/x.yaml:14`."""
        return self._provenance.where(self.full_key(key))

    def readers_of(self, ranks: int) -> int:
        """Returns how many of the ranks divide the samples of a step among themselves, according to
        this section."""
        return ranks

    def first_reader_of(self, ranks: int) -> int:
        """Returns the first of the ranks that reads training samples."""
        return 0

    @property
    def is_asynchronous(self) -> bool:
        """Whether a single rank takes each step, and it is not known in advance which one."""
        return False

    @property
    def needed_of_engine(self) -> frozenset[str]:
        """The optional features that the engine must support."""
        return frozenset()

    def why_over(self, lost: Sequence[int], left: int) -> str:
        """Returns why a job cannot continue without the dead ranks `lost`, with `left` remaining
        ranks; empty if it can."""
        return ""

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with other values, which are not validated; it keeps where its keys were
        set. Raises TypeError for an unknown key."""
        if unknown := changes.keys() - type(self).model_fields.keys():
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
        return self.model_copy(update=changes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Section) or type(self) is not type(other):
            return False
        return self.__dict__ == other.__dict__ and self.model_extra == other.model_extra

    __hash__ = None  # type: ignore[assignment]  # some values are lists


class Given(NamedTuple):
    """An object that a script passes for one section."""

    name: str | None  # its name in the configuration; None: the section keeps its name
    # replaces package.module:function; for a section that keeps its name: task -> task
    make: Callable[..., Any]
    # objects whose code and values must be equal on all ranks, by their names in messages
    objects: Mapping[str, Any]
    # called after training, on every rank, while the ranks are connected
    at_end: Callable[[Any], None] = lambda learner: None
    framework: str | None = None  # the framework that it requires
    also_trained_by: tuple[str, ...] = ()  # other frameworks that can train it
    unset: Mapping[str, Any] = {}  # values for keys of its section that are not set
    # returns the object that a script gets after at_end(), if it is a different one
    trained: Callable[[], Any] = lambda: None


class OpenSection(Section):
    """A section whose `name` selects a plugin. Keys that are not fields of the section are options
    of that plugin."""

    model_config = ConfigDict(extra="allow")

    def with_options(self, **options: Any) -> Self:
        """Returns a copy with other options of the plugin, which are not validated."""
        assert not options.keys() & type(self).model_fields.keys(), options
        return self.model_copy(update=options)

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the plugin, unconverted."""
        return self.model_extra or {}


def name_of_object(thing: Any) -> str:
    """Returns the name of an object's class, or of a function, as <object of mine:Net>."""
    # a generator has no module
    named = (
        thing if hasattr(thing, "__qualname__") and hasattr(thing, "__module__") else type(thing)
    )
    return f"{_OBJECT}{named.__module__}:{named.__qualname__}>"


def is_object(name: str) -> bool:
    """Whether the name stands for a script's object."""
    return name.startswith(_OBJECT)


def class_of_object(name: str) -> str:
    """Returns the last word of an object's name: Net for <object of mine:Net>, lambda for <object
    of mine:make.<locals>.<lambda>>."""
    return re.findall(r"\w+", name)[-1]


def go_on(section: str) -> str:
    """Returns the fix for a job with a script's objects: how to resume, evaluate and use it."""
    again = "start that script again, with resume=RUN in its hvdtrain.train()"
    by_path = {
        "optim": "; or optim.name=package.module:function, which makes the same optimizer",
        "model": "; or model.name=package.module:Class, which makes the same model",
        "data": "; or other data: data.name=",
    }
    return f"{again}; hvdtrain export RUN has the weights{by_path.get(section, '')}"
