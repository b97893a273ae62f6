"""A section of the configuration: where its keys were set, copies with other values, and the object
that a script gives for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr

COMMAND_LINE = "command line"  # the origin of a key=value argument
DEFAULT = "default"  # the origin of a key that nothing set
_OBJECT = "<object of "


class Provenance(dict[str, str]):
    """key -> where it was set: "configs/x.yaml:14" or "command line". A key that is not here has
    its default."""

    def where(self, key: str) -> str:
        """`batch.size, configs/x.yaml:14`, ready for UserError.where."""
        return f"{key}, {self.get(key, DEFAULT)}"


class Section(BaseModel):
    """Frozen values of checked types and bounds. Two sections are equal where their values are,
    wherever these were set."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        # "3" is not a number, and 1 is not true: a file is judged as by an editor with the JSON
        # Schema
        strict=True,
        allow_inf_nan=False,
        # --help reads the fields only: validators are built when the first value is checked
        defer_build=True,
        protected_namespaces=(),
    )
    section: ClassVar[str] = ""  # its name in the configuration; Config itself has none
    # of keys that an extra has: the section, or the key of this section, that they come behind
    behind: ClassVar[str] = ""
    dividing: ClassVar[tuple[str, ...]] = ()  # keys that divide a model among ranks
    # a key -> the one that it belongs to, and the value without which it says nothing
    owners: ClassVar[Mapping[str, tuple[str, Any]]] = {}
    _provenance: Provenance = PrivateAttr(default_factory=Provenance)
    _given: Given | None = PrivateAttr(default=None)

    @property
    def given(self) -> Given | None:
        """The object that a script passes for this section, if any."""
        return self._given

    def with_given(self, given: Given) -> Self:
        """A copy for which a script gives an object."""
        copy = self.model_copy()
        copy._given = given
        return copy

    @classmethod
    def of(cls, config: BaseModel) -> Self:
        """The section of a configuration that has the keys of this class."""
        section = getattr(config, cls.section)
        assert isinstance(section, cls), cls.section
        return section

    @classmethod
    def full_key(cls, key: str) -> str:
        """`batch.size` for the key `size` of the section batch."""
        return f"{cls.section}.{key}" if cls.section else key

    def origin(self, key: str) -> str:
        """Where a key was set: "configs/x.yaml:14", "command line" or "default"."""
        return self._provenance.get(self.full_key(key), DEFAULT)

    def where(self, key: str) -> str:
        """The key and where it was set, ready for UserError.where: `batch.size,
        configs/x.yaml:14`."""
        return self._provenance.where(self.full_key(key))

    def readers_of(self, ranks: int) -> int:
        """The number of ranks, of so many, that divide the samples of a step among them, by the
        keys of this section."""
        return ranks

    def first_reader_of(self, ranks: int) -> int:
        """The first of so many ranks that reads samples of training."""
        return 0

    @property
    def is_asynchronous(self) -> bool:
        """Whether a step is of one rank alone, and which one makes it is not known before."""
        return False

    @property
    def needed_of_engine(self) -> frozenset[str]:
        """Features that the engine needs, which not every engine has."""
        return frozenset()

    def why_over(self, lost: Sequence[int], left: int) -> str:
        """Returns why a job cannot continue without dead ranks, with so many that are left; empty
        if it can."""
        return ""

    def replace(self, **changes: Any) -> Self:
        """A copy with other values, which are not validated; it still knows where its keys were
        set. TypeError for an unknown key."""
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

    name: str | None  # that stands in the configuration; None: the section keeps its own
    # what package.module:function would be; of a section that keeps its name: task -> task
    make: Callable[..., Any]
    # whose code and values must be the same on all ranks, by what a message calls them
    objects: Mapping[str, Any]
    # once training is over, on every rank, while the ranks are connected
    at_end: Callable[[Any], None] = lambda learner: None
    framework: str | None = None  # the one that it is for
    unset: Mapping[str, Any] = {}  # values of keys of its section, where nothing sets them
    # after at_end() what a script gets in its place, if that is another object
    trained: Callable[[], Any] = lambda: None


class OpenSection(Section):
    """A section whose `name` picks a plugin: keys that are not its own fields are options of that
    plugin."""

    model_config = ConfigDict(extra="allow")

    def with_options(self, **options: Any) -> Self:
        """A copy with other options of the plugin, which are not validated."""
        assert not options.keys() & type(self).model_fields.keys(), options
        return self.model_copy(update=options)

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the plugin, as they were read."""
        return self.model_extra or {}


def name_of_object(thing: Any) -> str:
    """<object of mine:Net>: the class of an object, or the function itself."""
    # a generator has no module
    named = (
        thing if hasattr(thing, "__qualname__") and hasattr(thing, "__module__") else type(thing)
    )
    return f"{_OBJECT}{named.__module__}:{named.__qualname__}>"


def is_object(name: str) -> bool:
    """Whether the name stands for an object that only a script has."""
    return name.startswith(_OBJECT)


def class_of_object(name: str) -> str:
    """The last word of the name of an object: Net of <object of mine:Net>, lambda of <object of
    mine:make.<locals>.<lambda>>."""
    return re.findall(r"\w+", name)[-1]


def go_on(section: str) -> str:
    """Returns the fix for a job whose objects only a script has: how to resume, evaluate and use
    it."""
    again = "start that script again, with resume=RUN in its hvdtrain.train()"
    by_path = {
        "optim": "; or optim.name=package.module:function, which makes the same optimizer",
        "model": "; or model.name=package.module:Class, which makes the same model",
        "data": "; or other data: data.name=",
    }
    return f"{again}; hvdtrain export RUN has the weights{by_path.get(section, '')}"
