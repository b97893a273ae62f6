"""Compares the facts of all ranks and reports differences and contradictions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from hvdtrain.errors import short
from hvdtrain.extras.check.rank_facts import (
    Finding,
    RankFacts,
    describe_ranks,
    group_ranks,
)
from hvdtrain.training.replicas.software import FIXES

Value = TypeVar("Value")
# largest acceptable clock difference: log lines and time limits of hosts still make sense
CLOCKS_S = 2.0
MOST_DIFFERENCES = 4  # files or keys named in one finding


class DifferingRanks(NamedTuple, Generic[Value]):
    """Ranks whose value differs from the most frequent one."""

    value: Value
    majority_value: Value
    ranks: list[RankFacts]


def find_differences(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Returns every finding from comparing ranks, except about what they share
    (shared_resources.py)."""
    return [
        *_versions(ranks),
        *_modules(ranks),
        *_environment(ranks),
        *_containers(ranks),
        *_data(ranks),
        *_host_names(ranks),
        *_local_ranks(ranks),
        *_launchers(ranks),
        *_clocks(ranks),
    ]


def differing_code(
    ranks: Sequence[RankFacts], digests: Sequence[Mapping[str, str]]
) -> list[Finding]:
    """Compares the files of hvdtrain; `digests` are in rank order."""
    return list(
        _differing_items(ranks, digests, _differing_file, "hvdtrain's code differs", FIXES["code"])
    )


def differing_configuration(
    ranks: Sequence[RankFacts], values: Sequence[Mapping[str, str]]
) -> list[Finding]:
    """Compares the keys of the configuration; `values` are in rank order."""
    return list(
        _differing_items(
            ranks, values, _differing_key, "the configuration differs", FIXES["configuration"]
        )
    )


def _differing_items(
    ranks: Sequence[RankFacts],
    items: Sequence[Mapping[str, str]],
    describe: Callable[[str, Mapping[str, str], Mapping[str, str]], str],
    title: str,
    fix: str,
) -> Iterator[Finding]:
    """Returns a finding for each group of ranks that differs from the largest group."""
    groups = list(
        group_ranks(ranks, lambda facts: tuple(sorted(items[facts["rank"]].items()))).items()
    )
    majority_items, majority = groups[0]
    expected = dict(majority_items)
    for group_items, group in groups[1:]:
        found = dict(group_items)
        names = sorted(name for name in expected | found if expected.get(name) != found.get(name))
        details = ", ".join(describe(name, found, expected) for name in names[:MOST_DIFFERENCES])
        if len(names) > MOST_DIFFERENCES:
            details += f" and {len(names) - MOST_DIFFERENCES} more"
        where = (
            f"{describe_ranks(group)}; {len(majority)} other ranks agree"
            if len(majority) > 1
            else describe_ranks(group)
        )
        yield Finding("error", f"{title}: {details}", where, fix)


def _differing_file(name: str, found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    if name not in found:
        return f"{name} (missing)"
    return name if name in expected else f"{name} (only there)"


def _differing_key(name: str, found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    return f"{name} is {found.get(name)} instead of {expected.get(name)}"


def _minorities(
    ranks: Sequence[RankFacts], key: Callable[[RankFacts], Value]
) -> Iterator[DifferingRanks[Value]]:
    """Yields the groups of ranks whose value differs from the most frequent one."""
    groups = list(group_ranks(ranks, key).items())
    for value, group in groups[1:]:
        yield DifferingRanks(value, groups[0][0], group)


def _differing(
    ranks: Sequence[RankFacts],
    items_of: Callable[[RankFacts], Mapping[str, Any]],
    absent: str,
    describe: Callable[[str, str, str], str],
    fix: str,
) -> Iterator[Finding]:
    """Returns a finding for each name and each group of ranks whose item of this name is not the
    most frequent one. describe(name, item there, most frequent item)."""
    items = {facts["rank"]: items_of(facts) for facts in ranks}
    for name in dict.fromkeys(name for of_rank in items.values() for name in of_rank):

        def item(facts: RankFacts, name: str = name) -> str:
            return str(items[facts["rank"]].get(name, absent))

        for found, usual, group in _minorities(ranks, item):
            yield Finding("error", describe(name, found, usual), describe_ranks(group), fix)


def _versions(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    return _differing(
        ranks,
        _installed,
        "not installed",
        lambda name, found, usual: f"{name} is {found}; other ranks: {usual}",
        FIXES["versions"],
    )


def _installed(facts: RankFacts) -> dict[str, str]:
    """Returns versions of packages, and of the MPI libraries under them."""
    versions = dict(facts["versions"])
    if facts["libraries"]["mpi4py"]:
        versions["MPI of mpi4py"] = facts["libraries"]["mpi4py"]
    if facts["libraries"]["horovod"]:
        versions["MPI of Horovod"] = facts["libraries"]["horovod"]
    return versions


def _modules(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    return _differing(
        ranks,
        lambda facts: facts.get("modules", {}),
        "not there",
        lambda name, found, usual: f"the code of {name} differs: {found}; other ranks: {usual}",
        FIXES["code"],
    )


def _environment(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    return _differing(
        ranks,
        lambda facts: facts.get("environment", {}),
        "not set",
        lambda name, found, usual: f"{name} is {short(found)}; other ranks: {short(usual)}",
        FIXES["environment"],
    )


def _containers(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for kind, usual, group in _minorities(ranks, lambda facts: facts["container"]):
        what = f"some ranks run {_container(kind)}, the others {_container(usual)}"
        yield Finding("warning", what, describe_ranks(group), "start all ranks the same way")


def _container(kind: str) -> str:
    return f"in a container ({kind})" if kind else "outside of containers"


def _data(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    return _differing(
        [facts for facts in ranks if facts["data"]],
        lambda facts: {
            name: value for name, value in (facts["data"] or {}).items() if name != "seconds"
        },
        "None",
        lambda name, found, usual: f"{name}: {found} instead of {usual}",
        FIXES["data"],
    )


def _host_names(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Finds machines that share a host name, and host names that share a machine."""
    for host, on_host in group_ranks(ranks, lambda facts: facts["host"]).items():
        machines = group_ranks(on_host, lambda facts: facts["machine"])
        if len(machines) > 1:
            where = "; ".join(
                f"ranks {_number_list(group)}" if len(group) > 1 else f"rank {_number_list(group)}"
                for group in machines.values()
            )
            fix = (
                "give each machine or container its own host name: MPI and local ranks depend on it"
            )
            yield Finding(
                "warning", f"{len(machines)} machines have the host name {host}", where, fix
            )
    for machine, on_machine in group_ranks(ranks, lambda facts: facts["machine"]).items():
        hosts = {facts["host"] for facts in on_machine}
        if machine and len(hosts) > 1:
            what = (
                f"hosts {', '.join(sorted(hosts))} are one machine (same boot id): their ranks "
                "share its cores, memory and GPUs"
            )
            yield Finding(
                "note",
                what,
                describe_ranks(on_machine),
                "none needed where they are containers or a test",
            )


def _number_list(ranks: Sequence[RankFacts]) -> str:
    """Formats ranks: 0, 1, 5."""
    return ", ".join(str(facts["rank"]) for facts in ranks)


def _local_ranks(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for host, on_host in group_ranks(ranks, lambda facts: facts["host"]).items():
        found = sorted(facts["local_rank"] for facts in on_host)
        expected = list(range(len(on_host)))
        if found != expected or any(facts["local_size"] != len(on_host) for facts in on_host):
            numbers = ", ".join(map(str, found))
            what = (
                f"the local ranks on {host} are {numbers}, not 0 to {expected[-1]}: they choose "
                "GPUs and numbers of threads"
            )
            fix = (
                "start all ranks of a host with one launcher, with host names on which the "
                "launcher and the hosts agree"
            )
            yield Finding("warning", what, describe_ranks(on_host), fix)


class _MpiPair(NamedTuple):
    """Compares the MPI that started a rank with the MPI that the rank uses."""

    launcher: str
    library: str
    container: str


def _launchers(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Reports an Open MPI launcher with another major version than the ranks' Open MPI. No engine
    starts if the two are different MPI implementations."""
    for pair, group in group_ranks(ranks, _mpi_pair).items():
        launcher_version = _open_mpi_major(pair.launcher)
        library_version = _open_mpi_major(pair.library)
        if (
            launcher_version is None
            or library_version is None
            or launcher_version == library_version
        ):
            continue
        if launcher_version == 4 and library_version < 4:  # "Open MPI 4 or older"
            continue
        what = (
            f"{pair.launcher} started ranks that use "
            f"{pair.library}{' in a container' if pair.container else ''}"
        )
        fix = (
            f"use the same major version on both sides: an image with Open MPI {launcher_version}, "
            f"or the host's module of Open MPI {library_version}"
        )
        yield Finding("warning", what, describe_ranks(group), fix)


def _mpi_pair(facts: RankFacts) -> _MpiPair:
    library = (
        facts["libraries"]["horovod"]
        if facts["engine"] == "horovod"
        else facts["libraries"]["mpi4py"]
    )
    return _MpiPair(facts["launcher_mpi"], library or "", facts["container"])


def _open_mpi_major(name: str) -> int | None:
    """Returns the major version: "Open MPI v5.0.11" -> 5."""
    found = re.search(r"Open MPI v?(\d+)", name)
    return int(found[1]) if found else None


def _clocks(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    times = {facts["rank"]: facts["clock_s"] for facts in ranks if facts["clock_s"] is not None}
    if not times:
        return
    earliest = min(times.values())
    difference_s = max(times.values()) - earliest
    if difference_s > CLOCKS_S:
        late = [
            facts for facts in ranks if times.get(facts["rank"], earliest) - earliest > CLOCKS_S
        ]
        fix = "run a time service (chrony) on every host; time limits use the clock of rank 0"
        yield Finding(
            "warning",
            f"the clocks of the hosts differ by {difference_s:.1f} s",
            describe_ranks(late),
            fix,
        )
