"""When a job must be over: guard.max_time, or the end that SLURM has set."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import NamedTuple

from hvdtrain.config.duration import parse_duration

WINDOWS_LEFT = 1.5  # of the longest time between two sync points: the next one must be in time
SAVES_LEFT = 2.0  # times the longest checkpoint: file systems are busy when many jobs end
MAX_TIME_MARGIN_S = 2.0
SLURM_MARGIN_S = 10.0  # SLURM kills the job, and its clock may differ from that of this host
SQUEUE_S = 5.0  # timeout of squeue


class Limit(NamedTuple):
    reason: str
    left_s: float  # now
    margin_s: float


class Deadline:
    """The earlier of max_time after started_s and the end that SLURM has set. On rank 0 alone: it runs squeue.

    started_s is of `clock`, a monotonic one; now_s is the time since the epoch (time.time()). SLURM's time of day is converted to the
    monotonic clock here, once: setting the host's clock later changes nothing.
    """

    def __init__(
        self, max_time: str | None, environ: Mapping[str, str], started_s: float, now_s: float, clock: Callable[[], float]
    ) -> None:
        limits: list[Limit] = []
        if max_time is not None:
            left_s = parse_duration(max_time, "guard.max_time") - (clock() - started_s)
            limits.append(Limit(f"guard.max_time={max_time}", left_s, MAX_TIME_MARGIN_S))
        end_s = slurm_end(environ, now_s)
        if end_s is not None:
            when = datetime.fromtimestamp(end_s).strftime("%Y-%m-%d %H:%M:%S")
            reason = f"SLURM ends job {environ.get('SLURM_JOB_ID', '?')} at {when}"
            limits.append(Limit(reason, end_s - now_s, SLURM_MARGIN_S))
        first = min(limits, key=lambda limit: limit.left_s - limit.margin_s, default=None)
        self.reason = first.reason if first else ""
        self._clock = clock
        self._margin_s = first.margin_s if first else 0.0
        self._end_s = clock() + first.left_s - first.margin_s if first else None

    def near(self, longest_s: float, save_s: float) -> bool:
        """Whether the job should stop now; longest_s, save_s: the longest time so far between two sync points, and of a checkpoint."""
        if self._end_s is None:
            return False
        return self._end_s - self._clock() < WINDOWS_LEFT * longest_s + SAVES_LEFT * save_s

    def left_s(self) -> float:
        """Until the end itself; infinite without one."""
        return math.inf if self._end_s is None else max(0.0, self._end_s + self._margin_s - self._clock())


def slurm_end(environ: Mapping[str, str], now_s: float) -> float | None:
    """Seconds since the epoch; None without SLURM, without a limit, or where SLURM does not answer.

    An end that is over by now belongs to a job whose shell this process was started from, not to this one.
    """
    end_time = environ.get("SLURM_JOB_END_TIME", "")
    end_s = float(end_time) if re.fullmatch(r"[0-9]{1,10}", end_time) else _squeue_end(environ)
    return end_s if end_s is not None and end_s > now_s else None


def _squeue_end(environ: Mapping[str, str]) -> float | None:
    """squeue's answer: "2026-11-21T10:00:00" in local time, or a word where there is no end."""
    job = environ.get("SLURM_JOB_ID", "")
    if not re.fullmatch(r"[0-9]{1,12}", job):
        return None
    command = ["squeue", "-h", "-j", job, "-o", "%e"]
    try:
        answer = subprocess.run(
            command, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SQUEUE_S, check=False
        )
        return None if answer.returncode else datetime.strptime(answer.stdout.strip(), "%Y-%m-%dT%H:%M:%S").timestamp()
    except (OSError, ValueError, subprocess.TimeoutExpired):  # no squeue here, "N/A", a controller that is down: no limit is known
        return None
