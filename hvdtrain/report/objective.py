"""Which metrics a run has, and which one of them decides: from its event "start", whatever that holds."""

from __future__ import annotations

import math
from typing import NamedTuple

from hvdtrain.report.run import RunRecord

_LONGEST = 40  # characters of a name
_MOST = 16  # metrics


class RunMetric(NamedTuple):
    """A metric of a run's task."""

    name: str
    lower_is_better: bool = False
    percent: bool = False

    def shown(self, value: float) -> str:
        """Empty for NaN."""
        if not math.isfinite(value):
            return ""
        return f"{100 * value:.2f}%" if self.percent else f"{value:.4g}"


ACCURACY = RunMetric("accuracy", percent=True)
_OLDER = {"loss": RunMetric("loss", lower_is_better=True), "accuracy": ACCURACY}  # of a run from before there were other tasks


def metrics_of(run: RunRecord) -> dict[str, RunMetric]:
    """By name."""
    described = run.start_event.get("metrics")
    if not isinstance(described, dict):
        return _OLDER
    found = {}
    for name, how in list(described.items())[:_MOST]:
        if isinstance(how, dict) and name.isprintable() and 0 < len(name) <= _LONGEST:
            found[name] = RunMetric(name, how.get("better") == "min", how.get("percent") is True)
    return found


def objective_of(run: RunRecord) -> RunMetric:
    """The metric of stop.target and checkpoint.keep_best."""
    name = run.start_event.get("objective")
    return metrics_of(run).get(name, ACCURACY) if isinstance(name, str) else ACCURACY
