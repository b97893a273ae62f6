"""The processes with simulated GPUs, which run once the jobs of all chosen tests."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pool
import pytest
from ranks import mpirun, python
from simulated_gpu.table import ALONE, EACH, ON_TWO


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
    return dict(json.loads(out.read_text()))


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
    return {
        engine: {name: [rank[engine][name] for rank in ranks] for name in names}
        for engine, names in engines.items()
    }
