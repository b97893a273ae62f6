"""The benchmarks behind docs/performance.md, one after the other in at most 90 minutes, with each ratio beside its last one.

python benchmarks/all.py --root DIR [--part NAME ...] [--limit-m 90] [--keep]

DIR holds FashionMNIST/raw; the part "data" also needs images in train/CLASS. Nothing else should run on the machine. Each part is a
command that can be run alone. Its rows are appended to benchmarks/NAME.jsonl, with the commit, the date and the machine, if --keep is
given; rows of a part that fails or exceeds its limit say why it is incomplete. The others run. The exit code is 1 if a part failed.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from peers import DEFAULTS
from rows import FOLDER, append

Rows = list[dict[str, Any]]
Values = dict[str, float]  # ratios by the name of what is compared
PEERS = ("horovod", "ddp gloo", "lightning", "accelerate")


def by(field: str, *names: str) -> Callable[[Rows], Values]:
    """Reads `field` (its first number) of each row, named by the row's other fields `names`."""

    def values(rows: Rows) -> Values:
        found = {}
        for row in rows:
            value = row.get(field)
            value = value[0] if isinstance(value, list) else value
            if isinstance(value, (int, float)):
                found[", ".join(str(row[name]) for name in names if name in row)] = float(value)
        return found

    return values


def of_step(rows: Rows) -> Values:
    """Returns hvdtrain's images/s divided by the hand-written loop's."""
    found = {}
    for row in rows:
        for name, one in row["rows"].items():
            if "to by hand" in one and name != "by hand":
                found[f"{name}, widths {row['widths']}"] = one["to by hand"][0]
    return found


def of_peers(rows: Rows) -> Values:
    """Returns each trainer's step time divided by the fastest other trainer's in the same round."""
    steps: dict[tuple[str, int], Values] = defaultdict(dict)
    for row in rows:
        if "step_ms" in row:
            steps[row["precision"], row["round"]][row["name"]] = row["step_ms"]
    ratios = defaultdict(list)
    for (precision, _), times in steps.items():
        fastest = min((times[name] for name in PEERS if name in times), default=None)
        for name, ms in times.items() if fastest else ():
            ratios[f"{name}, {precision}"].append(ms / fastest)
    return {name: statistics.median(found) for name, found in ratios.items()}


def of_gpt(rows: Rows) -> Values:
    """Returns hvdtrain's tokens/s divided by the hand-written loop's and by Accelerate's."""
    found = {}
    for row in rows:
        training = row.get("training", {})
        words = " ".join(row["words"])
        for key, value in training.items():
            if key.startswith("hvdtrain_to_"):
                other = key.removeprefix("hvdtrain_to_").replace("_", " ")
                found[f"to {other}, {words}"] = value[0] if isinstance(value, list) else value
    return found


class Part(NamedTuple):
    """A benchmark: {root}, {json} and {python} in its command are filled in."""

    command: str
    values: Callable[[Rows], Values]
    unit: str  # of the values
    limit_s: int
    variables: dict[str, str] = {}  # noqa: RUF012 (never written)


ONE_THREAD = {"OMP_NUM_THREADS": "1"}
ALL_CORES = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
KERAS = "mpirun -np 2 {keras} benchmarks/horovod_keras.py 11 --json {json}"
PARTS = {
    "engines": Part(
        "{python} benchmarks/engines.py --root {root} --only mpi horovod --json {json}",
        by("ratio", "ranks", "precision", "network", "setting"),
        "time of a step to comm.engine=mpi",
        1500,
    ),
    "peers": Part(
        "{python} benchmarks/peers.py --root {root} --precision bf16 --blocks 2 --steps 20 "
        "--json {json}",
        of_peers,
        "time of a step to the fastest other trainer",
        900,
    ),
    "step": Part(
        "{python} benchmarks/step.py --root {root} --rounds 7 --json {json}",
        of_step,
        "images/s to a loop by hand",
        400,
        ALL_CORES,
    ),
    "gpt": Part(
        "{python} benchmarks/gpt.py --accelerate --rounds 6 --steps 4 --draws 0 --json {json} "
        "model.layers=6 model.width=384 model.heads=6 speed.precision=bf16",
        of_gpt,
        "tokens/s to another loop",
        500,
        ALL_CORES,
    ),
    "jax_step": Part(
        "{python} benchmarks/jax_step.py --json {json}",
        by("ratio", "network"),
        "time of a step to a plain JAX loop",
        200,
        ALL_CORES,
    ),
    "horovod_keras": Part(
        KERAS, by("ratio", "backend", "model"), "time of a step to one without reduction", 200
    )._replace(variables={"KERAS_BACKEND": "torch", **ONE_THREAD}),
    "padding": Part(
        "{python} benchmarks/padding.py --rounds 5 --json {json}",
        by("times", "way"),
        "times as fast as padded to the longest",
        400,
        ALL_CORES,
    ),
    "stored": Part(
        "{python} benchmarks/stored.py --rounds 5 --json {json}",
        by("to_loader", "array", "method"),
        "samples/s to a DataLoader",
        500,
    ),
    "data": Part(
        "{python} benchmarks/folder.py --root {root} --rounds 5 --images 8000 --json {json}",
        by("to torchvision", "method", "size", "crop"),
        "images/s to torchvision",
        500,
    ),
    "guard": Part(
        "mpirun -np 2 {python} benchmarks/guard.py --rounds 10 --json {json}",
        by("ratio", "part", "model"),
        "time of a step with to without",
        600,
        ONE_THREAD,
    ),
    "wire": Part(
        "{python} benchmarks/wire.py --rates 1gbit,100mbit --json {json}",
        by("efficiency", "engine", "rate"),
        "steps/s to a network without limit",
        300,
        ONE_THREAD,
    ),
    "start": Part(
        "{python} benchmarks/start.py --json {json}",
        by("seconds", "ranks", "part"),
        "seconds",
        600,
        ONE_THREAD,
    ),
}
FILES = {"data": "folder"}  # of the parts whose file has another name


def last_rows(path: Path) -> Rows:
    """Returns the rows of the newest run in the file. Rows from before 2026-11-29 do not name their
    run."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    newest = max((row.get("run", "") for row in rows), default="")
    return [row for row in rows if row.get("run", "") == newest]


def run(name: str, part: Part, root: Path, limit_s: float) -> tuple[Rows, str]:
    """The rows that the part wrote, and why it failed, or an empty text."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.jsonl"
        words = [
            word.format(root=root, json=out, python=sys.executable, keras=python_with_keras())
            for word in shlex.split(part.command)
        ]
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        modules = [str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]  # the environment of Keras
        began_s = time.perf_counter()
        done = subprocess.run(
            ["timeout", "-k", "10", str(round(limit_s)), *words],
            env={
                **DEFAULTS,
                **os.environ,
                "PATH": path,
                "PYTHONPATH": os.pathsep.join(filter(None, modules)),
                **part.variables,
            },
            cwd=FOLDER.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - began_s
        lines = out.read_text().splitlines() if out.exists() else []
    print(f"{name}: {seconds:.0f} s, {len(lines)} rows", flush=True)
    if done.returncode == 0 and lines:
        return [json.loads(line) for line in lines], ""
    why = f"exceeded {limit_s:.0f} s" if done.returncode == 124 else f"code {done.returncode}"
    last = [line for line in done.stdout.splitlines() if line.strip()][-1:]
    return [json.loads(line) for line in lines], f"{why}: {' '.join(last)[:200]}"


def python_with_keras() -> str:
    """That of the environment which `make test-keras` makes; otherwise this one."""
    python = Path(sys.prefix) / "keras" / "bin" / "python"
    return str(python) if python.exists() else sys.executable


def table(part: Part, before: Values, now: Values) -> list[str]:
    """A line for each value of this run, with the last one and the change."""
    lines = [f"  {'':<62} {'last':>8} {'now':>8}  change   ({part.unit})"]
    for what, value in now.items():
        last = before.get(what)
        shown = f"{last:8.3f}" if last is not None else f"{'new':>8}"
        change = f"{100 * (value / last - 1):+6.1f} %" if last else ""
        lines.append(f"  {what:<62} {shown} {value:8.3f}  {change}".rstrip())
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=PARTS, metavar="NAME")
    parser.add_argument("--limit-m", type=float, default=90, help="minutes for all parts")
    parser.add_argument("--keep", action="store_true", help="append the rows to their files")
    options = parser.parse_args()
    began_s = time.perf_counter()
    run_id = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
    failures = {}
    for name in options.part:
        part = PARTS[name]
        left_s = 60 * options.limit_m - (time.perf_counter() - began_s)
        if left_s < 30:
            failures[name] = f"not run: the {options.limit_m:g} minutes are over"
            continue
        path = FOLDER / f"{FILES.get(name, name)}.jsonl"
        before = part.values(last_rows(path))
        rows, why = run(name, part, options.root.resolve(), min(part.limit_s, left_s))
        if why:
            failures[name] = why
        print("\n".join(table(part, before, part.values(rows))), flush=True)
        if options.keep:
            for row in rows:
                append(path, row | {"run": run_id} | ({"incomplete": why} if why else {}))
    for name, why in failures.items():
        print(f"{name} failed: {why}")
    print(f"in all: {(time.perf_counter() - began_s) / 60:.1f} minutes")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
