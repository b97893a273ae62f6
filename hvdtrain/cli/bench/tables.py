"""What the benches tell: tables for people, one JSON object for programs."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.errors import UserError


class Timing(NamedTuple):
    """One way of doing something, and its seconds in each round."""

    name: str
    seconds: list[float]


class Row(NamedTuple):
    """One vector, or many tensors, in all ways."""

    name: str
    size_bytes: int
    timings: list[Timing]


MPI, COPY, GROUPED = "plain MPI_Allreduce", "copy of memory", "hvd.grouped_allreduce"
_HEAD = ("", "", "rounds", "median", "quartiles", "GB/s", "x MPI")
_NOTES = (
    "median, quartiles: of the slowest rank's seconds; all ways in turn in each round",
    "GB/s: bus bandwidth, 2 (n - 1) / n x bytes / median; of the copy bytes / median",
    "x MPI: how many times as fast as MPI_Allreduce in the same round, the median over rounds",
)


def quartiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(seconds) == 1:
        return seconds[0], seconds[0], seconds[0]
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, middle, high


def as_fast(way: Sequence[float], other: Sequence[float]) -> float:
    """How many times as fast as the other: the median over the rounds that both were in."""
    return statistics.median(theirs / ours for ours, theirs in zip(way, other, strict=True))


def bus_bytes_per_s(way: str, size_bytes: int, ranks: int, seconds: float) -> float:
    """What crosses each rank's link when rings are used; of a copy what is copied."""
    return (1 if way == COPY else 2 * (ranks - 1) / ranks) * size_bytes / seconds


def hosts_of(hosts: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """(host, cores) of each rank -> {hosts: {name: {ranks, cores}}}"""
    counts, cores = Counter(name for name, _ in hosts), dict(hosts)
    return {"hosts": {name: {"ranks": count, "cores": cores[name]} for name, count in counts.items()}}


def allreduce_text(facts: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """The table and what is to be said about it."""
    communicator = f"engine {facts['engine']} ({facts['why']}), buckets of {bytes_words(facts['bucket_bytes'])}"
    where = "; ".join(f"{name}: {_ranks(host['ranks'])}, {host['cores']} cores" for name, host in facts["hosts"].items())
    lines = [f"hvdtrain bench allreduce: {_ranks(facts['ranks'])}, {communicator}", where, *crowded(facts["hosts"].values()), ""]
    table = [_HEAD]
    for row in rows:
        plain = next((timing.seconds for timing in row.timings if timing.name == MPI), None)
        for place, timing in enumerate(row.timings):
            low, middle, high = quartiles(timing.seconds)
            speed = bus_bytes_per_s(timing.name, row.size_bytes, facts["ranks"], middle) / 1e9
            against = f"{as_fast(timing.seconds, plain):.2f}" if plain else ""
            spread = f"{time_words(low)} .. {time_words(high)}"
            name = "" if place else row.name
            table.append((name, timing.name, f"{len(timing.seconds)}", time_words(middle), spread, f"{speed:.3g}", against))
    return [*lines, *aligned(table), "", *_NOTES, *_against_grouped(rows)]


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"


def _against_grouped(rows: Sequence[Row]) -> list[str]:
    """Many small tensors beside Horovod's own way."""
    lines = []
    for row in rows:
        if grouped := next((timing.seconds for timing in row.timings if timing.name == GROUPED), None):
            others = [timing for timing in row.timings if timing.name not in (GROUPED, COPY)]
            shares = ", ".join(f"{timing.name} {1 / as_fast(timing.seconds, grouped):.2f}" for timing in others)
            lines.append(f"{row.name}, time / that of {GROUPED}: {shares}")
    return lines


def allreduce_tree(facts: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """The same for programs, with the seconds of every round."""
    told = []
    for row in rows:
        for timing in row.timings:
            low, middle, high = quartiles(timing.seconds)
            speed = bus_bytes_per_s(timing.name, row.size_bytes, facts["ranks"], middle)
            one = {"what": row.name, "bytes": row.size_bytes, "way": timing.name, "n": len(timing.seconds)}
            told.append(one | {"quartiles_s": [low, middle, high], "bytes_per_s": speed, "seconds": timing.seconds})
    return {**facts, "rows": told}


def crowded(hosts: Any) -> list[str]:
    """Said plainly: such numbers are of ranks that take turns on a core."""
    over = [f"{host['ranks']} ranks on {host['cores']} cores" for host in hosts if host["ranks"] > host["cores"]]
    return [f"OVERSUBSCRIBED: {', '.join(over)}: ranks take turns, times are longer than on cores of their own"] if over else []


def tell(path: str | None, lines: Sequence[str], tree: Mapping[str, Any]) -> None:
    """On rank 0: the text, or JSON instead of it on the standard output, or both."""
    written = json.dumps(tree)
    print(written if path == "-" else "\n".join(lines), flush=True)
    if path not in (None, "-"):
        try:
            Path(str(path)).write_text(written + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}", "--json", "a file that can be written, or -") from None


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Columns, the first two to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = []
    for row in table:
        cells = [cell.ljust(width) if place < 2 else cell.rjust(width) for place, (cell, width) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


def time_words(seconds: float) -> str:
    """Three digits: 4.21 us, 183 ms"""
    unit, factor = next(((unit, factor) for unit, factor in (("s", 1.0), ("ms", 1e3)) if seconds * factor >= 1), ("us", 1e6))
    return f"{seconds * factor:#.3g}".rstrip(".") + f" {unit}"


def bytes_words(size: int) -> str:
    """1024 -> 1 KiB, 100000000 -> 100 MB, 1000 -> 1000 B"""
    for unit, factor in (("GiB", 2**30), ("GB", 10**9), ("MiB", 2**20), ("MB", 10**6), ("KiB", 2**10)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"
