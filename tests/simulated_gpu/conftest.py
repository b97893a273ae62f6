"""The processes with simulated GPUs, which run all jobs of a table once for all tests."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pool
import pytest
from ranks import mpirun, python
from simulated_gpu.table import ALONE, ON_TWO, Job, RanksJob


def finished(out: Path, table: Mapping[str, Job | RanksJob], *engines: str) -> dict[str, Any]:
    """What the jobs of a table did: in one process, or on two ranks with each engine."""
    words = {name: job.words for name, job in table.items()}
    program = pool.alone("simulated_gpu.jobs:main", str(out), words, *engines)
    start = functools.partial(mpirun, 2) if engines else python
    done = start(program, timeout_s=900, is_warm=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(out.read_text()))


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the tool's own checks found, and what each job did in one process."""
    out = tmp_path_factory.mktemp("alone") / "out.json"
    return finished(out, ALONE)


@pytest.fixture(scope="session")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """{engine: {job: what each of two ranks did}}"""
    out = tmp_path_factory.mktemp("on-two") / "out.json"
    return finished(out, ON_TWO, "mpi", "torchdist")
