"""Rule: an optimizer as a pair of pure functions over arrays of any framework."""

from __future__ import annotations

from typing import Any, Protocol

from hvdtrain.state import Hyper

Array = Any  # of the framework whose namespace xp is


class Rule(Protocol):
    """How one parameter moves. `slots` is what the rule remembers of it, each of the parameter's shape."""

    def init(self, p: Array, xp: Any) -> tuple[Array, ...]:
        """The slots before the first step."""

    def update(self, g: Array, slots: tuple[Array, ...], p: Array, h: Hyper, xp: Any) -> tuple[Array, tuple[Array, ...]]:
        """(delta, new slots): p + delta is the new parameter; g is the gradient of the mean loss. Changes nothing in place."""
