"""The longest sequence that ranks can train within a memory limit, with parallel.context and in one
process; and the bytes that they send.

python benchmarks/context_memory.py [--limit MIB] [--most POSITIONS] [--json FILE] [KEY=VALUE ...]

The model is a gpt of 8 layers, 4 heads and width 64 in float32, on random tokens below 256, with
one sample in each step. A job makes two steps and an evaluation. Its memory is the largest
`rank_memory_mb` of its event "end": the peak of a rank without libraries and data. The longest
sequence is searched by bisection, in steps of 512 positions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rows import append

from hvdtrain.data.source import NamedArrays, Split

VOCABULARY = 256
STEP = 512  # positions
WAYS: dict[str, tuple[int, list[str]]] = {  # ranks, words
    "one process": (1, []),
    "ring on 2 ranks": (2, ["parallel.context=2"]),
    "ulysses on 2 ranks": (2, ["parallel.context=2", "parallel.context_by=ulysses"]),
    "ring on 4 ranks": (4, ["parallel.context=4"]),
    "ulysses on 4 ranks": (4, ["parallel.context=4", "parallel.context_by=ulysses"]),
}
WORDS = [
    *("task.name=language", "data.name=context_memory:windows", "model.name=gpt"),
    *("model.layers=8", "model.heads=4", "model.width=64", "optim.name=sgd", "batch.size=1"),
    *("batch.evaluate=1", "stop.steps=2", "log.samples=0", "log.display=lines"),
    "guard.equal_steps=null",
]


def windows(split: Split, length: int) -> NamedArrays:
    """Returns {"tokens": (n, length + 1)} of random tokens."""
    samples = 2 if split == "train" else 1
    generator = np.random.Generator(np.random.PCG64(samples))
    tokens = generator.integers(0, VOCABULARY, (samples, length + 1))
    return NamedArrays({"tokens": tokens}, {"tokens": VOCABULARY}, f"random tokens, {split}")


def memory_mib(way: str, length: int, words: list[str]) -> float:
    """Returns the largest memory of a rank of a job."""
    ranks, of_way = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [sys.executable, "-m", "hvdtrain", *WORDS, *of_way, *words]
        command += [f"data.length={length}", f"run={run}"]
        if ranks > 1:
            command = ["mpirun", "-np", str(ranks), *command, "comm.engine=mpi"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
        lines = (run / "events.jsonl").read_text().splitlines()
    end: dict[str, Any] = next(
        event for event in map(json.loads, reversed(lines)) if event["event"] == "end"
    )
    return float(max(end["rank_memory_mb"]))


def longest(way: str, limit_mib: float, most: int, words: list[str]) -> tuple[int, float]:
    """Returns the longest sequence within the limit, and the memory that it takes."""
    fits = 0
    taken = 0.0
    too_long = most // STEP + 1
    while too_long - fits > 1:
        tried = (fits + too_long) // 2
        found = memory_mib(way, tried * STEP, words)
        print(f"{way}: {tried * STEP} positions take {found:.0f} MiB", flush=True)
        if found <= limit_mib:
            fits = tried
            taken = found
        else:
            too_long = tried
    return fits * STEP, taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--limit", type=float, default=160, metavar="MIB")
    parser.add_argument("--most", type=int, default=16384, metavar="POSITIONS")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    for way in arguments.ways:
        positions, taken = longest(way, arguments.limit, arguments.most, arguments.words)
        row = {
            "way": way,
            "ranks": WAYS[way][0],
            "limit_mib": arguments.limit,
            "positions": positions,
            "memory_mib": round(taken, 1),
            "words": arguments.words,
        }
        print(json.dumps(row), flush=True)
        if arguments.json:
            append(arguments.json, row)


if __name__ == "__main__":
    main()
