"""Fields in every row of a benchmark that describe its origin."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent


def provenance() -> dict[str, Any]:
    """The commit, the date, the machine and its load, and the version of torch."""
    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "torch": version("torch"),
        "python": platform.python_version(),
    }


def commit() -> str:
    """The short hash of the checked-out commit, with a + if a file of the package differs from it;
    "unknown" outside a git repository."""
    head = _git("rev-parse", "--short=8", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "hvdtrain", "benchmarks/*.py")
    return f"{head}{'+' if changed else ''}" if head else "unknown"


def processor() -> str:
    """The processor's name as the kernel reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def append(path: Path, row: dict[str, Any]) -> None:
    """Adds the row to a file of JSON lines, with its provenance unless the row has its own."""
    with path.open("a") as file:
        file.write(json.dumps(provenance() | row) + "\n")


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(FOLDER.parent), *words], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
