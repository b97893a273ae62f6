"""hvdtrain drill RUN: kills or pauses ranks of a job again and again, and tells how long it takes to go on and how many steps it loses."""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

from hvdtrain.cli.drill.pauses import Pause, pause, pause_lines
from hvdtrain.cli.drill.victims import KINDS, Rank, choose, find_ranks, send
from hvdtrain.cli.drill.watch import lines_of, wait
from hvdtrain.cli.json_output import print_result, with_json_value
from hvdtrain.cli.options import CommandParser
from hvdtrain.config.duration import parse_duration
from hvdtrain.config.read import expand
from hvdtrain.errors import DONE, LOST, UserError, nearest

USAGE = """\
hvdtrain drill RUN [--kill rank|host|rank0|random] [--pause 5s] [--every 30s] [--times 3] [--seed 1] [--wait 5m] [--json [FILE]]
  kills (SIGKILL) ranks of the job that runs in RUN, a process of this user on this machine, --every so long after it goes on, and measures
  how long until the job says it and until it goes on, and how many steps are done again
  --pause   a straggler: stops them for so long (SIGSTOP, SIGCONT) instead of killing them, and shows what the job says of it: the slowest
            rank, how long the steps took, or the stall that ended it (guard.stall_s)
  --kill    rank: one that is not rank 0 where there is another; host: all ranks of one host; rank0; random: one of these each time
  --times   how often; it ends earlier where the job ends
  --wait    how long the job may take to go on; where it does not, the exit code is 84"""
_COMMAND_LINE = "command line of drill"


class Harm(NamedTuple):
    """One fault; None: not seen."""

    ranks: list[int]
    step: int  # of the last sync point before
    detect_s: float | None  # until the job, or who starts it, says it
    go_on_s: float | None  # until the next sync point
    steps_lost: int | None


def drill(arguments: Sequence[str]) -> int:
    """Runs `drill`; returns the exit code. Raises UserError."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)
        return DONE
    options = _parse(arguments)
    run, random = expand(options.run, "RUN"), Random(options.seed)
    every_s, wait_s = parse_duration(options.every, "--every"), parse_duration(options.wait, "--wait")
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
        harms.append(_harm(run, victims, wait_s) if pause_s is None else pause(run, victims, pause_s, wait_s))
        if _is_stuck(harms[-1]):
            break
    pauses = [harm for harm in harms if isinstance(harm, Pause)]
    table = pause_lines(pauses) if pauses else lines([harm for harm in harms if isinstance(harm, Harm)])
    told = table if harms else ["the job ended before the first fault"]
    print_result(options.json, told, {"run": str(run), "harms": [harm._asdict() for harm in harms]})
    return LOST if harms and _is_stuck(harms[-1]) else DONE


def _is_stuck(harm: Harm | Pause) -> bool:
    return harm.go_on_s is None and not (isinstance(harm, Pause) and harm.said)


def _harm(run: Path, victims: Sequence[Rank], wait_s: float) -> Harm:
    ranks = [victim.rank for victim in victims]
    events = lines_of(run / "events.jsonl")
    step = step_of(events)
    count, decisions, began_s = len(events), len(lines_of(run / "launch.jsonl", with_step=False)), time.time()
    for victim in victims:
        send(victim, signal.SIGKILL)

    def recovered() -> Harm | None:
        return measure(
            ranks, step, began_s, lines_of(run / "events.jsonl")[count:], lines_of(run / "launch.jsonl", with_step=False)[decisions:]
        )

    return wait(recovered, wait_s) or Harm(ranks, step, None, None, None)


def step_of(events: Sequence[dict[str, Any]]) -> int:
    """Where the job is: the last event counts, as steps that were lost may have come further."""
    return next((event["step"] for event in reversed(events) if event["kind"] in ("start", "step", "lost")), 0)


def measure(
    ranks: list[int], step: int, began_s: float, events: Sequence[dict[str, Any]], decisions: Sequence[dict[str, Any]]
) -> Harm | None:
    """What came after a fault at began_s; None while the job has not gone on."""
    begun = next((number for number, event in enumerate(events) if event["kind"] in ("start", "lost")), None)
    if begun is None:
        return None
    went_on = next((event for event in events[begun:] if event["kind"] in ("step", "end")), None)
    if went_on is None:
        return None
    signs = [event["time"] for event in events if event["kind"] in ("start", "lost", "failed") and event["time"] >= began_s]
    signs += [line["time"] for line in decisions if line["kind"] in ("failed", "lost", "host_lost")]
    reached = max([step, *(event["step"] for event in events[:begun] if event["kind"] == "step")])
    lost = reached - events[begun]["step"]
    return Harm(ranks, step, round(min(signs) - began_s, 3), round(went_on["time"] - began_s, 3), lost)


def lines(harms: Sequence[Harm]) -> list[str]:
    """The table."""
    found = [f"{'killed':>16} {'at step':>9} {'detected':>9} {'goes on':>9} {'steps lost':>10}"]
    for harm in harms:
        killed = f"rank {','.join(map(str, harm.ranks))}"
        found.append(f"{killed:>16} {harm.step:>9} {_s(harm.detect_s):>9} {_s(harm.go_on_s):>9} {_text(harm.steps_lost):>10}")
    times = [harm.go_on_s for harm in harms if harm.go_on_s is not None]
    if times:
        found.append(f"goes on after {median(times):.2f} s (median of {len(times)}; {min(times):.2f} to {max(times):.2f})")
    return found


def _s(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.2f} s"


def _text(value: int | None) -> str:
    return "" if value is None else str(value)


def _is_over(run: Path) -> bool:
    last = next((event["kind"] for event in reversed(lines_of(run / "events.jsonl")) if event["kind"] in ("start", "end", "stop")), "")
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
        raise UserError(f"--kill {options.kill} is not known", _COMMAND_LINE, nearest(options.kill, KINDS))
    if options.times < 1:
        raise UserError(f"--times {options.times} harms nothing", _COMMAND_LINE, "--times 1 or more")
    return options
