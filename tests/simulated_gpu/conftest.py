"""The processes with simulated GPUs, which run once the jobs of all chosen tests, and a summary of
what the jobs did."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pool
import pytest
from ranks import mpirun, python
from simulated_gpu.table import ALONE, EACH, ON_TWO

ALONE_FOUND = pytest.StashKey[dict[str, Any]]()
ON_TWO_FOUND = pytest.StashKey[dict[str, Any]]()


class Done(NamedTuple):
    """What a job did."""

    name: str
    waits: float  # of the host for the device, in a step
    difference: float  # largest relative one of a loss, from one process on the CPU


def run(out: Path, words: dict[str, list[str]], engines: dict[str, list[str]]) -> None:
    """Runs jobs in one process, or those of each engine on two ranks."""
    program = pool.alone("simulated_gpu.start_jobs:main", str(out), words, engines)
    start = functools.partial(mpirun, 2) if engines else python
    done = start(program, timeout_s=900, is_warm=False)
    assert done.returncode == 0, done.stdout + done.stderr


def chosen(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """The parameters of each test of this session."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    return [item.callspec.params for item in items if hasattr(item, "callspec")]


@pytest.fixture(scope="session")
def alone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the tool's own checks found, and what each job did in one process."""
    out = tmp_path_factory.mktemp("alone") / "out.json"
    names = {row.get("name", "") for row in chosen(request)}
    names |= {ON_TWO[name].like for name in names & ON_TWO.keys()}
    run(out, {name: [job.kind, job.words] for name, job in ALONE.items() if name in names}, {})
    found = request.config.stash[ALONE_FOUND] = dict(json.loads(out.read_text()))
    return found


@pytest.fixture(scope="session")
def on_two(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """{engine: {job: what each of two ranks did}}, with the engines "mpi" and "torchdist"."""
    out = tmp_path_factory.mktemp("on-two") / "out.json"
    rows = {(row.get("name"), row.get("engine")) for row in chosen(request)}
    engines: dict[str, list[str]] = {}
    for name, engine in EACH:
        if (name, engine) in rows:
            engines.setdefault(engine, []).append(name)
    run(out, {name: [row.kind, row.words] for name, row in ON_TWO.items()}, engines)
    ranks = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in (0, 1)]
    found = request.config.stash[ON_TWO_FOUND] = {
        engine: {name: [rank[engine][name] for rank in ranks] for name in names}
        for engine, names in engines.items()
    }
    return found


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    alone = config.stash.get(ALONE_FOUND, {"jobs": {}})["jobs"]
    on_two = config.stash.get(ON_TWO_FOUND, {})
    if jobs := list(done(alone, on_two)):
        terminalreporter.section("simulated GPUs")
        for line in summary(jobs):
            terminalreporter.line(line)


def done(alone: dict[str, Any], on_two: dict[str, Any]) -> Iterator[Done]:
    """What each job did, without judging it; of two ranks the worse one counts."""
    good = {name: job for name, job in alone.items() if "error" not in job}
    for name, job in good.items():
        yield _done(name, [job["gpu"]], job["cpu"]["losses"])
    for engine, names in on_two.items():
        for name, ranks in names.items():
            like = good.get(ON_TWO[name].like)
            yield _done(f"{name} on {engine}", ranks, like["cpu"]["losses"] if like else [])


def _done(name: str, ranks: list[dict[str, Any]], expected: list[float]) -> Done:
    differences = [
        abs(ours - theirs) / abs(theirs)
        for found in ranks
        for ours, theirs in zip(found.get("losses", []), expected, strict=False)
    ]
    waits = max(sum(found.get("waits", {}).values()) for found in ranks)
    return Done(name, waits, max(differences, default=0.0))


def summary(jobs: list[Done]) -> Iterator[str]:
    worst = max(jobs, key=lambda job: job.difference)
    yield f"{len(jobs)} jobs; losses differ by at most {worst.difference:.1e} ({worst.name})"
    names_by_waits = defaultdict[float, list[str]](list)
    for job in jobs:
        names_by_waits[job.waits].append(job.name)
    for waits, names in sorted(names_by_waits.items()):
        listed = f": {', '.join(names)}" * (waits > 0)
        yield f"{waits:g} waits for the device in a step: {len(names)} jobs{listed}"
