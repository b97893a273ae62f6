"""What every section of the configuration can do: say where its keys were set, and give a copy with other values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr

from hvdtrain.config.given import Given

COMMAND_LINE = "command line"  # the origin of a key=value argument
DEFAULT = "default"  # the origin of a key that nothing set


class Provenance(dict[str, str]):
    """key -> where it was set: "configs/x.yaml:14" or "command line". A key that is not here has its default."""

    def where(self, key: str) -> str:
        """`batch.size, configs/x.yaml:14`, ready for UserError.where."""
        return f"{key}, {self.get(key, DEFAULT)}"


class Section(BaseModel):
    """Frozen values of checked types and bounds. Two sections are equal where their values are, wherever these were set."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,  # "3" is no number, and 1 is not true: a file is judged as an editor judges it by the JSON Schema
        allow_inf_nan=False,
        defer_build=True,  # --help reads the fields only: validators are built when the first value is checked
        protected_namespaces=(),
    )
    section: ClassVar[str] = ""  # its name in the configuration; Config itself has none
    _provenance: Provenance = PrivateAttr(default_factory=Provenance)

    @classmethod
    def full_key(cls, key: str) -> str:
        """`batch.size` for the key `size` of the section batch."""
        return f"{cls.section}.{key}" if cls.section else key

    def origin(self, key: str) -> str:
        """Where a key was set: "configs/x.yaml:14", "command line" or "default"."""
        return self._provenance.get(self.full_key(key), DEFAULT)

    def where(self, key: str) -> str:
        """The key and where it was set, ready for UserError.where: `batch.size, configs/x.yaml:14`."""
        return self._provenance.where(self.full_key(key))

    def replace(self, **changes: Any) -> Self:
        """A copy with other values, which are not validated; it still knows where its keys were set. TypeError for an unknown key."""
        if unknown := changes.keys() - type(self).model_fields.keys():
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
        return self.model_copy(update=changes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Section) or type(self) is not type(other):
            return False
        return self.__dict__ == other.__dict__ and self.model_extra == other.model_extra

    __hash__ = None  # type: ignore[assignment]  # some values are lists


class OpenSection(Section):
    """A section whose `name` picks a plugin: keys that are not its own fields are options of that plugin."""

    model_config = ConfigDict(extra="allow")
    _given: Given | None = PrivateAttr(default=None)

    @property
    def given(self) -> Given | None:
        """What a script gives as an object."""
        return self._given

    def with_given(self, given: Given) -> Self:
        """A copy for which a script gives an object."""
        copy = self.model_copy()
        copy._given = given
        return copy

    def with_options(self, **options: Any) -> Self:
        """A copy with other options of the plugin, which are not validated."""
        assert not options.keys() & type(self).model_fields.keys(), options
        return self.model_copy(update=options)

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the plugin, as they were read."""
        return self.model_extra or {}
