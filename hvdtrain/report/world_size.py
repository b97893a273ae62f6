"""On how many ranks a run was at which time: of its starts, and of ranks that it lost meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hvdtrain.report.run import RunRecord, number


class Change(NamedTuple):
    """From here on a run has these ranks."""

    step: int
    seconds: float  # since its first event
    ranks: float  # NaN where the event does not tell
    hosts: list[Any]
    why: str


def changes(run: RunRecord) -> list[Change]:
    """In order; one alone where the run has had the same ranks from its only start on."""
    found: list[Change] = []
    living: dict[int, Any] = {}  # host of each rank, by the numbers of the launcher
    before: Mapping[str, Any] = {}
    for event in run.events:
        at, seconds = int(event["step"]), max(0.0, event["time"] - run.events[0]["time"])
        if event["kind"] == "start":
            living = dict(enumerate(_list(event, "host_of_rank")))
            why = _why_started(before) if found else "started"
            found.append(Change(at, seconds, number(event, "ranks"), _list(event, "hosts"), why))
        elif event["kind"] == "lost":
            lost = [rank for rank in _list(event, "ranks") if isinstance(rank, int)]
            living = {rank: host for rank, host in living.items() if rank not in lost}
            hosts = [host for index, host in enumerate(living.values()) if host not in list(living.values())[:index]]
            found.append(Change(at, seconds, number(event, "left"), hosts, f"{len(lost)} rank{'s' * (len(lost) != 1)} lost"))
        before = event
    return found


def _list(event: Mapping[str, Any], name: str) -> list[Any]:
    value = event.get(name)
    return value if isinstance(value, list) else []


def _why_started(before: Mapping[str, Any]) -> str:
    """before: the last event of the start before."""
    ended = {"stop": "stopped", "failed": "failed", "end": "ended"}.get(before["kind"])
    if ended is None:
        return "went on after a kill or the loss of a host"
    reason = before.get("reason")
    return f"{ended} ({reason}), went on" if isinstance(reason, str) else f"{ended}, went on"
