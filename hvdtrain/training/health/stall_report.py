"""The report of a stall, on one screen: what each rank is doing, and which ranks are behind, do not
answer, or wait."""

from __future__ import annotations

import json
import linecache
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from hvdtrain.comm.mesh import ranks_summary
from hvdtrain.errors import STALLED

STACKS = 3  # ranks whose stack is shown
DEPTHS = {1: 12, 2: 10, 3: 8}  # stacks shown -> lines of each
DEPTH = max(DEPTHS.values())
# a module with this name at its top, such as a program that runs a script, is not shown
_HIDDEN = "HIDDEN_IN_STALLS"
_WAITS_FOR_DEVICE = "hvdtrain.core.metrics.host_value"
GROUPS = 3  # lines of one section without stacks
WIDTH = 160  # characters of a line of a stack
SILENCE = "still busy, stopped, swapping, its host is down, or a C extension holds the interpreter"


@dataclass(frozen=True)
class StallReport:
    """A rank's report in a stall: what it is doing, and where."""

    rank: int
    host: str
    pid: int
    phase: str
    epoch: int
    step: int
    idle_s: float
    since: str  # the same as a wall-clock time on that host
    waiting: bool  # waits in a collective or for the device; other ranks are behind
    # stack of its main thread, innermost last: "file:line in function: source"
    stack: tuple[str, ...]
    place: str = ""  # in the mesh: "stage 1, data 0"
    doing: str = ""  # the pass of a pipeline: "forward pass of micro-batch 2 in stage 1"
    waits_for: int | None = None  # the rank whose message it waits for

    @property
    def position(self) -> str:
        return f"step {self.step}, epoch {self.epoch}: {self.phase}" + (
            f", {self.doing}" if self.doing else ""
        )

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}" + (f" ({self.place})" if self.place else "")


def pack(report: StallReport) -> str:
    return json.dumps(asdict(report))


def unpack(packed: str) -> StallReport:
    fields = json.loads(packed)
    return StallReport(**{**fields, "stack": tuple(fields["stack"])})


def frames_of(thread: int) -> list[FrameType]:
    """Returns the Python calls that a thread is in, innermost first; none if it has ended."""
    frames = []
    frame = sys._current_frames().get(thread)
    while frame:
        frames.append(frame)
        frame = frame.f_back
    return frames


def frames_of_work(thread: int) -> list[FrameType]:
    """Returns the frames of a thread. If it waits for samples, the frames of the reader that reads
    them, because that is where it hangs."""
    frames = frames_of(thread)
    innermost = next(
        (frame for frame in frames if f"{frame.f_globals.get('__name__')}".startswith("hvdtrain.")),
        None,
    )
    if (
        innermost is None
        or f"{innermost.f_globals.get('__name__')}.{innermost.f_code.co_name}"
        != "hvdtrain.training.input.take"
    ):
        return frames
    readers = [
        frames_of(one.ident)
        for one in threading.enumerate()
        if one.name.startswith("hvdtrain-reader") and one.ident
    ]
    return next(
        (found for found in readers if any(frame.f_code.co_name == "prepare" for frame in found)),
        frames,
    )


def is_waiting(frames: Sequence[FrameType]) -> bool:
    """Whether hvdtrain's innermost call is one of hvdtrain.comm, or goes through Horovod, or waits
    for the device.

    With NCCL, collectives run on the device: the host waits for its device, which waits for the
    other ranks.
    """
    for frame in frames:
        name = f"{frame.f_globals.get('__name__')}."
        if name.startswith(("hvdtrain.", "horovod.")):
            return name.startswith(("hvdtrain.comm.", "horovod.")) or (
                f"{name}{frame.f_code.co_name}" == _WAITS_FOR_DEVICE
            )
    return False


def calls_of(frames: Sequence[FrameType], *, sources: bool) -> tuple[str, ...]:
    """Returns the innermost calls as lines of text, innermost last; `sources` adds lines of code,
    read from files."""
    kept = [
        frame
        for frame in frames
        if not frame.f_code.co_filename.startswith("<frozen") and _HIDDEN not in frame.f_globals
    ][:DEPTH]
    return tuple(_call(frame, sources) for frame in reversed(kept))


def _call(frame: FrameType, sources: bool) -> str:
    path = frame.f_code.co_filename
    line = frame.f_lineno
    folders = (*sys.path, str(Path(__file__).parents[3]))  # an editable install is not on the path
    prefix = max(
        (f"{folder}/" for folder in folders if folder and path.startswith(f"{folder}/")),
        key=len,
        default="",
    )
    source = linecache.getline(path, line, frame.f_globals).strip() if sources else ""
    return f"{path.removeprefix(prefix)}:{line} in {frame.f_code.co_name}" + (
        f": {source}" if source else ""
    )


def render(
    reports: Sequence[StallReport | None],
    hosts: Sequence[str],
    limit_s: float,
    limit_key: str,
    places: Sequence[str] = (),
) -> str:
    """Returns the report of all ranks; None means that a rank sent no report. places: each rank's
    place in the mesh, if there is one."""
    received = [report for report in reports if report is not None]
    silent = [rank for rank, report in enumerate(reports) if report is None]
    title, behind, shown = _behind(received, silent)
    waiting = [report for report in received if report not in behind]
    lines = [
        f"hvdtrain: no progress for {limit_s:g} s ({limit_key}); the job ends with exit code "
        f"{STALLED}"
    ]
    lines += [title] * bool(title)
    lines += [
        line for report in shown for line in (_heading(report), *_stack(report, DEPTHS[len(shown)]))
    ]
    lines += _by_position("  and ", [report for report in behind if report not in shown])
    if silent:
        lines += [f"no answer ({SILENCE}):", *_by_host(silent, hosts, places)]
    lines += _by_position("waiting: ", waiting)
    if waiting and not shown:
        lines += _stack(waiting[0], DEPTH)
    return "\n".join([*lines, _remedy(limit_s, limit_key)])


def render_alone(report: StallReport, limit_s: float, limit_key: str, reason: str = "") -> str:
    """Returns the report of one rank, used if the reports of all ranks cannot be gathered."""
    first = (
        f"hvdtrain: {report.name}: no progress for {limit_s:g} s ({limit_key}){reason}; exit code "
        f"{STALLED}"
    )
    return "\n".join([first, _heading(report), *_stack(report, DEPTH), _remedy(limit_s, limit_key)])


def _behind(
    received: Sequence[StallReport], silent: Sequence[int]
) -> tuple[str, list[StallReport], list[StallReport]]:
    """Returns a title, the ranks that are behind, and the ranks to show in detail."""
    busy = sorted((report for report in received if not report.waiting), key=_progress)
    if busy or silent or not received:  # ranks that do not answer are also behind
        return "behind:" * bool(busy), busy, busy[:STACKS]
    awaited = {report.waits_for for report in received}
    if roots := [
        report for report in received if report.rank in awaited and report.waits_for is None
    ]:
        return (
            "behind (others wait for their messages, and they in another collective):",
            roots,
            roots[:STACKS],
        )
    positions = {(report.epoch, report.step) for report in received}
    if len(positions) > 1:
        last = [report for report in received if (report.epoch, report.step) == min(positions)]
        return (
            "behind (every rank waits for the others, these since the earliest step):",
            last,
            last[:STACKS],
        )
    # different ones: the ranks are in different collectives
    by_stack = {report.stack[-1:]: report for report in reversed(received)}
    different = sorted(by_stack.values(), key=lambda report: report.rank)
    return (
        "behind: no rank: all wait for each other at the same step",
        list(received),
        different[:STACKS],
    )


def _progress(report: StallReport) -> tuple[int, int, bool, int]:
    """Orders ranks, the one that is farthest behind first. With NCCL a rank that others wait for
    may be several steps behind them, and a step that is full of queued work comes last."""
    return report.epoch, report.step, report.phase == "step", report.rank


def _heading(report: StallReport) -> str:
    what = (
        f"{report.phase}, epoch {report.epoch}, step {report.step}, for {report.idle_s:.0f} s, "
        f"since {report.since}"
    )
    return f"  {report.name}, pid {report.pid}: {what}" + (
        f", in the {report.doing}" if report.doing else ""
    )


def _stack(report: StallReport, depth: int) -> list[str]:
    """Returns the innermost calls."""
    return [
        f"    {line if len(line) <= WIDTH else line[: WIDTH - 3] + '...'}"
        for line in report.stack[-depth:]
    ]


def _by_position(start: str, reports: Iterable[StallReport]) -> list[str]:
    """Returns a line for the ranks at each position, the earliest position first."""
    reports_at: dict[tuple[int, int, str], list[StallReport]] = {}
    for report in reports:
        reports_at.setdefault((report.epoch, report.step, report.position), []).append(report)
    groups = [
        (f"{start}{{}} at {at[-1]}{_awaited(some)}", [report.rank for report in some])
        for at, some in sorted(reports_at.items())
    ]
    return _cut(groups, f"{start}{{}} elsewhere")


def _awaited(reports: Sequence[StallReport]) -> str:
    """Returns the ranks whose messages they wait for: " (ranks 2-3)"."""
    ranks = sorted({report.waits_for for report in reports if report.waits_for is not None})
    return f" ({ranks_summary(ranks)})" if ranks else ""


def _by_host(silent: Sequence[int], hosts: Sequence[str], places: Sequence[str]) -> list[str]:
    """Returns lines by host; in a mesh, a line for each rank."""
    ranks: dict[str, list[int]] = {}
    for rank in silent:
        ranks.setdefault(
            hosts[rank] + (f" ({places[rank]})" if places and places[rank] else ""), []
        ).append(rank)
    return _cut(
        [(f"  {{}} on {host}", some) for host, some in ranks.items()], "  {} on other hosts"
    )


def _cut(groups: Sequence[tuple[str, list[int]]], rest: str) -> list[str]:
    """Returns a line for each (template with {} for the ranks, ranks); if there are more than
    GROUPS groups, the first ones and a line for the rest."""
    if len(groups) > GROUPS:
        groups = [
            *groups[: GROUPS - 1],
            (rest, sorted(rank for _, ranks in groups[GROUPS - 1 :] for rank in ranks)),
        ]
    return [template.replace("{}", ranks_summary(ranks), 1) for template, ranks in groups]


def _remedy(limit_s: float, limit_key: str) -> str:
    return (
        f"to do: look at the ranks named first; if they were only slow, raise {limit_key}, now "
        f"{limit_s:g} (null: no limit)"
    )
