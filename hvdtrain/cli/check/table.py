"""A check in words: a row for each rank, what all of them have, and the findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hvdtrain.cli.check.findings import Facts, Finding, grouped, spans

_ROWS = 128
_HEAD = ("rank", "host", "local", "device", "cores", "threads", "engine", "launcher", "pid")


class Report(NamedTuple):
    """Everything that a check has found."""

    ranks: Sequence[Facts]
    engine: str  # and why it is this one
    run: dict[str, Any] | None  # the run folder
    speed: dict[str, Any]  # engine, mpi: each None or latency_s, seconds, bytes_per_s
    findings: Sequence[Finding]


def text(report: Report) -> list[str]:
    """Every line."""
    size, many = report.ranks[0]["size"], len(report.ranks)
    met = f"{many} ranks" if many > 1 else "1 rank: nothing to compare" if size == 1 else "rank 0 alone"
    return [f"hvdtrain check: {met}", "", *_table(report.ranks), "", *_alike(report), "", *_findings(report.findings)]


def tree(report: Report, code: int) -> dict[str, Any]:
    """The report for --json; the schema is in check.py."""
    return {
        "exit_code": code,
        "engine": report.engine,
        "findings": [finding._asdict() for finding in report.findings],
        "speed": report.speed,
        "run": report.run,
        "ranks": [dict(facts) for facts in report.ranks],
    }


def short(finding: Finding) -> str:
    """On one line."""
    return f"{finding.what} ({finding.where}); fix: {finding.fix}"


def _table(ranks: Sequence[Facts]) -> list[str]:
    rows = [_HEAD, *(_row(facts, _threads(facts, ranks)) for facts in ranks[:_ROWS])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return lines + [f"... and {len(ranks) - _ROWS} more; --json has them all"] * (len(ranks) > _ROWS)


def _row(facts: Facts, threads: int) -> tuple[str, ...]:
    device = facts["device"] or {"name": "?", "model": ""}
    place = f"{facts['local_rank']} of {facts['local_size']}"
    cores = f"{len(facts['cores'])} ({spans(facts['cores'])})"
    model = f" {device['model']}" if device["model"] else ""
    host = facts["host"] + (f" ({facts['container']})" if facts["container"] else "")
    told = (facts["engine"] or "-", facts["launcher"], str(facts["pid"]))
    return (str(facts["rank"]), host, place, device["name"] + model, cores, str(threads), *told)


def _threads(facts: Facts, ranks: Sequence[Facts]) -> int:
    """What a rank would compute with, as fair_threads() of frameworks/learner.py."""
    if str(facts["omp_num_threads"] or "").isdecimal():
        return int(facts["omp_num_threads"])
    sharers = sum((other["host"], other["cores"]) == (facts["host"], facts["cores"]) for other in ranks)
    return max(1, len(facts["cores"]) // sharers)


def _alike(report: Report) -> Iterator[str]:
    """What is true of all ranks, or of most."""
    first = report.ranks[0]
    yield f"engine    {report.engine}"
    yield f"versions  {', '.join(f'{name} {version}' for name, version in first['versions'].items())}"
    libraries = ", ".join(f"{key} uses {first['libraries'][key]}" for key in ("mpi4py", "horovod") if first["libraries"][key])
    started = "; ".join(grouped([f for f in report.ranks if f["launcher_mpi"]], lambda facts: facts["launcher_mpi"]))
    if libraries or started:
        yield f"MPI       {'; '.join(filter(None, (started and f'started by {started}', libraries)))}"
    yield f"digests   code {first['code']}, configuration {first['config'] or '?'}"
    if first["data"]:
        slowest = max(facts["data"]["seconds"] for facts in report.ranks if facts["data"])
        yield f"data      {first['data']['training samples']:,} training samples, read in {slowest:g} s"
    if report.run:
        yield f"run       {report.run['folder']}, {report.run['bytes_free'] / 1e9:,.1f} GB free"
    for name, told in report.speed.items():
        if told:
            large = f"16 MiB in {told['seconds'] * 1e3:,.1f} ms ({told['bytes_per_s'] / 1e6:,.0f} MB/s)"
            yield f"allreduce {'plain MPI' if name == 'mpi' else first['engine']}: 8 B in {told['latency_s'] * 1e6:,.0f} us, {large}"
    times = [facts["clock_s"] for facts in report.ranks if facts["clock_s"]]
    if len(times) > 1:
        yield f"clocks    {max(times) - min(times):.3f} s apart"


def _findings(findings: Sequence[Finding]) -> Iterator[str]:
    for finding in findings:
        yield f"{finding.level}: {finding.what}"
        yield from (f"  {name}: {value}" for name, value in (("where", finding.where), ("fix", finding.fix)) if value)
    counts = {level: sum(finding.level == level for finding in findings) for level in ("error", "warning", "note")}
    words = ", ".join(f"{count} {level}{'s' * (count > 1)}" for level, count in counts.items() if count)
    yield f"{words or 'nothing found'}: {'the job would not run as it should' if counts['error'] else 'the job can start'}"
