"""The facts of all ranks side by side: what must be equal and is not, and where hosts are told apart wrongly."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hvdtrain.cli.check.findings import Facts, Finding, grouped, ranks_words

CLOCKS_S = 2.0  # apart, at most: the lines of logs and the time limits of hosts are then still in order


def compare(everyone: Sequence[Facts]) -> list[Finding]:
    """Every finding that two ranks or more are needed for, but for those of what they share."""
    found = [*_versions(everyone), *_containers(everyone), *_data(everyone), *_hosts(everyone), *_local_ranks(everyone)]
    return [*found, *_launchers(everyone), *_clocks(everyone)]


def files(everyone: Sequence[Facts], digests: Sequence[Mapping[str, str]]) -> list[Finding]:
    """Which files of hvdtrain's code differ."""
    fix = "one installation that all hosts see, or the same on each; look for PYTHONPATH and for stale containers"
    return list(_odd(everyone, digests, "code of hvdtrain differs:", fix))


def configurations(everyone: Sequence[Facts], values: Sequence[Mapping[str, str]]) -> list[Finding]:
    """Which keys of the configuration differ."""
    return list(_odd(everyone, values, "configuration differs:", "give every rank the same command and the same --config file"))


def _odd(everyone: Sequence[Facts], items: Sequence[Mapping[str, str]], title: str, fix: str) -> Iterator[Finding]:
    """A finding for each group of ranks that differs from the largest; items are each rank's, in rank order."""
    groups = list(grouped(everyone, lambda facts: tuple(sorted(items[facts["rank"]].items()))).items())
    usual = dict(groups[0][0])
    for values, ranks in groups[1:]:
        theirs = dict(values)
        keys = sorted(key for key in usual | theirs if usual.get(key) != theirs.get(key))
        words = ", ".join(_pair(key, theirs, usual) for key in keys[:4]) + f" and {len(keys) - 4} more" * (len(keys) > 4)
        yield Finding("error", f"{title} {words}", f"{ranks_words(ranks)}; {len(groups[0][1])} ranks are alike", fix)


def _pair(key: str, theirs: Mapping[str, str], usual: Mapping[str, str]) -> str:
    if key.endswith(".py"):
        return key if key in theirs and key in usual else f"{key} ({'not there' if key in usual else 'only there'})"
    return f"{key} is {theirs.get(key)} instead of {usual.get(key)}"


def _versions(everyone: Sequence[Facts]) -> Iterator[Finding]:
    names = dict.fromkeys(name for facts in everyone for name in _installed(facts))
    for name in names:
        for version, usual, ranks in _unusual(everyone, [_installed(facts).get(name) for facts in everyone]):
            what = f"{name} {version or 'is not installed'} instead of {usual or 'none'}"
            yield Finding("error", what, ranks_words(ranks), "the same environment (or the same container image) on every host")


def _installed(facts: Facts) -> dict[str, str]:
    libraries = {f"MPI of {name}": facts["libraries"][key] for name, key in (("mpi4py", "mpi4py"), ("Horovod", "horovod"))}
    return facts["versions"] | {name: library for name, library in libraries.items() if library}


def _containers(everyone: Sequence[Facts]) -> Iterator[Finding]:
    for kind, usual, ranks in _unusual(everyone, [facts["container"] for facts in everyone]):
        what = f"some ranks run {_in(kind)}, the others {_in(usual)}"
        yield Finding("warning", what, ranks_words(ranks), "start all of them the same way")


def _in(container: str) -> str:
    return f"in a container ({container})" if container else "in none"


def _data(everyone: Sequence[Facts]) -> Iterator[Finding]:
    able = [facts for facts in everyone if facts["data"]]
    fix = "the same data on every host: copy it anew, or data.root= of a shared folder"
    for name in dict.fromkeys(name for facts in able for name in facts["data"] if name != "seconds"):
        for value, usual, ranks in _unusual(able, [str(facts["data"].get(name)) for facts in able]):
            yield Finding("error", f"{name}: {value} instead of {usual}", ranks_words(ranks), fix)


def _unusual(ranks: Sequence[Facts], values: Sequence[Any]) -> Iterator[tuple[Any, Any, list[Facts]]]:
    """(another value, the most frequent one, the ranks that have the other): values are the ranks', in their order."""
    groups: dict[Any, list[Facts]] = {}
    for facts, value in zip(ranks, values, strict=True):
        groups.setdefault(value, []).append(facts)
    usual = max(groups, key=lambda value: len(groups[value]))
    yield from ((value, usual, group) for value, group in groups.items() if value != usual)


def _hosts(everyone: Sequence[Facts]) -> Iterator[Finding]:
    for host, ranks in grouped(everyone, lambda facts: facts["host"]).items():
        if len(machines := grouped(ranks, lambda facts: facts["machine"])) > 1:
            where = "; ".join(f"rank{'s' * (len(of) > 1)} {', '.join(str(f['rank']) for f in of)}" for of in machines.values())
            fix = "a host name of its own for each machine or container: MPI and local ranks go by it"
            yield Finding("warning", f"{len(machines)} machines are all called {host}", where, fix)
    for machine, ranks in grouped(everyone, lambda facts: facts["machine"]).items():
        if machine and len(hosts := grouped(ranks, lambda facts: facts["host"])) > 1:
            what = f"hosts {', '.join(sorted(hosts))} are one machine, started once: their ranks share its cores, memory and GPUs"
            yield Finding("note", what, ranks_words(ranks), "nothing, where they are containers or a test")


def _local_ranks(everyone: Sequence[Facts]) -> Iterator[Finding]:
    for host, ranks in grouped(everyone, lambda facts: facts["host"]).items():
        told = sorted(facts["local_rank"] for facts in ranks)
        if told != list(range(len(ranks))) or any(facts["local_size"] != len(ranks) for facts in ranks):
            what = f"the local ranks on {host} are {', '.join(map(str, told))}, not 0 to {len(ranks) - 1}: GPUs and threads go by them"
            fix = "host names that the launcher and the hosts agree on; one launcher, which starts all ranks of a host"
            yield Finding("warning", what, ranks_words(ranks), fix)


def _launchers(everyone: Sequence[Facts]) -> Iterator[Finding]:
    """MPI of the host, which started the ranks, against MPI in them; where they are of different makes the engine has not started."""
    for (launcher, library, kind), ranks in grouped(everyone, _mpi_pair).items():
        ours, theirs = (re.search(r"Open MPI v?(\d+)", text) for text in (library, launcher))
        if ours and theirs and (ours[1] != theirs[1]) and not (theirs[1] == "4" and int(ours[1]) <= 4):
            what = f"{launcher} started ranks that use {library}{' in a container' * bool(kind)}"
            fix = f"the same major version on both sides: an image with Open MPI {theirs[1]}, or the host's module of Open MPI {ours[1]}"
            yield Finding("warning", what, ranks_words(ranks), fix)


def _mpi_pair(facts: Facts) -> tuple[str, str, str]:
    library: Any = facts["libraries"]["horovod" if facts["engine"] == "horovod" else "mpi4py"]
    return facts["launcher_mpi"], library or "", facts["container"]


def _clocks(everyone: Sequence[Facts]) -> Iterator[Finding]:
    times = {facts["rank"]: facts["clock_s"] for facts in everyone if facts["clock_s"]}
    if times and (apart := max(times.values()) - min(times.values())) > CLOCKS_S:
        late = [facts for facts in everyone if facts["clock_s"] and facts["clock_s"] - min(times.values()) > CLOCKS_S]
        what = f"the clocks of the hosts are {apart:.1f} s apart"
        yield Finding("warning", what, ranks_words(late), "a time service (chrony) on every host; rank 0's clock counts for time limits")
