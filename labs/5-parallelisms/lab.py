"""Lab 5: one small GPT in every parallel way: the same losses, and what each way costs in memory,
bytes and time.

python -m hvdtrain lab 5 [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1]))
from runs import Job, event, launch, write_table

from hvdtrain.extras.figures.figure import COLOURS, new_figure
from hvdtrain.extras.lab.command import Parser, run_lab
from hvdtrain.extras.launch.mpirun import available_cores

HERE = Path(__file__).resolve().parent
JOB = (
    "data.name=image_tokens",
    "data.source=digits",
    "data.colours=16",
    "task.name=language",
    "model.name=gpt",
    "model.layers=4",
    "model.heads=4",
    "batch.size=16",
    "batch.evaluate=16",
    "evaluate.samples=64",
    "optim.name=adamw",
    "optim.base_lr=1e-3",
    "speed.precision=fp64",  # losses of all ways differ by rounding alone
    "comm.engine=mpi",
)
Words = tuple[str, ...]


class Cost(NamedTuple):
    """What a way costs."""

    way: str
    difference: float  # largest, of a loss to one process's
    memory_mb: float  # measured: of the rank with the most, beside libraries and data
    predicted_mb: (
        float | None
    )  # by `plan --parallel`: 1.1 x the tensors of the rank that needs most; None: it does not know the way  # noqa: E501
    sent_mb: (
        float | None
    )  # in a step, by the rank that sends the most, as `plan --parallel` counts it; None: it does not  # noqa: E501
    # of a step, mean over the ranks, in the fastest of the job's windows of steps
    computing_ms: float  # of the processor (processor_time.py)
    core_wait_ms: float  # other programs or ranks had the core
    communication_ms: float  # sending, and waiting for others


def ways(quick: bool) -> dict[str, Words]:
    """Each on all ranks, but the first."""
    n = 2 if quick else 4
    server = ("servers.count=1", "servers.bound=0")
    few: dict[str, Words] = {
        "one process": (),
        "data parallel": (),
        "ZeRO stage 3 (FSDP)": ("shard.stage=3",),
        "tensor": (f"parallel.tensor={n}",),
        "pipeline": (f"parallel.pipeline={n}",),
        f"server, {n - 1} worker{'s' * (n > 2)}, waiting": server,
    }
    if quick:
        return few
    return {
        **dict(list(few.items())[:2]),
        "ZeRO stage 1": ("shard.stage=1",),
        "ZeRO stage 2": ("shard.stage=2",),
        **dict(list(few.items())[2:4]),
        "tensor and sequence": ("parallel.tensor=4", "parallel.sequence=true"),
        "2 data x 2 tensor": ("parallel.tensor=2",),
        "pipeline": few["pipeline"],
        "2 pipeline x 2 tensor": ("parallel.pipeline=2", "parallel.tensor=2"),
        "server, 3 workers, waiting": server,
        "server, 3 workers, not waiting": ("servers.count=1", "servers.bound=8"),
    }


def train(way: str, words: Words, ranks: int, out: Path, shared: Words) -> tuple[Job, Any]:
    """The table of the job's steps."""
    job = Job(
        out / way.replace(",", "").replace(" ", "-").replace("(", "").replace(")", "").lower(),
        [*JOB, *shared, *words, "hooks=[processor_time:ProcessorTime]"],
    )
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    table = launch(job, ranks, PYTHONPATH=path)
    return job, table[table.kind == "step"]


def planned(ranks: int, shared: Words) -> dict[Words, tuple[float, float]]:
    """(MB of memory, MB sent in a step) of a rank, by the words of `plan --parallel`, which counts
    them without training."""
    command = [
        "plan",
        "--parallel",
        "--ranks",
        str(ranks),
        "--gflops",
        "20",
        "--inside",
        "2GB/s,20us",
        "--json",
        "-",
        *JOB,
        *shared,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", *command], capture_output=True, text=True, check=True
    )
    meshes = json.loads(done.stdout)["meshes"]
    return {
        tuple(sorted(mesh["words"])): (mesh["memory_bytes"] / 1e6, mesh["sent_bytes"] / 1e6)
        for mesh in meshes
    }


def cost(
    way: str, job: Job, steps: Any, alone: Any, counted: tuple[float | None, float | None]
) -> Cost:
    difference = float(abs(steps.loss.to_numpy() - alone.loss.to_numpy()).max())
    return Cost(
        way,
        difference,
        max(event(job.run, "end")["rank_memory_mb"]),
        *counted,
        *times_of(steps),
    )


def times_of(steps: Any) -> tuple[float, float, float]:
    """(computing, waiting for a core, communication) of a step, in ms.

    The clock of a phase goes on while other programs have the core. So computing is processor time,
    and of all windows the fastest counts, which others have disturbed least."""
    later = steps.iloc[1:]  # the first steps allocate
    all_ms = 1000 * later.window_s / later.steps
    fastest = later.loc[all_ms.idxmin()]
    # "other" is the sync point at a window's end, where ranks wait for each other
    communication = float(fastest["phase_ms.communication"] + fastest["phase_ms.other"])
    computing = float(fastest["logged.computing_ms"])
    return computing, max(0.0, float(all_ms.min()) - communication - computing), communication


def main(options: argparse.Namespace) -> None:
    began = time.perf_counter()
    cores = available_cores()
    load = f"\nload before {os.getloadavg()[0]:.1f} on {cores} core{'s' * (cores > 1)}"
    ranks = 2 if options.quick else 4
    shared: Words = ("model.width=64", "stop.steps=8", "log.every_steps=2")
    if not options.quick:
        shared = ("model.width=128", "stop.steps=40", "log.every_steps=4")
    found = {}
    for way, words in ways(options.quick).items():
        found[way] = train(way, words, 1 if way == "one process" else ranks, options.out, shared)
        print(
            f"{way:31} loss {found[way][1].loss.iloc[-1]:.6f}, {time.perf_counter() - began:4.0f} "
            "s",
            flush=True,
        )
    counted = planned(ranks, shared)
    costs = []
    for way, words in ways(options.quick).items():
        of_plan = (
            (None, 0.0) if way == "one process" else counted.get(tuple(sorted(words)), (None, None))
        )
        costs.append(cost(way, *found[way], found["one process"][1], of_plan))
        if way != "one process":
            print(
                f"{way:31} differs from one process by {costs[-1].difference:.1e} at most",
                flush=True,
            )
    write_table(options.out / "costs.csv", Cost._fields, costs)
    draw_curves(options.out / "curves.png", {way: steps for way, (_, steps) in found.items()})
    draw_costs(options.out / "costs.png", costs, load)
    print(
        f"figures: {options.out / 'curves.png'}, {options.out / 'costs.png'}; "
        f"{time.perf_counter() - began:.0f} s"
    )


def draw_curves(path: Path, found: dict[str, Any]) -> None:
    figure, (axes,) = new_figure(width=7.4, height=4)
    for index, (way, steps) in enumerate(found.items()):
        style = (
            {"ls": "-", "lw": 2}
            if not index
            else {
                "ls": "none",
                "marker": "os^vD+x*Phd"[index - 1],
                "mfc": "none",
                "ms": 6 + index % 4,
            }
        )
        if way.endswith("not waiting"):
            style |= {"ls": "--", "lw": 1}
        axes.plot(steps.step, steps.loss, color=COLOURS[index % len(COLOURS)], label=way, **style)
    axes.set_xlabel("steps")
    axes.set_ylabel("training loss (nats per token)")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


PARTS = (  # of a step's time
    ("computing", COLOURS[5], "computing_ms"),
    ("no core", "#BBBBBB", "core_wait_ms"),
    ("sending, waiting for ranks", COLOURS[1], "communication_ms"),
)


def draw_costs(path: Path, costs: list[Cost], load: str = "") -> Any:
    """Returns the figure, after writing it. load: a remark on the machine."""
    figure, (memory, bytes_, times) = new_figure(
        1, 3, width=11, height=0.9 + 0.28 * len(costs), sharey=True
    )
    names = [one.way for one in costs]
    memory.barh(names, [one.memory_mb for one in costs], color=COLOURS[0])
    known = [(one.predicted_mb, one.way) for one in costs if one.predicted_mb is not None]
    memory.plot(*zip(*known, strict=True), "kd", ms=5, label="plan --parallel")
    memory.set_xlabel("memory of a rank (MB)", fontsize=9)
    bytes_.barh(names, [one.sent_mb or 0 for one in costs], color=COLOURS[2])
    for row, one in enumerate(costs):
        bytes_.text(
            one.sent_mb or 0,
            row,
            " not counted" if one.sent_mb is None else f" {one.sent_mb:.1f}",
            va="center",
            fontsize=8,
        )
    bytes_.set_xlabel("sent by a rank in a step (MB)", fontsize=9)
    left = [0.0] * len(costs)
    for label, colour, field in PARTS:
        part = [getattr(one, field) for one in costs]
        times.barh(names, part, left=left, color=colour, label=label)
        left = [begin + length for begin, length in zip(left, part, strict=True)]
    times.set_xlabel(f"time of a step (ms), fastest window{load}", fontsize=9)
    for axes in (memory, times):
        axes.legend(
            frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderpad=0
        )
    memory.invert_yaxis()
    figure.savefig(path, dpi=110)
    return figure


if __name__ == "__main__":
    run_lab(
        main, Parser(__file__, __doc__, quick="2 ranks in the place of 4, fewer ways and steps")
    )
