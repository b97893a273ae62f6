"""Settings of an engine from Horovod's environment variables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from hvdtrain.errors import UserError

FUSION_BYTES = 4 << 20  # on CPUs, a larger size makes an allreduce slower: docs/performance.md


class Settings(NamedTuple):
    """Horovod's environment variables that are supported here. Times in seconds; None: never."""

    fusion_bytes: int = FUSION_BYTES  # HOROVOD_FUSION_THRESHOLD
    warn_s: float | None = 60.0  # HOROVOD_STALL_CHECK_TIME_SECONDS
    end_s: float | None = (
        300.0  # HOROVOD_STALL_SHUTDOWN_TIME_SECONDS; guard.stall_s has the same default
    )
    timeline: str | None = None  # HOROVOD_TIMELINE: a path
    marks_cycles: bool = False  # HOROVOD_TIMELINE_MARK_CYCLES
    deadlock_s: float = 2.0  # without progress while every rank waits: no rank can continue


def settings_of(environ: Mapping[str, str]) -> Settings:
    """Reads the settings. Raises UserError for a value that is not a number or not valid."""
    path = environ.get("HOROVOD_TIMELINE") or None
    default = Settings(
        timeline=None if path == "DYNAMIC" else path,  # Horovod's word for: not from the beginning
        marks_cycles=bool(_number(environ, "HOROVOD_TIMELINE_MARK_CYCLES", 0.0)),
    )
    if _number(environ, "HOROVOD_STALL_CHECK_DISABLE", 0.0):
        return default._replace(fusion_bytes=_fusion_bytes(environ), warn_s=None, end_s=None)
    return default._replace(
        fusion_bytes=_fusion_bytes(environ),
        warn_s=_number(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", default.warn_s),
        end_s=_number(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", default.end_s),
    )


def _fusion_bytes(environ: Mapping[str, str]) -> int:
    number = _number(environ, "HOROVOD_FUSION_THRESHOLD", FUSION_BYTES) or 0
    if math.isinf(number):
        raise _unusable(
            environ,
            "HOROVOD_FUSION_THRESHOLD",
            "a number of bytes, as 67108864; 0: nothing is fused",
        )
    return int(number)


def _number(environ: Mapping[str, str], name: str, default: float | None) -> float | None:
    """Returns the number; None for 0, which switches the limit off."""
    text = environ.get(name)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number >= 0:
        raise _unusable(environ, name, "a number; 0 switches it off")
    return number or None


def _unusable(environ: Mapping[str, str], name: str, fix: str) -> UserError:
    return UserError(
        f"{name}={environ[name]!r} is not a number of 0 or more", "the environment", fix
    )
