"""task.by_channel: the names of the channels of y, and the mean squared error of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.core.metrics import Sums
from hvdtrain.errors import UserError
from hvdtrain.tasks.points import Points

_MOST_CHANNELS = 256


def channel_names(asked: bool | Sequence[str], channels: int) -> tuple[str, ...]:
    """Raises UserError unless there is one name for each channel."""
    if asked is False:
        return ()
    names = tuple(map(str, range(1, channels + 1))) if asked is True else tuple(asked)
    if len(names) > _MOST_CHANNELS or len(names) != channels or not _are_names(names):
        what = f"task.by_channel={list(names[:8])} does not fit the {channels:,} channels of y"
        fix = f"true, or one name for each channel, of letters and digits; at most {_MOST_CHANNELS}"
        raise UserError(what, "task.by_channel", fix)
    return names


def _are_names(names: Sequence[str]) -> bool:
    words = all(isinstance(name, str) and f"mse_{name}".isidentifier() for name in names)
    return words and len(set(names)) == len(names)


def names_of_facts(facts: Mapping[str, Any], channels: int) -> tuple[str, ...]:
    """Raises ValueError if a checkpoint's names do not fit."""
    names = facts.get("by_channel", ())
    if not isinstance(names, (list, tuple)) or (names and len(names) != channels):
        raise ValueError("impossible names of channels")
    if "by_channel" in facts and not (names and _are_names(names)):
        raise ValueError("impossible names of channels")
    return tuple(names)


def mse_of_channel(number: int, points: Points, sums: Sums) -> float:
    """Computes the mean squared error of one channel over its points; NaN without any."""
    if not sums["count"]:
        return math.nan
    count = sums["points"][number] if points.has_gaps else sums["count"] * points.of_channel
    return float(sums["residual"][number] / count) if count else math.nan
