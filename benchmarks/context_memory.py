"""The longest sequence that a rank can train within a memory limit, with parallel.context, with
parallel.tensor and in one process; and the bytes that it sends in a step.

python benchmarks/context_memory.py [--limit MIB] [--most POSITIONS] [--measure] [--json FILE]

The model is a gpt of 8 layers, 4 heads and width 64 in float32, on random tokens below 256, with
one sample in each step and SGD. The counter of `plan --memory` counts the tensors of a rank that
are alive at the same time, in a step and in an evaluation. Lengths are multiples of 256
positions.

`messages_bytes` are those that rank 0 sends in a step for the attention of other ranks, and
`formula_bytes` those of the formulas of docs/parallel.md; the script fails if they differ.
`rest_bytes` are sent for gradients, and with parallel.tensor for activations. --measure also
starts that job under mpirun, and adds the largest `rank_memory_mb` of its event "end". It includes
the check of the model before the first step, and memory that is freed but not returned.
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

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.comm.engines import features_of
from hvdtrain.config.read import configure
from hvdtrain.data.source import NamedArrays, Split
from hvdtrain.extras.memory_forecast.predict import planned_work
from hvdtrain.frameworks.footprint import PlannedStep, PlannedWork
from hvdtrain.training.datasets import open_datasets

VOCABULARY = 256
STEP = 256  # positions
MIB = 2**20
LAYERS = 8
WIDTH = 64
WAYS: dict[str, tuple[int, list[str]]] = {  # ranks, words
    "one process": (1, []),
    "ring on 2 ranks": (2, ["parallel.context=2"]),
    "ulysses on 2 ranks": (2, ["parallel.context=2", "parallel.context_by=ulysses"]),
    "ring on 4 ranks": (4, ["parallel.context=4"]),
    "ulysses on 4 ranks": (4, ["parallel.context=4", "parallel.context_by=ulysses"]),
    "tensor on 4 ranks": (4, ["parallel.tensor=4", "parallel.sequence=true"]),
    "ring on 2 x tensor on 2 ranks": (
        4,
        ["parallel.context=2", "parallel.tensor=2", "parallel.sequence=true"],
    ),
}
WORDS = [
    *("task.name=language", "data.name=context_memory:windows", "model.name=gpt"),
    *(f"model.layers={LAYERS}", "model.heads=4", f"model.width={WIDTH}", "optim.name=sgd"),
    "batch.size=1",
    *("batch.evaluate=1", "stop.steps=2", "log.samples=0", "log.display=lines"),
    "guard.equal_steps=null",
]


def windows(split: Split, length: int) -> NamedArrays:
    """Returns {"tokens": (n, length + 1)} of random tokens."""
    samples = 2 if split == "train" else 1
    generator = np.random.Generator(np.random.PCG64(samples))
    tokens = generator.integers(0, VOCABULARY, (samples, length + 1))
    return NamedArrays({"tokens": tokens}, {"tokens": VOCABULARY}, f"random tokens, {split}")


def counted(way: str, length: int) -> PlannedWork:
    """Returns what a rank keeps and sends in a step."""
    ranks, words = WAYS[way]
    config = configure(None, [*WORDS, *words, f"data.length={length}"])
    task = open_datasets(config, SingleProcessCommunicator()).task
    step = PlannedStep(1, 1, 1, 0, writes_checkpoints=False)
    engine = "mpi" if ranks > 1 else "single"
    return planned_work(config, task, step, ranks, features_of(engine))[0]


def longest(way: str, limit_mib: float, most: int) -> int:
    """Returns the most positions within the limit, up to `most`.

    Memory is nearly linear in the positions: two lengths predict the longest one, from which the
    search goes up or down.
    """
    known: dict[int, float] = {}

    def mib(steps: int) -> float:
        if steps not in known:
            known[steps] = counted(way, steps * STEP).footprint.total / MIB
            print(f"{way}: {steps * STEP} positions take {known[steps]:.1f} MiB", flush=True)
        return known[steps]

    half, whole = most // STEP // 8, most // STEP // 4
    slope = (mib(whole) - mib(half)) / (whole - half)
    found = min(int(half + (limit_mib - mib(half)) / slope), most // STEP)
    while mib(found) > limit_mib:
        found -= 1
    while found < most // STEP and mib(found + 1) <= limit_mib:
        found += 1
    return found * STEP


def formula_bytes(way: str, length: int) -> int:
    """Returns the bytes of a rank's messages in a step, by docs/parallel.md: in each block 6 A
    (N - 1) / N numbers with ring, 8 A (N - 1) / N^2 with ulysses. With parallel.tensor, A is
    divided by its ranks."""
    words = dict(word.split("=") for word in WAYS[way][1])
    ranks = int(words.get("parallel.context", 1))
    numbers = length * WIDTH // int(words.get("parallel.tensor", 1))
    if "parallel.context_by" in words:
        return 4 * LAYERS * 8 * numbers * (ranks - 1) // ranks**2
    return 4 * LAYERS * 6 * numbers * (ranks - 1) // ranks


def measured_mib(way: str, length: int) -> float:
    """Returns the largest memory of a rank of a job."""
    ranks, words = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [sys.executable, "-m", "hvdtrain", *WORDS, *words]
        command += [f"data.length={length}", f"run={run}"]
        if ranks > 1:
            command = ["mpirun", "-np", str(ranks), *command, "comm.engine=mpi"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
        lines = (run / "events.jsonl").read_text().splitlines()
    events: list[dict[str, Any]] = [json.loads(line) for line in lines]
    end = next(event for event in reversed(events) if event["kind"] == "end")
    return float(max(end["rank_memory_mb"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--limit", type=float, default=64, metavar="MIB")
    parser.add_argument("--most", type=int, default=32768, metavar="POSITIONS")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    for way in arguments.ways:
        positions = longest(way, arguments.limit, arguments.most)
        work = counted(way, positions)
        messages = [moved.sent_bytes for moved in work.moved if moved.kind == "message"]
        expected = formula_bytes(way, positions)
        if sum(messages) != expected:
            raise SystemExit(f"{way}: {sum(messages)} bytes, {expected} by the formula")
        row = {
            "way": way,
            "ranks": WAYS[way][0],
            "limit_mib": arguments.limit,
            "positions": positions,
            "counted_mib": round(work.footprint.total / MIB, 1),
            "messages_bytes": sum(messages),
            "formula_bytes": expected,
            "rest_bytes": work.sent_bytes - sum(messages),
        }
        if arguments.measure:
            row["rank_memory_mb"] = measured_mib(way, positions)
        print(json.dumps(row), flush=True)
        if arguments.json:
            append(arguments.json, row)


if __name__ == "__main__":
    main()
