"""Seconds from the launcher to the end of the first step, by part, on 1, 2 and 4 ranks; and the
import time of each large library.

python benchmarks/start.py [--ranks 1,2,4] [--rounds 5] [--engine horovod] [--json FILE]

Every start is a separate job with the default configuration and one step; the parts are the field
start_s of its event "started". An import is measured in a new Python process, after another has
filled the file cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from peers import environment
from rows import append

LIBRARIES = ("numpy", "torch", "horovod.torch", "mpi4py.MPI", "jax", "keras", "matplotlib")
IMPORT = "import time; began = time.perf_counter(); import {}; print(time.perf_counter() - began)"


def start(ranks: int, engine: str) -> dict[str, float]:
    """Seconds of each part of one start."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["stop.steps=1", f"run={folder}/run", "resume=no"]
        if ranks > 1:
            words.append(f"comm.engine={engine}")
        command = [sys.executable, "-m", "hvdtrain", *words]
        if ranks > 1:
            command = ["mpirun", "-np", str(ranks), *command]
        subprocess.run(
            ["timeout", "-k", "5", "120", *command],
            env=environment(),
            capture_output=True,
            check=True,
        )
        lines = (Path(folder) / "run" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    parts: dict[str, float] = next(e["start_s"] for e in events if "start_s" in e)
    return parts


def seconds_of_import(library: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT.format(library)],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.splitlines()[-1])


def row_of(times: list[float], what: dict[str, Any]) -> dict[str, Any]:
    """A row with the median and the range."""
    return what | {
        "seconds": round(statistics.median(times), 3),
        "range": [round(min(times), 3), round(max(times), 3)],
        "n": len(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", default="horovod", choices=["horovod", "mpi", "torchdist"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    worlds = [int(word) for word in options.ranks.split(",")]
    found: dict[int, list[dict[str, float]]] = {ranks: [] for ranks in worlds}
    for _ in range(options.rounds):
        for ranks in worlds:
            found[ranks].append(start(ranks, options.engine))
    rows = []
    for ranks, starts in found.items():
        whole = {"ranks": ranks, "engine": options.engine if ranks > 1 else "single"}
        rows.append(row_of([sum(parts.values()) for parts in starts], whole | {"part": "whole"}))
        for part in starts[0]:
            rows.append(row_of([parts.get(part, 0.0) for parts in starts], whole | {"part": part}))
    for library in LIBRARIES:
        if importlib.util.find_spec(library.split(".", maxsplit=1)[0]) is None:
            print(f"import {library}: not installed")
            continue
        seconds_of_import(library)
        times = [seconds_of_import(library) for _ in range(options.rounds)]
        rows.append(row_of(times, {"part": f"import {library}"}))
    for row in rows:
        world = f"{row['ranks']} ranks, " if "ranks" in row else ""
        low, high = row["range"]
        print(f"{world}{row['part']:<24} {row['seconds']:7.3f} s ({low:.3f} to {high:.3f})")
        if options.json:
            append(options.json, row)


if __name__ == "__main__":
    main()
