"""Reads the energy counters at sync points, and derives the power."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from hvdtrain.core.metrics import Sums
from hvdtrain.extras.energy.counters import KINDS, EnergyCounters

READ_EVERY_S = (
    1.0  # at least, between two readings: each is a call of the driver, or a file of the kernel
)
# shortest interval for which power is computed; it would be meaningless over less time
SHORTEST_S = 0.1


class EnergyMeter:
    """Reads the energy counters, one object on each rank. All ranks read at the same sync points,
    so that sums over ranks cover the same time.

    clock: monotonic, in seconds; rank 0's decides when counters are read.
    """

    def __init__(self, counters: EnergyCounters, rank: int, clock: Callable[[], float]) -> None:
        self._counters = counters
        self._decides = rank == 0
        self._clock = clock
        self.reasons = counters.reasons
        # kinds that are measured
        self.kinds = [kind for kind, reason in counters.reasons.items() if not reason]
        self._read_s = self._synced_s = clock()  # the last reading; the last sync point
        self._interval_s = 0.0  # between the last two sync points
        self._due = False  # all ranks read at the next sync point
        self._was_read = False  # the current sums over ranks contain a reading
        self._joules = 0.0  # joules of all ranks since the last reading
        self._watts = math.nan
        counters.read()  # the job begins here

    def keep_up(self) -> None:
        """Calls EnergyCounters.keep_up(); call it between sync points."""
        self._counters.keep_up()

    def sync_sums(self) -> Sums:
        """Returns this rank's joules at a sync point, to sum over ranks; zeros if counters are not
        read at this one."""
        now_s = self._clock()
        self._interval_s = now_s - self._synced_s
        self._synced_s = now_s
        return (
            self.read_sums()
            if self._due
            else self._sums(dict.fromkeys(KINDS, 0.0), now_s - self._read_s)
        )

    def read_sums(self) -> Sums:
        """Sums with a reading, regardless of the time. Every rank calls it."""
        self._was_read = True
        return self._sums(self._counters.read(), 0.0)

    def _sums(self, joules: dict[str, float], since_read_s: float) -> Sums:
        """Adds the reading, and decides whether the next sync point reads counters; it is expected
        after as much time as this one took."""
        due = self._decides and since_read_s + self._interval_s >= READ_EVERY_S
        measured = {
            f"joules.{kind}": math.nan if self.reasons.get(kind) else joules[kind] for kind in KINDS
        }
        return {"joules.due": float(due), **measured}

    def update(self, sums: Sums) -> float:
        """Reads the sums over all ranks; returns the watts between the last two readings, NaN
        before there are two."""
        self._joules += sum(sums[f"joules.{kind}"] for kind in self.kinds)
        now_s = self._clock()
        passed_s = now_s - self._read_s
        if self._was_read and passed_s >= SHORTEST_S:
            self._watts = self._joules / passed_s if self.kinds else math.nan
            self._joules = 0.0
            self._read_s = now_s
        self._was_read = False
        self._due = sums["joules.due"] > 0
        return self._watts


def summary(reasons: Mapping[str, str]) -> str:
    """Returns one line: energy  GPUs by NVML; processors not measured: no
    /sys/class/powercap/intel-rapl here."""
    parts = []
    for kind, (things, method) in KINDS.items():
        if kind in reasons:
            parts.append(
                f"{things} not measured: {reasons[kind]}"
                if reasons[kind]
                else f"{things} by {method}"
            )
    return f"energy  {'; '.join(parts)}"
