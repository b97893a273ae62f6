"""plan --faults: goodput, the share of time in which a job progresses, on 8 to 8,192 ranks, if a
fault stops it, restarts it or removes a rank."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from hvdtrain.config.schema import known_keys
from hvdtrain.errors import UserError, nearest
from hvdtrain.training.checkpoint.optimal_interval import optimal_interval_s

RANKS = (8, 32, 128, 512, 2048, 8192)
_FAULTS = 4000  # faults simulated for a value
_SURE = 4.0  # times the mean between two faults: with 98 % the next fault comes before the end
_LARGEST = 600.0  # the largest argument with a finite exponential
_EXAMPLE = "--faults, or --faults restart_s=60,rank_mtbf_hours=20000"


class FaultTimes(NamedTuple):
    """The values of --faults KEY=VALUE,...: all are seconds except the first.

    rank_mtbf_hours: of one rank with its share of host and network; 419 unexpected interruptions in
    54 days on 16,384 GPUs (Llama 3, arXiv:2407.21783, table 5) are one in 50,700 h. detect_s,
    restart_s, reform_s: measured with hvdtrain and 2 ranks on one host.
    """

    rank_mtbf_hours: float = 50_700.0
    checkpoint_s: float = 1.0  # how long a checkpoint stops training
    # between two sync points, to which guard.lost=shrink and restart roll back
    sync_s: float = 10.0
    detect_s: float = (
        1.0  # a rank that dies; a host that is cut off takes mpirun 16 s under launch --elastic
    )
    restart_s: float = 5.0  # from there to the next step, with launch --elastic or torchrun
    reform_s: float = 0.05  # the same for guard.lost=shrink
    requeue_s: float = 600.0  # until somebody, or a queue, starts a job that has ended
    repair_s: float = 600.0  # until a dead rank can return
    # the part of a rank's share of the speed that is lost with it: 0 if the others are as fast
    # without it
    lost_speed: float = 1.0
    seed: int = 1


class Goodput(NamedTuple):
    """The goodput of a job on a number of ranks; 1 means that no time is lost."""

    ranks: int
    mtbf_s: float  # of the job
    every_s: float  # between two checkpoints: checkpoint.every=auto
    stop: float  # and somebody starts it again
    elastic: float  # guard.lost=stop under launch --elastic
    restart: float  # guard.lost=restart under launch --elastic
    shrink: float


def with_value(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments, with an empty value for a --faults without one: if an option, a file,
    or a job's key follows. seed belongs to --faults."""
    completed = []
    keys_of_a_job = known_keys().keys() - FaultTimes._fields
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue="--"):
        key, equals, _ = following.partition("=")
        is_value = (
            bool(equals) and not key.startswith("-") and "." not in key and key not in keys_of_a_job
        )
        completed.append("--faults=" if argument == "--faults" and not is_value else argument)
    return completed


def read_fault_times(text: str) -> FaultTimes:
    """Parses "detect_s=2,restart_s=60" to FaultTimes. Raises UserError."""
    values: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in FaultTimes._fields:
            raise UserError(
                f"--faults has no {key!r}", "--faults", nearest(key, FaultTimes._fields)
            )
        try:
            values[key] = int(value) if key == "seed" else float(value)
        except ValueError:
            raise UserError(f"{key}={value} is not a number", "--faults", _EXAMPLE) from None
        if not (0 <= values[key] < 1e9) or (
            key in ("rank_mtbf_hours", "sync_s", "checkpoint_s") and not values[key]
        ):
            raise UserError(
                f"{key}={value} is out of range",
                "--faults",
                f"more than 0, less than 1e9: {_EXAMPLE}",
            )
        if key == "lost_speed" and values[key] > RANKS[0]:
            what = f"lost_speed={value} leaves no speed to {RANKS[0]} ranks after the loss of one"
            raise UserError(
                what,
                "--faults",
                "0 to 1: the share of a rank's speed that the job loses with that rank",
            )
    return FaultTimes(**values)  # type: ignore[arg-type]  # seed is an int


def goodputs(times: FaultTimes, ranks: Sequence[int] = RANKS) -> list[Goodput]:
    """Returns the goodput of each way, from a simulation of some thousand faults for each value."""
    rows = []
    for count in ranks:
        mtbf_s = 3600 * times.rank_mtbf_hours / count
        every_s = optimal_interval_s(times.checkpoint_s, mtbf_s)
        downs_s = (
            times.detect_s + times.requeue_s + times.restart_s,
            times.detect_s + times.restart_s,
        )
        stop, elastic = (
            simulate_restarts(every_s, times.checkpoint_s, mtbf_s, down_s, Random(times.seed))
            for down_s in downs_s
        )
        restart = simulate_last_checkpoints(times, mtbf_s, every_s, Random(times.seed))
        shrink = simulate_shrink(times, count, every_s, Random(times.seed))
        rows.append(Goodput(count, mtbf_s, every_s, stop, elastic, restart, shrink))
    return rows


def simulate_restarts(
    every_s: float,
    checkpoint_s: float,
    mtbf_s: float,
    down_s: float,
    random: Random,
    faults: int = _FAULTS,
    while_down: bool = True,
) -> float:
    """Simulates the goodput of a job that returns to its newest checkpoint after each fault, and is
    down for down_s.

    while_down: whether faults also occur during that time. A drill waits until the job resumes.
    """
    useful_s = total_s = 0.0
    for _ in range(faults):
        until_fault_s = random.expovariate(1 / mtbf_s)
        useful_s += every_s * math.floor(until_fault_s / (every_s + checkpoint_s))
        total_s += until_fault_s + (
            _until_it_runs(down_s, mtbf_s, random) if while_down else down_s
        )
    return useful_s / total_s


def _until_it_runs(down_s: float, mtbf_s: float, random: Random) -> float:
    """Simulates the time until a job runs again, if a fault in the meantime restarts the wait;
    returns the mean if that is nearly certain."""
    if down_s > _SURE * mtbf_s:
        return mtbf_s * math.expm1(min(down_s / mtbf_s, _LARGEST))
    total_s = down_s
    while (another_s := random.expovariate(1 / mtbf_s)) < down_s:
        total_s += another_s
    return total_s


def restarts_formula(every_s: float, checkpoint_s: float, mtbf_s: float, down_s: float) -> float:
    """Returns the expectation of simulate_restarts() (Daly 2006, eq. 20)."""
    return every_s / (
        mtbf_s * math.exp(down_s / mtbf_s) * math.expm1((every_s + checkpoint_s) / mtbf_s)
    )


def simulate_last_checkpoints(
    times: FaultTimes,
    mtbf_s: float,
    every_s: float,
    random: Random,
    faults: int = _FAULTS,
    while_down: bool = True,
) -> float:
    """Simulates the goodput of a job whose living ranks write a checkpoint of the last sync point
    before the job restarts: guard.lost=restart."""
    down_s = times.detect_s + times.checkpoint_s + times.restart_s
    useful_s = total_s = 0.0
    share = every_s / (every_s + times.checkpoint_s)
    for _ in range(faults):
        until_fault_s = random.expovariate(1 / mtbf_s)
        useful_s += max(0.0, until_fault_s - random.uniform(0, times.sync_s)) * share
        total_s += until_fault_s + (
            _until_it_runs(down_s, mtbf_s, random) if while_down else down_s
        )
    return useful_s / total_s


def last_checkpoints_formula(times: FaultTimes, mtbf_s: float, every_s: float) -> float:
    """Returns the expectation of simulate_last_checkpoints(). The mean of max(0, X - U), X
    exponential, U uniform, is M^2 (1 - exp(-sync / M)) / sync."""
    kept_s = -(mtbf_s**2) * math.expm1(-times.sync_s / mtbf_s) / times.sync_s
    down_s = times.detect_s + times.checkpoint_s + times.restart_s
    return kept_s * every_s / (every_s + times.checkpoint_s) / (mtbf_s * math.exp(down_s / mtbf_s))


def simulate_shrink(
    times: FaultTimes, ranks: int, every_s: float, random: Random, faults: int = _FAULTS
) -> float:
    """Simulates the goodput of a job whose living ranks continue from the last sync point. A dead
    rank is back after repair_s, by a restart that loses no steps.

    If no rank is left, the job waits for one.
    """
    useful_s = now_s = 0.0
    returns: list[float] = []  # when dead ranks can return
    down_s = times.detect_s + times.reform_s
    speed_of_checkpoints = every_s / (every_s + times.checkpoint_s)
    for _ in range(faults):
        until_s = now_s + random.expovariate(1 / mtbf_of(times, ranks))
        while now_s < until_s:
            next_s = min(until_s, returns[0]) if returns else until_s
            useful_s += (
                max(0.0, next_s - now_s) * _speed(times, ranks, len(returns)) * speed_of_checkpoints
            )
            now_s = max(now_s, next_s)
            if returns and returns[0] <= now_s:
                while returns and returns[0] <= now_s:
                    heapq.heappop(returns)
                now_s += times.restart_s
        useful_s -= (
            random.uniform(0, times.sync_s)
            * _speed(times, ranks, len(returns))
            * speed_of_checkpoints
        )
        now_s += down_s
        if len(returns) < ranks - 1:
            heapq.heappush(returns, now_s + times.repair_s)
    return max(0.0, useful_s / now_s)


def _speed(times: FaultTimes, ranks: int, missing: int) -> float:
    return max(0.0, 1 - times.lost_speed * missing / ranks)


def shrink_formula(times: FaultTimes, ranks: int, every_s: float) -> float:
    """Returns the expectation of simulate_shrink() to first order, for faults that cost little
    compared with the time between two faults."""
    mtbf_s = mtbf_of(times, ranks)
    per_fault_s = times.sync_s / 2 + times.detect_s + times.reform_s + times.restart_s
    missing = times.repair_s / (3600 * times.rank_mtbf_hours)  # share of a rank's time
    return (
        every_s
        / (every_s + times.checkpoint_s)
        * (1 - per_fault_s / mtbf_s)
        * (1 - times.lost_speed * missing)
    )


def mtbf_of(times: FaultTimes, ranks: int) -> float:
    """Returns the mean seconds between two faults of a job."""
    return 3600 * times.rank_mtbf_hours / ranks


def fault_lines(times: FaultTimes, rows: Sequence[Goodput]) -> list[str]:
    """Returns the lines of the table."""
    assumed = ", ".join(f"{key}={value:g}" for key, value in times._asdict().items())
    lines = [
        "faults: share of time that moves the job (goodput), simulated",
        f"  {assumed}",
        f"  {'ranks':>6} {'fault every':>12} {'checkpoint every':>17} {'stop':>8} {'elastic':>8} "
        f"{'restart':>8} {'shrink':>8}",
    ]
    for row in rows:
        shares = " ".join(
            f"{100 * share:7.2f}%" for share in (row.stop, row.elastic, row.restart, row.shrink)
        )
        lines.append(f"  {row.ranks:>6,} {_time(row.mtbf_s):>12} {_time(row.every_s):>17} {shares}")
    lines += [
        "  stop: the job ends, and is started again after requeue_s from the newest checkpoint; "
        "elastic: at once, by launch --elastic;",
        "  restart: launch --elastic and guard.lost=restart, where the living ranks write a "
        "checkpoint of the last sync point first;",
        "  shrink: guard.lost=shrink continues without the dead ranks, which launch --elastic adds "
        "again after repair_s",
    ]
    return lines


def faults_json(times: FaultTimes, rows: Sequence[Goodput]) -> dict[str, Any]:
    return {"times": times._asdict(), "rows": [row._asdict() for row in rows]}


def _time(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
