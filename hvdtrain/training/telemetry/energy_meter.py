"""The joules and watts of a job: when its ranks read their energy counters, and what follows from the sums over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

from hvdtrain.core.metrics import Sums
from hvdtrain.training.telemetry.energy import KINDS, EnergyCounters

READ_EVERY_S = 1.0  # at least, between two readings: each is a call of the driver, or a file of the kernel
SHORTEST_S = 0.1  # of a span whose power is computed: over less time it means little


class EnergyMeter:
    """One on each rank. All ranks read their counters at the same sync points, so that the sum over ranks is of one span of time.

    `clock` is a monotonic one, in seconds; rank 0's decides when the counters are read.
    """

    def __init__(self, counters: EnergyCounters, rank: int, clock: Callable[[], float]) -> None:
        self._counters, self._decides, self._clock = counters, rank == 0, clock
        self.reasons = counters.reasons
        self.kinds = [kind for kind, reason in counters.reasons.items() if not reason]  # that are measured
        self._read_s = self._synced_s = clock()  # the last reading; the last sync point
        self._interval_s = 0.0  # between the last two sync points
        self._due = False  # all ranks read at the next sync point
        self._was_read = False  # the sums that all ranks add up now have a reading in them
        self._joules = 0.0  # of all ranks, since the last reading
        self._watts = math.nan
        counters.read()  # the job begins here

    def keep_up(self) -> None:
        """Call it between sync points: see EnergyCounters.keep_up."""
        self._counters.keep_up()

    def sync_sums(self) -> Sums:
        """This rank's joules at a sync point, to add up over ranks: zeros where the counters are not read at this one."""
        now_s = self._clock()
        self._interval_s, self._synced_s = now_s - self._synced_s, now_s
        return self.read_sums() if self._due else self._sums(dict.fromkeys(KINDS, 0.0), now_s - self._read_s)

    def read_sums(self) -> Sums:
        """Sums with a reading whatever the time. Every rank calls it."""
        self._was_read = True
        return self._sums(self._counters.read(), 0.0)

    def _sums(self, joules: dict[str, float], since_read_s: float) -> Sums:
        """The next sync point is expected after as much time as this one took: the counters are read there if that is late enough."""
        due = self._decides and since_read_s + self._interval_s >= READ_EVERY_S
        measured = {f"joules.{kind}": math.nan if self.reasons.get(kind) else joules[kind] for kind in KINDS}
        return {"joules.due": float(due), **measured}

    def update(self, sums: Sums) -> float:
        """Takes the sums over all ranks; returns the watts between the last two readings, NaN before there are two."""
        self._joules += sum(sums[f"joules.{kind}"] for kind in self.kinds)
        now_s = self._clock()
        passed_s = now_s - self._read_s
        if self._was_read and passed_s >= SHORTEST_S:
            self._watts = self._joules / passed_s if self.kinds else math.nan
            self._joules, self._read_s = 0.0, now_s
        self._was_read, self._due = False, sums["joules.due"] > 0
        return self._watts
