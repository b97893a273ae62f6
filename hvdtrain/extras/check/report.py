"""The result of a check as text and as JSON: a row for each rank, the facts that ranks have in
common, and the findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.cli.output import align
from hvdtrain.comm.cores.topology import number_ranges
from hvdtrain.errors import DONE, USER
from hvdtrain.extras.check.dry_run import AllreduceSpeed, RunFolderFacts, Speeds
from hvdtrain.extras.check.rank_facts import (
    Finding,
    Level,
    RankFacts,
    count_by_level,
    group_ranks,
)

_MOST_ROWS = 128
_MOST_ALIKE = 32  # findings with one fix
_COLUMNS = ("rank", "host", "local", "device", "cores", "threads", "engine", "launcher", "pid")


@dataclass(frozen=True)
class CheckReport:
    """The complete result of a check."""

    ranks: Sequence[RankFacts]  # facts of all ranks; of rank 0 only if the ranks are not connected
    engine: str  # its name, and why it was chosen
    run: RunFolderFacts | None
    speed: Speeds
    findings: Sequence[Finding]  # the most severe first
    cores: Sequence[str] = ()  # how comm.bind binds the ranks, as in a job's header

    @property
    def exit_code(self) -> int:
        return USER if count_by_level(self.findings)["error"] else DONE


def to_json(report: CheckReport) -> dict[str, Any]:
    """Returns the object that --json writes; the types of CheckReport's fields describe it."""
    return {
        "exit_code": report.exit_code,
        "engine": report.engine,
        "findings": [finding._asdict() for finding in report.findings],
        "speed": report.speed,
        "run": report.run,
        "cores": list(report.cores),
        "ranks": list(report.ranks),
    }


def to_text(report: CheckReport) -> list[str]:
    """Returns the lines for people."""
    return [
        _title(report),
        "",
        *_rank_table(report.ranks),
        "",
        *_in_common(report),
        "",
        *_findings(report.findings),
    ]


def one_line(finding: Finding) -> str:
    return f"{finding.what} ({finding.where}); fix: {finding.fix}"


def _title(report: CheckReport) -> str:
    if len(report.ranks) > 1:
        return f"hvdtrain check: {len(report.ranks)} ranks"
    if report.ranks[0]["size"] > 1:
        return "hvdtrain check: rank 0 alone"
    return "hvdtrain check: 1 rank: nothing to compare"


def _rank_table(ranks: Sequence[RankFacts]) -> list[str]:
    rows = [_COLUMNS, *(_row(facts, _threads(facts, ranks)) for facts in ranks[:_MOST_ROWS])]
    lines = align(rows, left=range(len(_COLUMNS)))
    if len(ranks) > _MOST_ROWS:
        lines.append(f"... and {len(ranks) - _MOST_ROWS} more; --json has all of them")
    return lines


def _row(facts: RankFacts, threads: int) -> tuple[str, ...]:
    """Returns the cells of a rank, in the order of _COLUMNS."""
    device = facts["device"]
    return (
        str(facts["rank"]),
        f"{facts['host']} ({facts['container']})" if facts["container"] else facts["host"],
        f"{facts['local_rank']} of {facts['local_size']}",
        f"{device['name']} {device['model']}".rstrip() if device else "?",
        f"{len(facts['cores'])} ({number_ranges(facts['cores'])})",
        str(threads),
        facts["engine"] or "-",
        facts["launcher"],
        str(facts["pid"]),
    )


def _threads(facts: RankFacts, ranks: Sequence[RankFacts]) -> int:
    """Returns the number of threads that a rank would use, as fair_threads() of
    frameworks/learner.py chooses it."""
    if (facts["omp_num_threads"] or "").isdecimal():
        return int(facts["omp_num_threads"] or 1)
    sharing = sum(
        (other["host"], other["cores"]) == (facts["host"], facts["cores"]) for other in ranks
    )
    return max(1, len(facts["cores"]) // sharing)


def _in_common(report: CheckReport) -> Iterator[str]:
    """Returns the facts that all ranks, or most of them, have in common."""
    first = report.ranks[0]
    yield f"engine    {report.engine}"
    yield (
        f"versions  {', '.join(f'{name} {version}' for name, version in first['versions'].items())}"
    )
    yield from _mpi_line(report.ranks)
    yield from (f"cores     {line}" for line in report.cores)
    yield from network_lines(report.ranks)
    yield f"digests   code {first['code']}, configuration {first['config'] or '?'}"
    if first["data"]:
        slowest_s = max(facts["data"]["seconds"] for facts in report.ranks if facts["data"])
        yield (
            f"data      {first['data']['training samples']:,} training samples, read in "
            f"{slowest_s:g} s"
        )
    if report.run:
        yield f"run       {report.run['folder']}, {report.run['bytes_free'] / 1e9:,.1f} GB free"
    if report.speed["engine"]:
        yield _speed_line(first["engine"], report.speed["engine"])
    if report.speed["mpi"]:
        yield _speed_line("plain MPI", report.speed["mpi"])
    times = [facts["clock_s"] for facts in report.ranks if facts["clock_s"] is not None]
    if len(times) > 1:
        yield f"clocks    {max(times) - min(times):.3f} s apart"


def _mpi_line(ranks: Sequence[RankFacts]) -> Iterator[str]:
    """Yields the MPI that started the ranks, and the MPI libraries they use."""
    parts = []
    launchers = group_ranks(
        (facts for facts in ranks if facts["launcher_mpi"]), lambda facts: facts["launcher_mpi"]
    )
    if launchers:
        parts.append(f"started by {'; '.join(launchers)}")
    libraries = ranks[0]["libraries"]
    used = [
        f"{name} uses {library}"
        for name, library in (("mpi4py", libraries["mpi4py"]), ("horovod", libraries["horovod"]))
        if library
    ]
    if used:
        parts.append(", ".join(used))
    if parts:
        yield f"MPI       {'; '.join(parts)}"


def network_lines(ranks: Sequence[RankFacts]) -> Iterator[str]:
    """Yields the interfaces of each host, and the variables that select them; hosts with the same
    interfaces share a line."""
    hosts = list({facts["host"]: facts for facts in ranks}.values())
    names = group_ranks(
        hosts, lambda facts: (tuple(facts["networks"]), tuple(facts["network_variables"].items()))
    )
    for (interfaces, variables), alike in names.items():
        found = (
            ", ".join(f"{name} {alike[0]['networks'][name]}" for name in interfaces)
            or "none with an address"
        )
        chosen = (
            "; ".join(f"{name}={value}" for name, value in variables)
            or "the engine chooses (docs/clusters.md, Which network)"
        )
        others = f" and {len(alike) - 1} more hosts" if len(alike) > 1 else ""
        yield f"networks  {alike[0]['host']}{others}: {found}; {chosen}"


def _speed_line(name: str, speed: AllreduceSpeed) -> str:
    large = f"16 MiB in {speed['seconds'] * 1e3:,.1f} ms ({speed['bytes_per_s'] / 1e6:,.0f} MB/s)"
    return f"allreduce {name}: 8 B in {speed['latency_s'] * 1e6:,.0f} us, {large}"


def _findings(findings: Sequence[Finding]) -> Iterator[str]:
    """Yields the findings. Of findings with the same fix, as on many hosts, only the first are
    shown, with a line that counts the others."""
    with_fix: Counter[tuple[Level, str]] = Counter()
    for finding in findings:
        kind = finding.level, finding.fix
        with_fix[kind] += 1
        if with_fix[kind] <= _MOST_ALIKE:
            yield f"{finding.level}: {finding.what}"
            yield from [f"  where: {finding.where}"] if finding.where else []
            yield from [f"  fix: {finding.fix}"] if finding.fix else []
    for (level, fix), count in with_fix.items():
        if count > _MOST_ALIKE:
            yield f"{level}: {count - _MOST_ALIKE:,} more like these; --json has all of them"
            yield f"  fix: {fix}"
    counts = count_by_level(findings)
    summary = ", ".join(
        f"{count} {level}{'s' if count > 1 else ''}" for level, count in counts.items() if count
    )
    conclusion = "the job would fail or run incorrectly" if counts["error"] else "the job can start"
    yield f"{summary or 'nothing found'}: {conclusion}"
