"""All meshes of 4 ranks on two hosts with a slow wire between them: measured steps, and the order in which `plan --parallel` ranks them.

python benchmarks/parallel_meshes.py [--rate 200mbit] [--rounds 5] [--steps 2] [--json FILE] [key=value ...]

Needs root: the hosts are network namespaces, tc (tbf) limits what each sends. One job of 4 ranks builds the learner of every mesh, and
makes some steps of each in turn, in every second round in reverse order; the first step of each turn is left out. Before that the ranks
measure what the plan is given: phases of a step and the speed of a matrix product, of 4 ranks that work at the same time, each alone; and
collectives of the two ranks of each host, and of all. "tau" is Kendall's tau-b of predicted and measured seconds.
"""  # noqa: E501

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

RANKS = 4
PER_HOST = 2
MODEL = [
    "model.name=gpt",
    "model.layers=4",
    "model.heads=4",
    "model.width=128",
    "task.name=language",
]
DATA = ["data.name=image_tokens", "data.source=digits", "data.colours=16"]
JOB = [
    *MODEL,
    *DATA,
    "batch.size=32",
    "optim.name=adamw",
    "optim.clip_norm=1",
    "recipe.warmup=0",
    "comm.engine=mpi",
]
SIZES = (4 * 2**10, 64 * 2**10, 2**20, 4 * 2**20)
PRODUCT = 384  # rows and columns; a few ms, as a layer
COLLECTIVES = 4  # after as many products
LIMIT_S = 230


def main() -> None:
    options = parse()
    try:
        import pytest  # noqa: F401 - the hosts are those of the tests
    except ModuleNotFoundError:
        sys.exit(
            "parallel_meshes.py needs the packages of the tests: python install.py --extras test"
        )
    from cluster_hosts import Hosts

    words = [*JOB, *options.overrides]
    with tempfile.TemporaryDirectory() as folder, Hosts(2) as hosts:
        # which there are; not yet their times
        meshes = [row["words"] for row in plan(words, options.rate, [], folder)["meshes"]]
        Path(folder, "meshes.json").write_text(json.dumps(meshes))
        hosts.slow(options.rate)
        argv = [
            __file__,
            "--on-ranks",
            folder,
            "--rounds",
            str(options.rounds),
            "--steps",
            str(options.steps),
            *words,
        ]
        with hosts.mpirun(f"n1:{PER_HOST},n2:{PER_HOST}", argv, timeout_s=LIMIT_S) as job:
            result = job.wait()
        if result.returncode:
            sys.exit(f"{result.stdout}\n{result.stderr}")
        files = [str(Path(folder, f"{name}.json")) for name in ("step", "inside", "between")]
        predicted = {
            tuple(row["words"]): row for row in plan(words, options.rate, files, folder)["meshes"]
        }
        measured = json.loads(Path(folder, "measured.json").read_text())
        step = json.loads(Path(folder, "step.json").read_text())
        machine = json.loads(Path(folder, "plan.json").read_text())["machine"]
    rows = [
        row_of(mesh, seconds, predicted[tuple(mesh)])
        for mesh, seconds in zip(meshes, measured, strict=True)
    ]
    found = {
        "benchmark": "parallel_meshes",
        "rate": options.rate,
        "tau": round(
            kendall_tau([row["predicted_ms"] for row in rows], [row["ms"] for row in rows]), 3
        ),
        "machine": f"{RANKS} ranks on {os.cpu_count()} cores, {PER_HOST} on a host",
        "given": machine,
        "words": words,
        "step": step,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "rows": sorted(rows, key=lambda row: row["ms"]),
    }
    print(table(found))
    if options.json:
        with Path(options.json).open("a") as file:
            file.write(json.dumps(found) + "\n")


def plan(words: list[str], rate: str, files: list[str], folder: str) -> dict[str, Any]:
    """What `plan --parallel` says."""
    out = Path(folder, "plan.json")
    given = ["--measured", ",".join(files)] if files else ["--gflops", "10"]
    argv = [
        "plan",
        "--parallel",
        "--ranks",
        str(RANKS),
        "--ranks-per-node",
        str(PER_HOST),
        *given,
        "--json",
        str(out),
        *words,
    ]
    subprocess.run(
        [sys.executable, "-m", "hvdtrain", *argv],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    )
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def row_of(mesh: list[str], seconds: list[float], predicted: dict[str, Any]) -> dict[str, Any]:
    times = sorted(1e3 * each for each in seconds)
    return {
        "mesh": " ".join(mesh) or "data parallel",
        "ms": round(statistics.median(times), 1),
        "quartiles": [round(times[len(times) // 4], 1), round(times[-1 - len(times) // 4], 1)],
        "rounds": len(times),
        "predicted_ms": round(1e3 * predicted["seconds"], 1),
        "megabytes_sent": round(predicted["sent_bytes"] / 1e6, 3),
        "compute_ms": round(1e3 * predicted["compute_s"], 1),
        "communication_ms": round(1e3 * predicted["communication_s"], 1),
    }


def kendall_tau(a: list[float], b: list[float]) -> float:
    """Returns tau-b (Kendall 1945): 1 if two orders agree, -1 if they are opposite."""
    signs = [
        ((x > y) - (x < y), (u > v) - (u < v))
        for (x, u), (y, v) in itertools.combinations(zip(a, b, strict=True), 2)
    ]
    untied = [sum(1 for pair in signs if pair[side]) for side in (0, 1)]
    return float(sum(s * t for s, t in signs) / (untied[0] * untied[1]) ** 0.5)


def table(found: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        f"{found['machine']}, {found['rate']} between hosts; Kendall's tau {found['tau']:.2f}",
        "| mesh | ms a step, median (quartiles, n) | predicted | MB sent | compute | "
        "communication |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        low, high = row["quartiles"]
        ms = f"{row['ms']:.0f} ({low:.0f} to {high:.0f}, {row['rounds']})"
        predicted = (
            f"{row['predicted_ms']:.0f} | {row['megabytes_sent']:.2f} | {row['compute_ms']:.0f} | "
            f"{row['communication_ms']:.0f}"
        )
        lines.append(f"| {row['mesh']} | {ms} | {predicted} |")
    return "\n".join(lines)


def on_ranks(folder: Path, words: list[str], rounds: int, steps: int) -> None:
    """Writes what the ranks measure as files of `folder`, as bench does, and measured.json: seconds
    of a step by mesh and round."""
    import numpy as np
    import torch

    from hvdtrain.comm.launcher_variables import placement
    from hvdtrain.config.read import configure
    from hvdtrain.core.progress import Hyper
    from hvdtrain.data.configured.unwritten import unstaged
    from hvdtrain.training.build import build_learner, connect, planned_task
    from hvdtrain.training.datasets import build_source

    torch.set_num_threads(1)
    config = configure(None, [*words, "parallel.tensor=2"])  # a job with groups
    communicator, _ = connect(config, placement(os.environ))
    source = build_source(unstaged(config), "train")
    task = planned_task(config, source)
    measure_step(configure(None, [*words, "comm.engine=single"]), task, communicator, folder)
    measure_links(communicator, folder)
    meshes = json.loads((folder / "meshes.json").read_text())
    turns = []
    for mesh in meshes:
        own = configure(None, [*words, *mesh])
        learner: Any = build_learner(own, task, communicator)
        share = own.batch.size // learner.data.size
        passes = 2 * own.parallel.pipeline if own.parallel.pipeline > 1 else 1
        micro = [learner.to_device(source.read(np.arange(share // passes))) for _ in range(passes)]
        turns.append((learner, micro, own.batch.size))
    seconds: list[list[float]] = [[] for _ in meshes]
    order = list(range(len(meshes)))
    for number in range(rounds):
        for index in order if number % 2 else order[::-1]:
            learner, micro, batch = turns[index]
            for step in range(1 + steps):
                if step == 1:
                    communicator.allreduce(torch.zeros(1), "begin")
                    start = time.perf_counter()
                learner.step(micro, Hyper(1e-4, 0.9, 0.0, batch, step), step)
            own_s = torch.tensor([(time.perf_counter() - start) / steps], dtype=torch.float64)
            seconds[index].append(float(communicator.allreduce(own_s, "seconds", "max")))
    if communicator.rank == 0:
        (folder / "measured.json").write_text(json.dumps(seconds))
    communicator.close()


def measure_step(config: Any, task: Any, communicator: Any, folder: Path) -> None:
    """Measures like bench step: ranks work at the same time, each alone with its share of the
    batch."""
    import torch

    from hvdtrain.core.progress import Hyper
    from hvdtrain.extras.bench.of_torch import peak_flops, step_flops, synchronizing_stopwatch
    from hvdtrain.extras.bench.step import OneRank
    from hvdtrain.frameworks.stopwatch import total
    from hvdtrain.training.build import build_learner

    learner: Any = build_learner(config, task, OneRank(communicator))
    share = config.batch.size // communicator.size
    micro = [learner.forward.inputs.zeros(share)]
    hyper = Hyper(1e-4, 0.9, 0.0, share)
    flops = step_flops(learner, micro, hyper)
    learner.step(micro, hyper, 0)
    stopwatch = synchronizing_stopwatch(learner.device)
    steps = 7
    communicator.allreduce(torch.zeros(1), "begin")
    with learner.stopwatch.replaced_by(stopwatch):
        for step in range(steps):
            stopwatch.enter("data")
            learner.step(micro, hyper, step)
    phases = {phase: 1e3 * seconds / steps for phase, seconds in total(stopwatch.read()).items()}
    communicator.allreduce(torch.zeros(1), "begin")
    product = peak_flops(learner, 768) / 1e9
    if communicator.rank == 0:
        found = {
            "phases_ms": phases,
            "gflop_per_step_of_a_rank": flops / 1e9,
            "ranks": communicator.size,
            "matmul_gflop_per_s": product,
        }
        (folder / "step.json").write_text(json.dumps(found))


def measure_links(communicator: Any, folder: Path) -> None:
    """Measures links like bench allreduce, between the two ranks of each host and between all
    ranks. Inside a host each measurement follows a matrix product on every rank, whose time is
    subtracted: ranks that share a core also wait until the others have computed."""
    import torch

    from hvdtrain.extras.bench.allreduce import _in_parts
    from hvdtrain.extras.plan.meshes.link import IN_PARTS

    inside = communicator.split(communicator.rank // PER_HOST)
    for name, group, product in (("inside", inside, PRODUCT), ("between", communicator, 1)):
        rows = []
        for size in SIZES:
            x = torch.zeros(size // 4).numpy()
            ways = {"allreduce": lambda x=x, group=group: group.allreduce(x, f"bench.{x.nbytes}")}
            ways[IN_PARTS] = lambda x=x, group=group: _in_parts(group, x, f"bench.{x.nbytes}")
            for method, run in ways.items():
                run()
                beside = [
                    seconds_of(run, product, communicator)
                    - seconds_of(lambda: None, product, communicator)
                    for _ in range(3)
                ]
                rows.append(
                    {
                        "method": method,
                        "bytes": size,
                        "quartiles_s": [0, max(1e-6, statistics.median(beside)), 0],
                    }
                )
        if communicator.rank == 0:
            hosts = {f"n{i}": {} for i in range(1 + (name == "between"))}
            (folder / f"{name}.json").write_text(
                json.dumps({"ranks": group.size, "hosts": hosts, "rows": rows})
            )


def seconds_of(run: Any, product: int, communicator: Any) -> float:
    """Returns the slowest rank's seconds of one collective; each collective follows a matrix
    product on every rank."""
    import torch

    a = torch.ones(product, product)
    communicator.allreduce(torch.zeros(1), "begin")
    start = time.perf_counter()
    for _ in range(COLLECTIVES):
        a @ a
        run()
    own = torch.tensor([(time.perf_counter() - start) / COLLECTIVES], dtype=torch.float64)
    return float(communicator.allreduce(own, "seconds", "max"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rate", default="200mbit", help="of what each host sends, in the words of tc"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a mesh in a round")
    parser.add_argument(
        "--json", metavar="FILE", help="append the result to this file as a JSON line"
    )
    parser.add_argument("--on-ranks", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for the job")
    return parser.parse_args()


if __name__ == "__main__":
    if parse().on_ranks:
        on_ranks(Path(parse().on_ranks), parse().overrides, parse().rounds, parse().steps)
    else:
        main()
