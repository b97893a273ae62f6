"""The result of bench allreduce, as tables and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hvdtrain.cli.bench.timing import median_speedup, quartiles
from hvdtrain.cli.formatting import align, format_bytes, format_seconds, plural

MPI = "plain MPI_Allreduce"
COPY = "copy of memory"
IN_PARTS = "reduce-scatter, all-gather"
GROUPED = "hvd.grouped_allreduce"

_COLUMNS = ("", "", "rounds", "median", "quartiles", "GB/s", "x MPI")
_NOTES = (
    "median, quartiles: of the slowest rank's seconds; each round runs all methods in turn",
    "GB/s: bus bandwidth, 2 (n - 1) / n x bytes / median; for the copy bytes / median",
    "x MPI: how many times as fast as MPI_Allreduce in the same round, median over rounds",
)


class MethodTimes(NamedTuple):
    """One method of reducing, and the slowest rank's seconds in each round."""

    method: str
    seconds: list[float]


class PayloadTimes(NamedTuple):
    """What was reduced, one vector or many tensors, by all methods."""

    name: str
    size_bytes: int
    methods: list[MethodTimes]


class Host(NamedTuple):
    name: str
    ranks: int
    cores: int


class AllreduceResult(NamedTuple):
    engine: str
    engine_reason: str
    ranks: int
    bucket_bytes: int
    hosts: list[Host]
    payloads: list[PayloadTimes]


def count_hosts(ranks: Sequence[tuple[str, int]]) -> list[Host]:
    """Hosts, from (host name, cores) of each rank."""
    ranks_on_host = Counter(name for name, _ in ranks)
    cores = dict(ranks)
    return [Host(name, count, cores[name]) for name, count in ranks_on_host.items()]


def bus_bytes_per_s(method: str, size_bytes: int, ranks: int, seconds: float) -> float:
    """Bytes that cross each rank's link in a ring allreduce; for the copy the bytes copied."""
    crossing = size_bytes if method == COPY else 2 * (ranks - 1) / ranks * size_bytes
    return crossing / seconds


def oversubscription_warning(hosts: Iterable[Host]) -> list[str]:
    """A line where hosts have more ranks than cores, which makes times incomparable."""
    crowded = [f"{host.ranks} ranks on {host.cores} cores" for host in hosts if host.ranks > host.cores]
    if not crowded:
        return []
    return [f"OVERSUBSCRIBED: {', '.join(crowded)}: ranks share cores, so times are longer than with a core for each rank"]


def to_text(result: AllreduceResult) -> list[str]:
    """The lines for people."""
    return [
        f"hvdtrain bench allreduce: {plural(result.ranks, 'rank')}, engine {result.engine} ({result.engine_reason}), "
        f"buckets of {format_bytes(result.bucket_bytes)}",
        "; ".join(f"{host.name}: {plural(host.ranks, 'rank')}, {host.cores} cores" for host in result.hosts),
        *oversubscription_warning(result.hosts),
        "",
        *align([_COLUMNS, *_rows(result)], left=(0, 1)),
        "",
        *_NOTES,
        *_compared_with_grouped(result.payloads),
    ]


def _rows(result: AllreduceResult) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for payload in result.payloads:
        mpi_seconds = _seconds_of(payload, MPI)
        for index, (method, seconds) in enumerate(payload.methods):
            low, median, high = quartiles(seconds)
            rows.append(
                (
                    payload.name if index == 0 else "",
                    method,
                    str(len(seconds)),
                    format_seconds(median),
                    f"{format_seconds(low)} .. {format_seconds(high)}",
                    f"{bus_bytes_per_s(method, payload.size_bytes, result.ranks, median) / 1e9:.3g}",
                    f"{median_speedup(seconds, mpi_seconds):.2f}" if mpi_seconds else "",
                )
            )
    return rows


def _seconds_of(payload: PayloadTimes, method: str) -> list[float] | None:
    return next((times.seconds for times in payload.methods if times.method == method), None)


def _compared_with_grouped(payloads: Sequence[PayloadTimes]) -> list[str]:
    """Many small tensors, compared with Horovod's own way of reducing a group."""
    lines = []
    for payload in payloads:
        grouped_seconds = _seconds_of(payload, GROUPED)
        if grouped_seconds is None:
            continue
        others = [times for times in payload.methods if times.method not in (GROUPED, COPY)]
        shares = ", ".join(f"{times.method} {1 / median_speedup(times.seconds, grouped_seconds):.2f}" for times in others)
        lines.append(f"{payload.name}, time / time of {GROUPED}: {shares}")
    return lines


def to_json(result: AllreduceResult) -> dict[str, Any]:
    """The report for programs, with the seconds of every round."""
    rows = []
    for payload in result.payloads:
        for method, seconds in payload.methods:
            low, median, high = quartiles(seconds)
            rows.append(
                {
                    "what": payload.name,
                    "bytes": payload.size_bytes,
                    "method": method,
                    "n": len(seconds),
                    "quartiles_s": [low, median, high],
                    "bytes_per_s": bus_bytes_per_s(method, payload.size_bytes, result.ranks, median),
                    "seconds": seconds,
                }
            )
    return {
        "engine": result.engine,
        "why": result.engine_reason,
        "ranks": result.ranks,
        "bucket_bytes": result.bucket_bytes,
        "hosts": {host.name: {"ranks": host.ranks, "cores": host.cores} for host in result.hosts},
        "rows": rows,
    }
