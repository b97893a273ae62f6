"""How many layers of an image GPT two ranks can train within a memory limit: replicated, sharded,
and with recomputation.

python benchmarks/layers_that_fit.py [--limit MIB] [--layers 12] [--most 96] [--ranks 2] [--data DIR] [--json FILE] [KEY=VALUE ...]

The model is the one in configs/image_gpt_cifar10.yaml, in float32, on noise or on images of 32x32
in DIR/train/CLASS and DIR/test/CLASS. Each job makes two steps and an evaluation, and writes its
checkpoint. `ulimit -d` limits each rank's private writable memory: tensors, Python, heaps, stacks
of threads. `ulimit -v` would count reserved addresses and libraries too; a container's memory.max
ends a process that then says nothing. Without --limit it is the smallest limit, in steps of 16 MiB,
within which --layers replicated layers train. A job fits if it ends with exit code 0. Otherwise it
must end with 83, out of memory: any other code ends the benchmark.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

MEMORY = 83
STEP_MIB = 16
MOST_MIB = 4096
CONFIG = Path(__file__).resolve().parent.parent / "configs" / "image_gpt_cifar10.yaml"
NOISE = ["data.source=synthetic", 'data.source_options={"samples":8,"val_samples":2}']
WORDS = [
    "batch.micro=1",
    "evaluate.samples=2",
    "batch.evaluate=1",
    "speed.precision=fp32",
    "comm.engine=mpi",
    "recipe.warmup=0",
    "recipe.schedule=constant",
    "recipe.floor=0",
    "log.samples=0",
    "stop.steps=2",
]
WAYS = {
    "replicated": ["shard.stage=0"],
    "stage 2, recomputed": ["shard.stage=2", "model.recompute=all"],
    "stage 3, recomputed": ["shard.stage=3", "model.recompute=all"],
}


class Outcome(NamedTuple):
    """How a job ended."""

    code: int
    seconds: float
    end: dict[str, Any]  # the event "end"; empty if there is none
    printed: str

    @property
    def advice(self) -> str:
        """What the job says would have fitted."""
        found = re.search(r"hvdtrain: (the job takes .*)", self.printed)
        return found[1] if found else ""


class Benchmark:
    """Jobs on a number of ranks; each job is written to `sink` as a line of JSON."""

    def __init__(self, ranks: int, words: list[str], sink: Path | None) -> None:
        self._ranks = ranks
        self._words = words
        self._sink = sink

    def job(self, way: str, layers: int, limit_mib: int) -> Outcome:
        """Runs a job. Raises SystemExit if it ends with another code than 0 and 83."""
        words = [
            *WORDS,
            f"batch.size={self._ranks}",
            *WAYS[way],
            f"model.layers={layers}",
            *self._words,
        ]
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder, "run")
            command = [
                "mpirun",
                "-np",
                str(self._ranks),
                sys.executable,
                "-m",
                "hvdtrain",
                "--config",
                str(CONFIG),
                *words,
                f"run={run}",
            ]
            limited = ["sh", "-c", 'ulimit -d "$0" && exec "$@"', str(1024 * limit_mib), *command]
            began = time.perf_counter()
            done = subprocess.run(
                limited,
                capture_output=True,
                text=True,
                check=False,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            outcome = Outcome(
                done.returncode, time.perf_counter() - began, _end(run), done.stdout + done.stderr
            )
        self._record(way, layers, limit_mib, outcome)
        if outcome.code not in (0, MEMORY):
            raise SystemExit(
                f"{way}, {layers} layers, {limit_mib} MiB: exit code "
                f"{outcome.code}\n{outcome.printed}"
            )
        return outcome

    def fits(self, way: str, layers: int, limit_mib: int) -> bool:
        return self.job(way, layers, limit_mib).code == 0

    def _record(self, way: str, layers: int, limit_mib: int, outcome: Outcome) -> None:
        """On the screen, and in the file."""
        memory = {name: value for name, value in outcome.end.items() if "memory" in name}
        row = {
            "way": way,
            "layers": layers,
            "limit_mib": limit_mib,
            "code": outcome.code,
            "seconds": round(outcome.seconds, 1),
            **memory,
        }
        row |= {"advice": outcome.advice} if outcome.advice else {}
        print(json.dumps(row), flush=True)
        if self._sink:
            with self._sink.open("a") as file:
                file.write(json.dumps(row) + "\n")


def _end(run: Path) -> dict[str, Any]:
    try:
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    except OSError:
        return {}
    return next((event for event in events if event["kind"] == "end"), {})


def largest(fits: Callable[[int], bool], fitting: int, most: int) -> int:
    """Returns the largest number of fitting ... most that fits. fits(fitting) is known to be true,
    and every number that fits is smaller than those that do not."""
    while fitting < most:
        middle = (fitting + most + 1) // 2
        if fits(middle):
            fitting = middle
        else:
            most = middle - 1
    return fitting


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, metavar="MIB")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--most", type=int, default=96)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--data", type=Path, metavar="DIR")
    parser.add_argument("--json", type=Path)
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    images = ["data.source=folder", f"data.root={options.data}", 'data.source_options={"size":32}']
    benchmark = Benchmark(
        options.ranks, [*(images if options.data else NOISE), *options.words], options.json
    )
    limit = options.limit
    if limit is None:
        least = largest(
            lambda steps: not benchmark.fits("replicated", options.layers, STEP_MIB * steps),
            0,
            MOST_MIB // STEP_MIB,
        )
        limit = STEP_MIB * (least + 1)
    rows = [
        (way, largest(lambda layers, way=way: benchmark.fits(way, layers, limit), 0, options.most))
        for way in WAYS
    ]
    print(f"ulimit -d of {limit} MiB for each of {options.ranks} ranks")
    for way, layers in rows:
        print(f"{way:22} {layers:3} layers")


if __name__ == "__main__":
    main()
