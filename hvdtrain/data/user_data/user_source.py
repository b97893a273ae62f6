"""Sources of user classes, which need not derive from a class of hvdtrain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdtrain.data.channel_stats import ChannelStats
from hvdtrain.data.field import Channels, Field
from hvdtrain.data.source import Foresight, LabelledImages, Source

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch

MEMBERS = ("fields", "read", "digests", "identity", "__len__")
_OF_IMAGES = (
    "shape",
    "classes",
    "class_names",
    "labels",
    "stats",
    "label_digest",
    "image_digest",
)


def user_source(found: Any) -> Source:
    """Returns a user's object with the MEMBERS of a source as a Source."""
    if isinstance(found, LabelledImages):
        return found
    if all(hasattr(found, member) for member in _OF_IMAGES):
        return UserImages(found)
    return found if isinstance(found, Source) else UserSource(found)


class UserSource(Source):
    """Wraps a user's object with the abstract members of a source, and maybe others."""

    def __init__(self, user_object: Any) -> None:
        self.user_object = user_object

    @property
    def source(self) -> Source | None:
        """The source that the object wraps, used by inner_source()."""
        found = getattr(self.user_object, "source", None)
        return found if isinstance(found, Source) else None

    @property
    def has_encoded_columns(self) -> bool:
        return self.source is not None and self.source.has_encoded_columns

    @property
    def where(self) -> str:
        return str(getattr(self.user_object, "where", "") or "")

    @property
    def fields(self) -> Mapping[str, Field]:
        fields: Mapping[str, Field] = self.user_object.fields
        return fields

    def __len__(self) -> int:
        return len(self.user_object)

    def read(self, indices: np.ndarray) -> Batch:
        batch: Batch = self.user_object.read(indices)
        return batch

    def digests(self, seed: int) -> dict[str, str]:
        digests: dict[str, str] = self.user_object.digests(seed)
        return digests

    def identity(self) -> dict[str, str]:
        identity: dict[str, str] = self.user_object.identity()
        return identity

    def read_in_epochs(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> Batch:
        read = getattr(self.user_object, "read_in_epochs", None)
        batch: Batch = self.read(indices) if read is None else read(indices, epochs, seed)
        return batch

    def known_labels(self) -> np.ndarray | None:
        return self._known("known_labels")

    def known_lengths(self, name: str) -> np.ndarray | None:
        return self._known("known_lengths", name)

    def known_stats(
        self, name: str, indices: np.ndarray | None = None, channels: Channels = "last"
    ) -> np.ndarray | None:
        # a source of the user's knows only the last axis
        return self._known("known_stats", name, indices) if channels == "last" else None

    def _known(self, member: str, *arguments: Any) -> np.ndarray | None:
        method = getattr(self.user_object, member, None)
        known: np.ndarray | None = None if method is None else method(*arguments)
        return known

    @property
    def foresight(self) -> Foresight | None:
        foresight: Foresight | None = getattr(self.user_object, "foresight", None)
        return foresight

    def expect(self, indices: np.ndarray, anew: bool) -> None:
        self.user_object.expect(indices, anew)

    @property
    def crops_at_random(self) -> bool:
        return bool(getattr(self.user_object, "crops_at_random", False))

    @property
    def reads_from_memory(self) -> bool:
        return bool(getattr(self.user_object, "reads_from_memory", False))

    @property
    def reads_in_process(self) -> bool:
        return bool(getattr(self.user_object, "reads_in_process", False))

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(getattr(self.user_object, "class_names", ()))

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(getattr(self.user_object, "notes", ()))

    @property
    def nested_inputs(self) -> tuple[str, ...]:
        return tuple(getattr(self.user_object, "nested_inputs", ()))


class UserImages(UserSource, LabelledImages):
    """Wraps a user's object with all members of labelled images."""

    @property
    def shape(self) -> tuple[int, int, int]:
        shape: tuple[int, int, int] = self.user_object.shape
        return shape

    @property
    def classes(self) -> int:
        return int(self.user_object.classes)

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(self.user_object.class_names)

    def labels(self) -> np.ndarray:
        labels: np.ndarray = self.user_object.labels()
        return labels

    def known_labels(self) -> np.ndarray:
        return self.labels()

    def stats(self) -> ChannelStats:
        stats: ChannelStats = self.user_object.stats()
        return stats

    def label_digest(self) -> str:
        return str(self.user_object.label_digest())

    def image_digest(self, seed: int) -> str:
        return str(self.user_object.image_digest(seed))
