"""What a slow network costs: steps/s of two hosts, one rank on each, at several bandwidths and without a limit.

python benchmarks/wire.py [--engine mpi|horovod|torchdist] [--rates 1gbit,300mbit,100mbit] [--rounds 5] [--json FILE] [key=value ...]

Needs root: the hosts are network namespaces, and tc (tbf) limits what each sends. One job runs all the time while the bandwidths change in
turn; the first sync point after each change is left out. "expected" is a step that waits for all of its bytes: the step without a limit
and bytes x 2(N-1)/N / bandwidth.
"""  # noqa: E501

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

try:
    import pytest  # noqa: F401 - the hosts are those of the tests
except ModuleNotFoundError:
    sys.exit("wire.py needs the packages of the tests: python install.py --extras test")
from cluster_hosts import Hosts  # noqa: E402
from faults import events, wait_for  # noqa: E402
from ranks import Job  # noqa: E402

FREE = "free"
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
DATA = [
    "data.name=synthetic",
    "data.shape=[16,16,1]",
    "data.samples=500000",
    "batch.size=64",
    "epochs=1000",
]
JOB = [
    *DATA,
    "model.name=mlp",
    "model.widths=[1024,1024]",
    "log.every_steps=4",
    "guard.equal_steps=null",
    "checkpoint.every_minutes=60",
]
SYNC_POINTS = 3  # measured at one bandwidth before it changes
LIMIT_S = 300  # for them
RANKS = 2
GRADIENT_BYTES = 4  # of one number


def main() -> None:
    options = parse()
    rates = [FREE, *options.rates.split(",")]
    speeds: dict[str, list[float]] = {rate: [] for rate in rates}
    with tempfile.TemporaryDirectory() as folder, Hosts(RANKS) as hosts:
        run = Path(folder) / "run"
        overrides = [*JOB, f"comm.engine={options.engine}", f"run={run}", *options.overrides]
        with hosts.mpirun("n1:1,n2:1", ["-m", "hvdtrain", *overrides], timeout_s=3600) as job:
            wait_for(job, lambda: len(steps(run)) > 2 * SYNC_POINTS)
            parameters = events(run)[0]["parameters"]
            for number in range(options.rounds):
                for rate in rates if number % 2 else reversed(rates):
                    hosts.slow(None if rate == FREE else rate)
                    speeds[rate] += measure(job, run)
    rows = [result_of_rate(rate, speeds, parameters, options) for rate in rates]
    print(table(rows))
    if options.json:
        with Path(options.json).open("a") as file:
            file.writelines(json.dumps(one) + "\n" for one in rows)


def steps(run: Path) -> list[dict[str, Any]]:
    """The step events of the job so far, one for each sync point."""
    return [event for event in events(run) if event["kind"] == "step"]


def measure(job: Job, run: Path) -> list[float]:
    """Steps/s at the next sync points; the next one is left out, since its steps began before
    now."""
    first = len(steps(run)) + 1
    end_s = time.monotonic() + LIMIT_S
    while len(found := steps(run)[first:]) < SYNC_POINTS:
        assert time.monotonic() < end_s and job.processes(), job.output()
        time.sleep(0.05)
    return [event["samples_per_s"] / event["batch"] for event in found[:SYNC_POINTS]]


def result_of_rate(
    rate: str, speeds: dict[str, list[float]], parameters: int, options: argparse.Namespace
) -> dict[str, Any]:
    found = sorted(speeds[rate])
    free = statistics.median(speeds[FREE])
    sent = parameters * GRADIENT_BYTES * 2 * (RANKS - 1) / RANKS
    wire_s = 0.0 if rate == FREE else 8 * sent / bits_per_s(rate)
    median = statistics.median(found)
    return {
        "rate": rate,
        "engine": options.engine,
        "steps_per_s": round(median, 3),
        "quartiles": [round(found[len(found) // 4], 3), round(found[-1 - len(found) // 4], 3)],
        "sync_points": len(found),
        "efficiency": round(median / free, 4),
        "expected": round(1 / (1 + wire_s * free), 4),
        "step_ms": round(1e3 / median, 2),
        "wire_ms": round(1e3 * wire_s, 2),
        "megabytes_sent": round(sent / 1e6, 2),
        "parameters": parameters,
        "words": options.overrides,
        "machine": f"{RANKS} ranks on {os.cpu_count()} cores",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def bits_per_s(rate: str) -> float:
    match = re.fullmatch(r"([0-9.]+)([kmg]bit)", rate)
    if not match:
        sys.exit(f"--rates: {rate!r} is not like 300mbit")
    return float(match[1]) * UNITS[match[2]]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| bandwidth | steps/s, median (quartiles, n) | ms a step | of these bytes / bandwidth | "
        "efficiency | expected |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["quartiles"]
        speed = f"{row['steps_per_s']:.2f} ({low:.2f} to {high:.2f}, {row['sync_points']})"
        wire = f"{row['wire_ms']:.0f}" if row["wire_ms"] else "-"
        lines.append(
            f"| {row['rate']} | {speed} | {row['step_ms']:.0f} | {wire} | {row['efficiency']:.0%} "
            f"| {row['expected']:.0%} |"
        )
    return "\n".join(
        [f"{rows[0]['engine']}, {rows[0]['megabytes_sent']} MB sent by each rank in a step", *lines]
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default="mpi", choices=["mpi", "horovod", "torchdist"])
    parser.add_argument("--rates", default="1gbit,300mbit,100mbit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="append the rows to this file as JSON lines")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for the job")
    options = parser.parse_args()
    for rate in options.rates.split(","):
        bits_per_s(rate)
    return options


if __name__ == "__main__":
    main()
