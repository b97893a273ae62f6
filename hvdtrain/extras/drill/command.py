"""hvdtrain drill RUN: repeatedly kills or pauses ranks of a job, and reports how long it takes to
resume and how many steps it loses."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Literal, NamedTuple, NoReturn

from hvdtrain.cli.options import CommandParser
from hvdtrain.cli.output import print_result, with_json_value
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.config.read import expand
from hvdtrain.core.folder import Folder
from hvdtrain.core.lengths import parse_duration
from hvdtrain.errors import DONE, LOST, UserError, nearest
from hvdtrain.training.lock_holder import Holder, is_gone
from hvdtrain.training.run_lock import read_holder

USAGE = """\
hvdtrain drill RUN [--kill rank|host|rank0|random] [--pause 5s] [--every 30s] [--times 3] [--seed 1] [--wait 5m] [--json [FILE]]
  kills (SIGKILL) ranks of the job that runs in RUN, a process of this user on this machine, --every so long after it resumes, and measures
  how long it takes to report the fault and to resume, and how many steps are repeated
  --pause   a straggler: stops them for so long (SIGSTOP, SIGCONT) instead of killing them, and shows what the job says of it: the slowest
            rank, how long the steps took, or the stall that ended it (guard.stall_s)
  --kill    rank: one that is not rank 0 where there is another; host: all ranks of one host; rank0; random: one of these each time
  --times   how often; it ends earlier where the job ends
  --wait    how long the job may take to resume; if it takes longer, the exit code is 84"""  # noqa: E501
_COMMAND_LINE = "command line of drill"


class Harm(NamedTuple):
    """The effects of one fault; None if not observed."""

    ranks: list[int]
    step: int  # step of the last sync point before
    detect_s: float | None  # until the job, or its launcher, reports it
    go_on_s: float | None  # until the next sync point
    steps_lost: int | None


def drill(arguments: Sequence[str]) -> int:
    """Runs `drill`; returns the exit code. Raises UserError."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)
        return DONE
    options = _parse(arguments)
    run = expand(options.run, "RUN")
    random = Random(options.seed)
    every_s = parse_duration(options.every, "--every")
    wait_s = parse_duration(options.wait, "--wait")
    pause_s = parse_duration(options.pause, "--pause") if options.pause else None
    find_ranks(run)
    harms: list[Harm | Pause] = []
    while len(harms) < options.times:
        if wait(lambda: _is_over(run), every_s):
            break
        try:
            victims = choose(find_ranks(run), options.kill, random)
        except UserError:
            if harms or _is_over(run):
                break
            raise
        harms.append(
            _harm(run, victims, wait_s) if pause_s is None else pause(run, victims, pause_s, wait_s)
        )
        if _is_stuck(harms[-1]):
            break
    pauses = [harm for harm in harms if isinstance(harm, Pause)]
    table = (
        pause_lines(pauses)
        if pauses
        else harm_lines([harm for harm in harms if isinstance(harm, Harm)])
    )
    told = table if harms else ["the job ended before the first fault"]
    print_result(options.json, told, {"run": str(run), "harms": [harm._asdict() for harm in harms]})
    return LOST if harms and _is_stuck(harms[-1]) else DONE


def _is_stuck(harm: Harm | Pause) -> bool:
    return harm.go_on_s is None and not (isinstance(harm, Pause) and harm.said)


def _harm(run: Path, victims: Sequence[RankProcess], wait_s: float) -> Harm:
    ranks = [victim.rank for victim in victims]
    events = lines_of(run / "events.jsonl")
    step = step_of(events)
    count = len(events)
    decisions = len(lines_of(run / "launch.jsonl", with_step=False))
    began_s = time.time()
    for victim in victims:
        send(victim, signal.SIGKILL)

    def recovered() -> Harm | None:
        return measure(
            ranks,
            step,
            began_s,
            lines_of(run / "events.jsonl")[count:],
            lines_of(run / "launch.jsonl", with_step=False)[decisions:],
        )

    return wait(recovered, wait_s) or Harm(ranks, step, None, None, None)


def step_of(events: Sequence[dict[str, Any]]) -> int:
    """Returns the job's step from the last event, because lost steps may have been further."""
    return next(
        (event["step"] for event in reversed(events) if event["kind"] in ("start", "step", "lost")),
        0,
    )


def measure(
    ranks: list[int],
    step: int,
    began_s: float,
    events: Sequence[dict[str, Any]],
    decisions: Sequence[dict[str, Any]],
) -> Harm | None:
    """Measures a fault at began_s; None until the job resumes."""
    begun = next(
        (number for number, event in enumerate(events) if event["kind"] in ("start", "lost")), None
    )
    if begun is None:
        return None
    went_on = next((event for event in events[begun:] if event["kind"] in ("step", "end")), None)
    if went_on is None:
        return None
    signs = [
        event["time"]
        for event in events
        if event["kind"] in ("start", "lost", "failed") and event["time"] >= began_s
    ]
    signs += [line["time"] for line in decisions if line["kind"] in ("failed", "lost", "host_lost")]
    reached = max([step, *(event["step"] for event in events[:begun] if event["kind"] == "step")])
    lost = reached - events[begun]["step"]
    return Harm(
        ranks, step, round(min(signs) - began_s, 3), round(went_on["time"] - began_s, 3), lost
    )


def harm_lines(harms: Sequence[Harm]) -> list[str]:
    """Returns the lines of the table."""
    lines = [f"{'killed':>16} {'at step':>9} {'detected':>9} {'resumes':>9} {'steps lost':>10}"]
    for harm in harms:
        killed = f"rank {','.join(map(str, harm.ranks))}"
        lines.append(
            f"{killed:>16} {harm.step:>9} {_or_never(harm.detect_s):>9} "
            f"{_or_never(harm.go_on_s):>9} {_text(harm.steps_lost):>10}"
        )
    times = [harm.go_on_s for harm in harms if harm.go_on_s is not None]
    if times:
        lines.append(
            f"resumes after {median(times):.2f} s (median of {len(times)}; {min(times):.2f} to "
            f"{max(times):.2f})"
        )
    return lines


def _or_never(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.2f} s"


def _text(value: int | None) -> str:
    return "" if value is None else str(value)


def _is_over(run: Path) -> bool:
    last = next(
        (
            event["kind"]
            for event in reversed(lines_of(run / "events.jsonl"))
            if event["kind"] in ("start", "end", "stop")
        ),
        "",
    )
    return last == "end"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("drill")
    parser.add_argument("run")
    parser.add_argument("--kill", default="rank")
    parser.add_argument("--pause")
    parser.add_argument("--every", default="30s")
    parser.add_argument("--wait", default="5m")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json")
    options = parser.parse_args(with_json_value(arguments))
    if options.kill not in KINDS:
        raise UserError(
            f"--kill {options.kill} is not known", _COMMAND_LINE, nearest(options.kill, KINDS)
        )
    if options.times < 1:
        raise UserError(
            f"--times {options.times} would kill nothing", _COMMAND_LINE, "--times 1 or more"
        )
    return options


What = Literal["rank", "host", "rank0", "random"]
KINDS: tuple[What, ...] = ("rank", "host", "rank0", "random")


class RankProcess(NamedTuple):
    """A process of the job."""

    rank: int
    pid: int
    start: int  # start of the process in ticks, which distinguishes processes with the same number
    parent: int  # mpirun, or its daemon of a host


def find_ranks(run: Path) -> list[RankProcess]:
    """Returns the processes by rank. Raises UserError if no job runs in the folder, or if it does
    not run here as this user."""
    holder = _holder(run)
    first = _read(holder.pid)
    environ = _environ(holder.pid)
    if first is None or first.start != holder.process_start or environ is None:
        raise UserError(
            f"rank 0 of the job in {run} is not a process of this user",
            str(run),
            "run drill as the user of the job, on its first host",
        )
    job = environ.get("PMIX_NAMESPACE")
    found = []
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()):
        process = _read(pid)
        theirs = _environ(pid)
        if process is None or theirs is None:
            continue
        if pid == holder.pid or (
            theirs.get("PMIX_NAMESPACE") == job if job else process.parent == first.parent
        ):
            try:
                place = placement(theirs)
            except UserError:
                continue
            if pid == holder.pid or place.launcher != "none":
                found.append(process._replace(rank=place.rank))
    return sorted(found)


def choose(ranks: list[RankProcess], what: What, random: Random) -> list[RankProcess]:
    """Returns the ranks to kill: one rank, other than rank 0 if possible; all ranks of a host; rank
    0; or one of these ways."""
    if what == "random":
        what = random.choice(KINDS[:3])
    if what == "rank0":
        return ranks[:1]
    if what == "rank":
        return [random.choice(ranks[1:] or ranks)]
    parent = random.choice(sorted({rank.parent for rank in ranks}))
    return [rank for rank in ranks if rank.parent == parent]


def send(victim: RankProcess, number: int) -> bool:
    """Sends a signal to this process; False if it has ended."""
    try:
        handle = os.pidfd_open(victim.pid)
    except OSError:
        return False
    try:
        now = _read(victim.pid)  # after the handle is there, so that it cannot be another process
        if now is None or now.start != victim.start:
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)


def _holder(run: Path) -> Holder:
    try:
        with Folder.open(run) as folder:
            holder = read_holder(folder)
    except OSError as error:
        raise UserError(
            f"cannot read the run folder {run}: {error.strerror}",
            "RUN",
            "the run folder of a running job",
        ) from None
    if holder is None or is_gone(holder):
        raise UserError(
            f"no job runs in {run}",
            "RUN",
            "start it first, for example with hvdtrain launch --elastic ... -- run=DIR",
        )
    if is_gone(holder) is None:
        raise UserError(
            f"the job in {run} runs on {holder.host}",
            "RUN",
            "run drill on that host: it only kills processes of its own machine",
        )
    return holder


def _read(pid: int) -> RankProcess | None:
    """Reads a live process of this user, whose rank is not known yet."""
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return None
        state, parent, *rest = (
            Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        )
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else RankProcess(0, pid, int(rest[17]), int(parent))


def _environ(pid: int) -> Mapping[str, str] | None:
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    return {key: value for key, _, value in (pair.partition("=") for pair in pairs) if value}


_LOOK_S = 0.05


def wait(condition: Callable[[], Any], limit_s: float) -> Any:
    """Waits until the condition is true, and returns its value; its last value after limit_s.

    It uses at most a fifth of a core, because the job runs on the same machine.
    """
    end_s = time.monotonic() + limit_s
    while True:
        began_s = time.monotonic()
        value = condition()
        now_s = time.monotonic()
        if value or now_s >= end_s:
            return value
        time.sleep(max(_LOOK_S, 4 * (now_s - began_s)))


def lines_of(path: Path, *, with_step: bool = True) -> list[dict[str, Any]]:
    """Reads the events of a file that may be growing: complete lines with a kind, a time and, if
    `with_step`, a step."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    lines = []
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            try:
                event = json.loads(line[max(0, line.rfind('{"time":')) :])
            except (ValueError, RecursionError):
                continue
            if _is_event(event, with_step):
                lines.append(event)
    return lines


def _is_event(found: Any, with_step: bool) -> bool:
    if (
        not isinstance(found, dict)
        or not isinstance(found.get("kind"), str)
        or not isinstance(found.get("time"), int | float)
    ):
        return False
    return isinstance(found.get("step"), int) or not with_step


_USUAL = 20  # sync points before: the median of the times between them is the usual time


class Pause(NamedTuple):
    """The effects of one pause; None if not observed."""

    ranks: list[int]
    step: int  # step of the last sync point before
    pause_s: float
    usual_s: float | None  # between two sync points, before
    # between the two sync points around the pause, an evaluation there included
    window_s: float | None
    slowest_rank: int | None  # as reported by the job; None: one rank, or it ended
    said: str  # the event and message that ended the job or its start
    go_on_s: float | None  # from the end of the pause to the next sync point


def pause(run: Path, victims: Sequence[RankProcess], pause_s: float, wait_s: float) -> Pause:
    """Stops the victims, continues them after pause_s or when interrupted, and waits for the
    job."""
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
    ranks = [victim.rank for victim in victims]
    ended_s = time.time()
    return wait(
        lambda: measure_pause(ranks, began_s, ended_s, before, lines_of(path)[len(before) :]),
        wait_s,
    ) or _never(ranks, pause_s, before)


@contextlib.contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Raises SystemExit on SIGTERM, and on SIGHUP of a closed terminal, so that stopped processes
    continue before this one ends."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    former = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def measure_pause(
    ranks: list[int],
    began_s: float,
    ended_s: float,
    before: Sequence[dict[str, Any]],
    after: Sequence[dict[str, Any]],
) -> Pause | None:
    """Returns the job's report of a pause; None while there is none."""
    found = _never(ranks, ended_s - began_s, before)
    last = next(
        (event for event in after if event["kind"] in ("failed", "lost", "stop", "end")), None
    )
    on = next(
        (event for event in after if event["kind"] == "step" and event["time"] > ended_s), None
    )
    if last is not None:
        return found._replace(
            said=": ".join(filter(None, (last["kind"], _message(last)))),
            go_on_s=_since(ended_s, on),
        )
    if on is None:
        return None
    steps = [*_steps(before)[-1:], *_steps(after)]
    around_s, event = max(
        ((two["time"] - one["time"], two) for one, two in pairwise(steps)),
        key=lambda pair: pair[0],
        default=(None, on),
    )
    window_s = None if around_s is None else round(around_s, 3)
    return found._replace(
        window_s=window_s, slowest_rank=event.get("slowest_rank"), go_on_s=_since(ended_s, on)
    )


def pause_lines(pauses: Sequence[Pause]) -> list[str]:
    """Returns the lines of the table."""
    lines = [
        f"{'paused':>16} {'at step':>9} {'for':>9} {'sync point after':>17} {'usually':>9}  the "
        "job says"
    ]
    for one in pauses:
        said = one.said or (
            "nothing"
            if one.window_s is None
            else "no slowest rank"
            if one.slowest_rank is None
            else _slowest(one)
        )
        times = f"{one.pause_s:7.2f} s {_or_dash(one.window_s):>17} {_or_dash(one.usual_s):>9}"
        lines.append(f"{'rank ' + ','.join(map(str, one.ranks)):>16} {one.step:>9} {times}  {said}")
    return lines


def _slowest(one: Pause) -> str:
    return f"slowest is rank {one.slowest_rank}" + (
        "" if one.slowest_rank in one.ranks else ", which was not paused"
    )


def _never(ranks: list[int], pause_s: float, before: Sequence[dict[str, Any]]) -> Pause:
    steps = _steps(before)
    times_s = [two["time"] - one["time"] for one, two in pairwise(steps[-_USUAL:])]
    usual_s = round(median(times_s), 3) if times_s else None
    return Pause(
        ranks, steps[-1]["step"] if steps else 0, round(pause_s, 3), usual_s, None, None, "", None
    )


def _steps(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] == "step"]


def _message(event: dict[str, Any]) -> str:
    return next(
        (
            str(event[key]).splitlines()[0]
            for key in ("error", "reason", "message")
            if event.get(key)
        ),
        "",
    )


def _since(ended_s: float, event: dict[str, Any] | None) -> float | None:
    return None if event is None else round(event["time"] - ended_s, 3)


def _or_dash(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"
