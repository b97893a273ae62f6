"""A straggler on purpose: ranks that are stopped for a while, and what the job says of them."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, NoReturn

from hvdtrain.cli.drill.victims import Rank, send
from hvdtrain.cli.drill.watch import lines_of, wait

_USUAL = 20  # sync points before: the median of the times between them is the usual time


class Pause(NamedTuple):
    """One pause; None: not seen."""

    ranks: list[int]
    step: int  # of the last sync point before
    pause_s: float
    usual_s: float | None  # between two sync points, before
    window_s: float | None  # between the two sync points around the pause, an evaluation there included
    slowest_rank: int | None  # as the job says; None: one rank, or it ended
    said: str  # that ended the job or its start: an event and its message
    go_on_s: float | None  # from the end of the pause to the next sync point


def pause(run: Path, victims: Sequence[Rank], pause_s: float, wait_s: float) -> Pause:
    """Stops them, lets them go on after pause_s even where it is interrupted, and waits for the job."""
    path = run / "events.jsonl"
    before = lines_of(path)
    began_s = time.time()
    with _signals_as_exceptions():
        try:
            for victim in victims:
                send(victim, signal.SIGSTOP)
            time.sleep(pause_s)
        finally:
            for victim in victims:
                send(victim, signal.SIGCONT)
    ranks, ended_s = [victim.rank for victim in victims], time.time()
    return wait(lambda: measure_pause(ranks, began_s, ended_s, before, lines_of(path)[len(before) :]), wait_s) or _never(
        ranks, pause_s, before
    )


@contextlib.contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a terminal that is closed, end this process as an error does, so that what is stopped goes on first."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    former = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def measure_pause(
    ranks: list[int], began_s: float, ended_s: float, before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]
) -> Pause | None:
    """What the job said of a pause; None while it has said nothing."""
    found = _never(ranks, ended_s - began_s, before)
    last = next((event for event in after if event["kind"] in ("failed", "lost", "stop", "end")), None)
    on = next((event for event in after if event["kind"] == "step" and event["time"] > ended_s), None)
    if last is not None:
        return found._replace(said=": ".join(filter(None, (last["kind"], _message(last)))), go_on_s=_since(ended_s, on))
    if on is None:
        return None
    steps = [*_steps(before)[-1:], *_steps(after)]
    around_s, event = max(((two["time"] - one["time"], two) for one, two in pairwise(steps)), key=lambda pair: pair[0], default=(None, on))
    window_s = None if around_s is None else round(around_s, 3)
    return found._replace(window_s=window_s, slowest_rank=event.get("slowest_rank"), go_on_s=_since(ended_s, on))


def pause_lines(pauses: Sequence[Pause]) -> list[str]:
    """The table."""
    found = [f"{'paused':>16} {'at step':>9} {'for':>9} {'sync point after':>17} {'usually':>9}  the job says"]
    for one in pauses:
        said = one.said or ("nothing" if one.window_s is None else "no slowest rank" if one.slowest_rank is None else _slowest(one))
        times = f"{one.pause_s:7.2f} s {_s(one.window_s):>17} {_s(one.usual_s):>9}"
        found.append(f"{'rank ' + ','.join(map(str, one.ranks)):>16} {one.step:>9} {times}  {said}")
    return found


def _slowest(one: Pause) -> str:
    return f"slowest is rank {one.slowest_rank}" + ("" if one.slowest_rank in one.ranks else ", which was not paused")


def _never(ranks: list[int], pause_s: float, before: Sequence[dict[str, Any]]) -> Pause:
    steps = _steps(before)
    times_s = [two["time"] - one["time"] for one, two in pairwise(steps[-_USUAL:])]
    usual_s = round(median(times_s), 3) if times_s else None
    return Pause(ranks, steps[-1]["step"] if steps else 0, round(pause_s, 3), usual_s, None, None, "", None)


def _steps(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] == "step"]


def _message(event: dict[str, Any]) -> str:
    return next((str(event[key]).splitlines()[0] for key in ("error", "reason", "message") if event.get(key)), "")


def _since(ended_s: float, event: dict[str, Any] | None) -> float | None:
    return None if event is None else round(event["time"] - ended_s, 3)


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"
