"""The figures of ranks that have one model together: what each does in a step, and the passes of a pipeline over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdtrain.report.figures.speed import PHASES
from hvdtrain.report.figures.style import legend, literal, new_figure
from hvdtrain.report.mesh import MOST_RANKS, bubble, mesh_of, predicted_bubble
from hvdtrain.report.run import Fields, RunRecord, number, numbers
from hvdtrain.report.summary import finite, host_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_BARS = 48  # ranks
_PARTS = {"computing": PHASES["forward"], "waiting for stages": "#CCCCCC", "communication": PHASES["communication"]}
_KINDS = {
    "forward": PHASES["forward"],
    "backward": PHASES["backward"],
    "input gradient": "#56B4E9",
    "weight gradient": PHASES["update"],
}
_WAITING = "#E4E4E4"
_MOST_NUMBERS = 40  # passes of a rank whose micro-batches are named
_MOST_RANKS, _MOST_PASSES = 64, 8192


class _Pass(NamedTuple):
    kind: str
    micro: float
    wait_ms: float  # when its rank begins to wait for what it takes
    start_ms: float
    stop_ms: float


def time_of_ranks(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """A bar for each rank of a single run, in the order of the mesh: own work, waiting for other stages, other communication."""
    if len(runs) > 1:
        return None
    work, communication, waiting = (_of_ranks(runs[0], f"rank_{name}_ms") for name in ("work", "communication", "waiting"))
    if not work or len(work) != len(communication):
        return None
    mesh = mesh_of(runs[0])
    mesh = mesh if mesh and len(mesh.places) == len(work) else None
    waiting = waiting if len(waiting) == len(work) else [0.0] * len(work)
    order = sorted(range(len(work)), key=lambda rank: mesh.places[rank] if mesh else (rank,))[:_MOST_BARS]
    figure, (axes,) = new_figure(height=1.2 + 0.24 * len(order))
    lengths = [work, waiting, [max(0.0, all_ms - waited) for all_ms, waited in zip(communication, waiting, strict=True)]]
    left, entries = [0.0] * len(order), []
    for (name, colour), of_ranks in zip(_PARTS.items(), lengths, strict=True):
        part = [of_ranks[rank] if math.isfinite(of_ranks[rank]) else 0.0 for rank in order]
        if any(part):
            axes.barh(range(len(order)), part, 0.8, left=left, color=colour)
            entries.append((name, {"color": colour, "linewidth": 6}))
        left = [start + length for start, length in zip(left, part, strict=True)]
    names = [_name(runs[0], rank, f" ({mesh.name(rank)})" if mesh else "") for rank in order]
    axes.set_yticks(range(len(order)), names, fontsize=8)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("ms of one step" + (f", the first {_MOST_BARS} of {len(work):,} ranks" if len(work) > _MOST_BARS else ""))
    legend(figure, entries)
    return figure


def timeline(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """The passes of the last step before the last evaluation of a single run: a row for each rank of one pipeline; gaps are waiting."""
    event = next(reversed(runs[0].events_of("passes")), {}) if len(runs) == 1 else {}
    rows, ranks = _passes(event), _ranks(event)
    if not rows or len(ranks) != len(rows):
        return None
    figure, (axes,) = new_figure(height=1.3 + 0.36 * len(rows))
    for row, passes in enumerate(rows):
        axes.broken_barh([(one.wait_ms, one.start_ms - one.wait_ms) for one in passes], (row - 0.12, 0.24), color=_WAITING)
        for kind, colour in _KINDS.items():
            spans = [(one.start_ms, one.stop_ms - one.start_ms) for one in passes if one.kind == kind]
            if spans:
                axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=colour, edgecolors="white", linewidth=0.4)
        if len(passes) <= _MOST_NUMBERS:
            _number_passes(axes, row, passes, max(one.stop_ms for of_rank in rows for one in of_rank))
    mesh = mesh_of(runs[0])
    places = [f" (stage {mesh.places[rank].stage})" if mesh and rank < len(mesh.places) else "" for rank in ranks]
    axes.set_yticks(range(len(rows)), [_name(runs[0], rank, place) for rank, place in zip(ranks, places, strict=True)], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.grid(visible=False)
    axes.set_xlabel("ms")
    axes.set_title(f"step {number(event, 'step'):.0f}{_bubble(runs[0])}", fontsize=9)
    used = {one.kind for passes in rows for one in passes}
    names = [(name, {"color": colour, "linewidth": 6}) for name, colour in _KINDS.items() if name in used]
    legend(figure, [*names, ("waits", {"color": _WAITING, "linewidth": 4})])
    return figure


def _number_passes(axes: Any, row: int, passes: Sequence[_Pass], whole_ms: float) -> None:
    """Writes the number of the micro-batch into each pass that has room for it."""
    for one in passes:
        if one.stop_ms - one.start_ms > 0.02 * whole_ms:
            middle = (one.start_ms + one.stop_ms) / 2
            axes.text(middle, row, f"{one.micro:.0f}", ha="center", va="center", fontsize=7, color="white")


def _bubble(run: RunRecord) -> str:
    waiting, predicted = finite(bubble(run)), predicted_bubble(run)
    if not waiting:
        return ""
    by_schedule = f", {predicted:.0%} by the schedule with equal stages" if math.isfinite(predicted) else ""
    return f"; bubble of the job {sum(waiting) / len(waiting):.0%}{by_schedule}"


def _name(run: RunRecord, rank: int, place: str) -> str:
    host = host_of(run.start_event, rank)
    return literal(f"{rank}{f' on {host:.16}' if host else ''}{place}")


def _of_ranks(run: RunRecord, field: str) -> list[float]:
    """A field's value for each rank, the mean over evaluations on the last number of ranks."""
    rows = [row for event in run.epoch_events() if (row := numbers(event, field))]
    rows = [row for row in rows if len(row) == len(rows[-1])]
    known = [finite(rank) for rank in zip(*rows, strict=True)]
    return [sum(values) / len(values) if values else math.nan for values in known]


def _passes(event: Fields) -> list[list[_Pass]]:
    """Passes of each rank; empty where the event is another's."""
    rows = event.get("passes")
    if not isinstance(rows, list) or len(rows) > _MOST_RANKS:
        return []
    found = []
    for row in rows:
        if not isinstance(row, list) or len(row) > _MOST_PASSES or not all(isinstance(one, list) and len(one) == 6 for one in row):
            return []
        of_rank = [_Pass(str(one[0]), *numbers({"pass": [one[2], *one[3:]]}, "pass")) for one in row]
        found.append([one for one in of_rank if one.kind in _KINDS and all(math.isfinite(value) for value in one[1:])])
    return found if any(found) else []


def _ranks(event: Fields) -> list[int]:
    """Whose passes they are; empty where one of them is no rank."""
    found = numbers(event, "passes_of_ranks")
    return [int(rank) for rank in found] if all(0 <= rank < MOST_RANKS and rank.is_integer() for rank in found) else []
