"""What `check` finds: a finding says what, where and how to fix it; and how ranks are named in findings."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, TypeVar

from hvdtrain.cli.check.rank_facts import RankFacts
from hvdtrain.errors import UserError

Key = TypeVar("Key")
Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")
MOST_HOSTS = 8  # named in one finding


class Finding(NamedTuple):
    """One problem or fact. An error keeps the job from running correctly; a note needs no action."""

    level: Level
    what: str
    where: str
    fix: str


def finding_of_error(error: Exception, rank_name: str) -> Finding:
    """An exception of a rank as a finding of level error."""
    if isinstance(error, UserError):
        where = f"{rank_name}; {error.where}" if error.where else rank_name
        return Finding("error", error.what, where, error.fix)
    where = rank_name
    if frames := traceback.extract_tb(error.__traceback__):
        where += f", {frames[-1].filename}:{frames[-1].lineno}"
    return Finding("error", f"{type(error).__name__}: {error}", where, "an unexpected error: training would stop at it, too")


def describe_rank(facts: RankFacts) -> str:
    """rank 3 on n2"""
    return f"rank {facts['rank']} on {facts['host']}"


def describe_ranks(group: Iterable[RankFacts]) -> str:
    """ranks 0-2 on n1, 4 on n2"""
    ranks_of_host: dict[str, list[int]] = {}
    for facts in group:
        ranks_of_host.setdefault(facts["host"], []).append(facts["rank"])
    named = ", ".join(f"{number_ranges(ranks)} on {host}" for host, ranks in list(ranks_of_host.items())[:MOST_HOSTS])
    more = f" and {len(ranks_of_host) - MOST_HOSTS} more hosts" if len(ranks_of_host) > MOST_HOSTS else ""
    count = sum(len(ranks) for ranks in ranks_of_host.values())
    return f"{'ranks' if count > 1 else 'rank'} {named}{more}"


def number_ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5" """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def group_ranks(ranks: Iterable[RankFacts], key: Callable[[RankFacts], Key]) -> dict[Key, list[RankFacts]]:
    """The ranks by a value that each has: the largest group first, and of equally large ones that of the lowest rank."""
    groups: dict[Key, list[RankFacts]] = {}
    for facts in ranks:
        groups.setdefault(key(facts), []).append(facts)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def most_severe_first(findings: Iterable[Finding]) -> list[Finding]:
    """Errors, then warnings, then notes; each finding once."""
    return sorted(dict.fromkeys(findings), key=lambda finding: LEVELS.index(finding.level))


def count_by_level(findings: Sequence[Finding]) -> dict[Level, int]:
    return {level: sum(finding.level == level for finding in findings) for level in LEVELS}
