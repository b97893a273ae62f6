"""The samples of a custom loop as a JAX tree. Compiled functions take a batch and draw random
numbers with its key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from hvdtrain.frameworks.jax.model import key_of
from hvdtrain.frameworks.user_loop import Samples


def _no_key() -> np.ndarray:
    return np.zeros(2, np.uint32)


@dataclass(frozen=True)
class KeyedSamples(Samples):
    """Samples for compiled functions: a tree of fields and numbers. Each rank has a different
    key."""

    key_data: Any = field(default_factory=_no_key)

    @property
    def key(self) -> jax.Array:
        """The random key from seed, step and rank, for dropout; parts of a batch share it."""
        return key_of(self.key_data)


_NUMBERS = ("count", "step", "epoch", "ends_epoch", "key_data")


def _flatten(samples: KeyedSamples) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    return (*samples.fields.values(), *(getattr(samples, name) for name in _NUMBERS)), tuple(
        samples.fields
    )


def _unflatten(names: tuple[str, ...], children: Sequence[Any]) -> KeyedSamples:
    fields = dict(zip(names, children[: len(names)], strict=True))
    return KeyedSamples(fields, **dict(zip(_NUMBERS, children[len(names) :], strict=True)))


jax.tree_util.register_pytree_node(KeyedSamples, _flatten, _unflatten)
