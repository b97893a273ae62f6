"""checkpoint.every=auto: the cheapest time between two checkpoints, from the cost of one and the
rate of faults."""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from pathlib import Path
from typing import NamedTuple

from hvdtrain.core.folder import Folder
from hvdtrain.training.checkpoint.optimal_interval import optimal_interval_s

# assumed until the run has met faults: counts as one fault in that time
UNKNOWN_MTBF_S = 24 * 3600.0
LONGEST_S = 24 * 3600.0  # if checkpoint.every_minutes sets no bound
SHORTEST_S = 10.0
# times the duration of a checkpoint, including the background write, so that nine tenths of the
# disk's time remain free
SHORTEST = 10.0
# number of checkpoints in the median of costs: on a shared machine, one may take ten times as long
# as the next
_OF_LAST = 5
_TOLD = 1.5  # a line reports an interval that has changed by this factor

_EVENT = re.compile(rb'\{"time": ?([0-9.]+), ?"kind": ?"(\w+)"')
_STREAM_BYTES = 2**22


class Faults(NamedTuple):
    """The faults of a run so far."""

    faults: int = 0
    seconds: float = 0.0  # running time of its ranks

    @property
    def mtbf_s(self) -> float:
        """The mean time between faults. One fault in UNKNOWN_MTBF_S is added, so that a run without
        faults has a value, too."""
        return (self.seconds + UNKNOWN_MTBF_S) / (self.faults + 1)


def faults_of(run: Path) -> Faults:
    """Counts faults in events.jsonl: lost ranks, failed starts, and starts without an end before
    the next one."""
    count = 0
    seconds = 0.0
    open_since = math.nan
    last_s = 0.0
    try:
        with Folder.open(run) as folder, folder.open_file("events.jsonl") as file:
            while line := file.readline(_STREAM_BYTES):
                match = _EVENT.match(line[max(0, line.rfind(b'{"time":')) :])
                if match is None:
                    continue
                try:
                    time_s = float(match[1])
                    kind = match[2].decode()
                except ValueError:  # a damaged line
                    continue
                if kind == "start":
                    count += not math.isnan(open_since)  # the previous start was killed
                    seconds += 0.0 if math.isnan(open_since) else max(0.0, last_s - open_since)
                    open_since = time_s
                elif kind in ("end", "stop", "failed") and not math.isnan(open_since):
                    count += kind == "failed"
                    seconds += max(0.0, time_s - open_since)
                    open_since = math.nan
                count += kind == "lost"
                last_s = time_s
    except OSError:
        return Faults()
    return Faults(
        count, seconds + (0.0 if math.isnan(open_since) else max(0.0, last_s - open_since))
    )


class AutoInterval:
    """The interval of checkpoints on rank 0, which decides for all ranks at a sync point.

    mtbf_hours: guard.mtbf_hours; None: measured from the run's events. longest_s:
    checkpoint.every_minutes. guessed_s: the assumed cost before the first checkpoint is written.
    """

    def __init__(
        self, run: Path, mtbf_hours: float | None, longest_s: float | None, guessed_s: float
    ) -> None:
        self._run = run
        self._mtbf_hours = mtbf_hours
        self._longest_s = LONGEST_S if longest_s is None else longest_s
        self._faults = Faults()
        self._costs: deque[tuple[float, float]] = deque(maxlen=_OF_LAST)  # pause, pause and write
        self._told_s = 0.0
        self.seconds = 0.0
        self._set(guessed_s, guessed_s)

    def measured(self, pause_s: float, write_s: float) -> str:
        """Records the pause and the write time of a checkpoint; returns a line if the interval has
        changed."""
        self._costs.append((pause_s, pause_s + write_s))
        cost_s, whole_s = map(statistics.median_low, zip(*self._costs, strict=True))
        self._set(cost_s, whole_s)
        changed = max(self.seconds, self._told_s) > _TOLD * min(self.seconds, self._told_s)
        if not changed:
            return ""
        self._told_s = self.seconds
        return (
            f"checkpoint every {_text(self.seconds)}{self._bound}: it stops training for "
            f"{cost_s:.3g} s, a fault every {self._why}"
        )

    def _set(self, pause_s: float, whole_s: float) -> None:
        mtbf_s = self._mtbf_s()
        best_s = optimal_interval_s(pause_s, mtbf_s)
        shortest_s = max(SHORTEST_S, SHORTEST * whole_s)
        self.seconds = min(max(best_s, shortest_s), self._longest_s)
        self._bound = ""
        if self.seconds == self._longest_s < best_s:
            self._bound = " (checkpoint.every_minutes)"
        elif self.seconds > best_s:
            self._bound = (
                " (the shortest)"
                if self.seconds == SHORTEST_S
                else f" ({SHORTEST:g} times what its write takes)"
            )

    def _mtbf_s(self) -> float:
        if self._mtbf_hours is not None:
            self._why = f"{_text(3600 * self._mtbf_hours)} (guard.mtbf_hours)"
            return 3600 * self._mtbf_hours
        self._faults = faults_of(self._run)
        self._why = f"{_text(self._faults.mtbf_s)} ({self._faults.faults} so far)"
        return self._faults.mtbf_s


def _text(seconds: float) -> str:
    """Formats seconds: 90 s, 12 min, 3.5 h."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
