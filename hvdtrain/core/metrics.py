"""Metrics as sums over samples, {"loss", "count", ...}: sums are added over steps and ranks, and a
metric is computed from them when shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hvdtrain.errors import UserError

# what a forward pass keeps: groups of arrays; all passes have the same number of groups
Part = tuple[tuple[np.ndarray, ...], ...]


class Concatenated:
    """Values of samples that are concatenated, not summed; "+" appends."""

    def __init__(self, parts: Sequence[Part] = ()) -> None:
        self._parts = tuple(parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts)

    def __add__(self, other: Any) -> Concatenated:
        """Concatenates; adding 0 changes nothing, as in a sum."""
        return Concatenated((*self._parts, *other)) if isinstance(other, Concatenated) else self

    __radd__ = __add__  # for 0 + x

    def __rmul__(self, times: int) -> Concatenated:
        """Returns the value for 1, and nothing for 0: the factor of a rank whose samples another
        rank counts."""
        return self if times else Concatenated()


# {"loss": sum, "right": sum, "count": n}: sums over samples, never means; the task declares their
# names. Device scalars, or vectors of a fixed length, during a step; after an allreduce floats and
# tuples. At a sync point also: "nonfinite" steps; "stop.signal", "stop.time" and "save", the flags
# of ranks (training/health/monitor.py); "over", whether the job's time is (training/loop.py);
# "phase.*", "rank.*" and "joules.*" (training/telemetry); and NOISE_SCALE_KEYS.
Sums = dict[str, Any]
# with log.noise_scale, keys in the sums of Learner.step()
NOISE_SCALE_KEYS = ("excess", "excess_inv", "big", "big_inv", "steps")
Better = Literal["max", "min"]


@dataclass(frozen=True)
class Metric:
    """A measure of a model's quality, as a function of sums over any samples."""

    name: str  # used in the fields val_<name>, train_<name> and best_<name> of events
    of: Callable[[Sums], float]  # NaN if unknown
    better: Better
    column: str = ""  # its short name on the screen; empty: the name
    percent: bool = False  # how reports show it

    @property
    def short_name(self) -> str:
        return self.column or self.name


def ratio(numerator: str, denominator: str) -> Callable[[Sums], float]:
    """Returns a function for the quotient of two sums; NaN if the denominator is 0."""

    def of(sums: Sums) -> float:
        return float(sums[numerator] / sums[denominator]) if sums[denominator] else math.nan

    return of


def is_better(value: float, other: float, better: Better) -> bool:
    """Whether a value is strictly better; any value is better than NaN."""
    return math.isnan(other) or (value > other if better == "max" else value < other)


def reaches(value: float, target: float, better: Better) -> bool:
    """Whether a value is as good as the target or better; NaN is not."""
    return value >= target if better == "max" else value <= target


def zero_sums(keys: Iterable[str]) -> Sums:
    """Returns the sums over no samples; a vector is a single 0 until it is added to another."""
    return dict.fromkeys(keys, 0.0) | {"count": 0}


def add_sums(a: Sums, b: Sums) -> Sums:
    """Adds a and b by name; a missing name counts as 0. Device scalars stay device scalars, so the
    host does not wait."""
    return {name: _add(a.get(name, 0.0), b.get(name, 0.0)) for name in a | b}


def host_value(value: Any) -> float | tuple[float, ...]:
    """Converts a sum to plain numbers: a float, or a tuple for a vector. The host waits for the
    device."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    return tuple(map(float, plain)) if isinstance(plain, (list, tuple)) else float(plain)


def _add(a: Any, b: Any) -> Any:
    if isinstance(a, tuple) or isinstance(b, tuple):  # vectors on the host
        return tuple((np.asarray(a) + np.asarray(b)).tolist())
    return a + b


def scalar(name: str, value: Any, where: str) -> Any:
    """Returns a number, or a device scalar without its gradient. Raises UserError for anything
    else."""
    value = value.detach() if hasattr(value, "detach") else value
    check_one_number(name, value, where)
    value = value.reshape(()) if hasattr(value, "reshape") else value
    return value.double() if hasattr(value, "double") else float(value)


def check_one_number(name: str, value: Any, where: str) -> None:
    """Raises UserError for anything but a number or an array of one. Does not read values."""
    if isinstance(value, (int, float, np.number)) or (
        hasattr(value, "shape") and math.prod(value.shape) == 1
    ):
        return
    if not hasattr(value, "shape"):
        raise UserError(
            f"{name} is a {type(value).__name__}, not a number",
            where,
            "a number, or a tensor of one",
        )
    what = f"{name} is of shape {tuple(value.shape)}, not one number"
    raise UserError(what, where, f"the mean over this rank's samples: {name}={name}.mean()")
