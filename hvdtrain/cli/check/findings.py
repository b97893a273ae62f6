"""What `check` tells: findings, each with what, where and what to do, and how the ranks of one are named."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from hvdtrain.errors import UserError

T = TypeVar("T")
Facts = Mapping[str, Any]  # what one rank knows; plain, so that ranks with another version of the code can read each other
Level = Literal["error", "warning", "note"]


class Finding(NamedTuple):
    """One thing to know. An error keeps the job from running as it should; a note is nobody's mistake."""

    level: Level
    what: str
    where: str
    fix: str


def of_error(error: Exception, who: str, level: Level = "error") -> Finding:
    """A rank's exception as a finding."""
    if isinstance(error, UserError):
        return Finding(level, error.what, f"{who}{'; ' * bool(error.where)}{error.where}", error.fix)
    place = traceback.extract_tb(error.__traceback__)[-1:]
    origin = f", {place[0].filename}:{place[0].lineno}" if place else ""
    return Finding(level, f"{type(error).__name__}: {error}", who + origin, "an unexpected error: training would stop at it, too")


def probe(found: list[Finding], who: str, look: Callable[[], T]) -> T | None:
    """What a look at something gives; one that fails is a finding of this rank, and None. No collective may be inside."""
    try:
        return look()
    except Exception as error:  # whatever a rank stumbles over is told, and the others are not left waiting
        found.append(of_error(error, who))
        return None


def who(facts: Facts) -> str:
    """rank 3 on n2"""
    return f"rank {facts['rank']} on {facts['host']}"


def ranks_words(group: Iterable[Facts]) -> str:
    """ranks 0-2 on n1, 4 on n2"""
    hosts: dict[str, list[int]] = {}
    for facts in group:
        hosts.setdefault(facts["host"], []).append(facts["rank"])
    words = ", ".join(f"{spans(ranks)} on {host}" for host, ranks in list(hosts.items())[:8])
    more = f" and {len(hosts) - 8} more hosts" if len(hosts) > 8 else ""
    return f"rank{'s' * (sum(map(len, hosts.values())) > 1)} {words}{more}"


def spans(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5" """
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts)


def grouped(everyone: Sequence[Facts], key: Callable[[Facts], Any]) -> dict[Any, list[Facts]]:
    """The ranks by a value of theirs: the most frequent first, and of equals that of the lowest rank."""
    groups: dict[Any, list[Facts]] = {}
    for facts in everyone:
        groups.setdefault(key(facts), []).append(facts)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))
