"""Lab 7: what happens inside an allreduce: the ring step by step, a tree, halving and doubling, and
what each takes.

python -m hvdtrain lab 7 [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

sys.path += [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
from runs import start, write_table
from schedules import (
    SCHEDULES,
    Held,
    chunks_added,
    chunks_of_busiest,
    ring_all_gather,
    ring_reduce_scatter,
    simulate,
)

from hvdtrain.extras.figures.figure import COLOURS, DASHES, new_figure
from hvdtrain.extras.lab.command import Parser, run_lab
from hvdtrain.extras.launch.mpirun import available_cores

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
RANKS = 4  # of the pictures
MARKERS = ("o", "s", "^")
SHADES = ("#FFFFFF", "#DCEAF4", "#A6CCE3", "#5B9FCB", "#0072B2")  # by how many ranks are in a chunk


def draw_steps(out: Path) -> None:
    """Who holds what in the ring: a panel for each step, reduce-scatter above all-gather."""
    steps = ring_reduce_scatter(RANKS) + ring_all_gather(RANKS)
    held = simulate(steps, RANKS)
    figure, panels = new_figure(2, RANKS, width=10.5, height=5.6)
    titles = ["at first", *[f"reduce-scatter, step {step + 1}" for step in range(RANKS - 1)]]
    titles += [
        "after reduce-scatter",
        *[f"all-gather, step {step + 1}" for step in range(RANKS - 1)],
    ]
    states = [*held[:RANKS], held[RANKS - 1], *held[RANKS:]]
    for number, (axes, title) in enumerate(zip(panels, titles, strict=True)):
        before = states[number - 1] if number % RANKS else states[number]
        draw_held(axes, states[number], before, title)
    figure.savefig(out / "ring.png", dpi=110)


def draw_held(axes: Axes, held: Held, before: Held, title: str) -> None:
    """A row for each rank, a column for each chunk; what has just come is framed."""
    from matplotlib.patches import Rectangle

    size = len(held)
    axes.grid(False)
    axes.set_title(title, fontsize=9)
    axes.set_xlim(0, size)
    axes.set_ylim(size, 0)
    axes.set_xticks([chunk + 0.5 for chunk in range(size)], [f"chunk {c}" for c in range(size)])
    axes.set_yticks([rank + 0.5 for rank in range(size)], [f"rank {r}" for r in range(size)])
    axes.tick_params(length=0, labelsize=7)
    for rank, chunks in enumerate(held):
        for chunk, ranks in enumerate(chunks):
            shade = SHADES[round((len(SHADES) - 1) * len(ranks) / size)]
            is_new = ranks != before[rank][chunk]
            axes.add_patch(
                Rectangle(
                    (chunk + 0.04, rank + 0.04),
                    0.92,
                    0.92,
                    facecolor=shade,
                    edgecolor=COLOURS[1] if is_new else "#BBBBBB",
                    linewidth=2.2 if is_new else 0.6,
                )
            )
            text = "all" if len(ranks) == size else "+".join(map(str, sorted(ranks)))
            dark = len(ranks) == size
            axes.text(
                chunk + 0.5,
                rank + 0.5,
                text,
                ha="center",
                va="center",
                fontsize=7,
                color="white" if dark else "black",
            )


def cost_table(sizes: Sequence[int]) -> list[tuple[str, int, int, float]]:
    """(schedule, ranks, steps, times the array that one rank after another sends), counted from the
    schedules."""
    rows = []
    for name, schedule in SCHEDULES.items():
        for size in sizes:
            steps = schedule(size)
            rows.append((name, size, len(steps), chunks_of_busiest(steps) / size))
    return rows


def draw_costs(out: Path) -> None:
    """Steps and data over ranks, by the schedules."""
    sizes = [2, 4, 8, 16, 32, 64]
    rows = cost_table(sizes)
    write_table(out / "costs.csv", ["schedule", "ranks", "steps", "arrays sent"], rows)
    figure, (left, right) = new_figure(1, 2, width=9.5, height=3.3)
    for number, name in enumerate(SCHEDULES):
        of = [row for row in rows if row[0] == name]
        style: dict[str, Any] = {
            "color": COLOURS[number],
            "ls": DASHES[number],
            "marker": MARKERS[number],
            "ms": 4,
        }
        left.plot(sizes, [row[2] for row in of], label=name, **style)
        right.plot(sizes, [row[3] for row in of], label=name, **style)
    left.set_title("steps, one after another", fontsize=9)
    right.set_title("data that has to pass one link, in arrays", fontsize=9)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xlabel("ranks")
        axes.set_ylim(bottom=0)
    left.legend(frameon=False, fontsize=8)
    figure.savefig(out / "costs.png", dpi=110)


def measure(out: Path, ranks: int, sizes: Sequence[int]) -> dict[str, Any]:
    """Times of measure.py on so many ranks of this machine."""
    found = out / f"times-{ranks}.json"
    command = [
        sys.executable,
        "-m",
        "hvdtrain",
        "launch",
        "-np",
        str(ranks),
        "--oversubscribe",
        "--",
    ]
    words = [str(HERE / "measure.py"), str(found.resolve()), *map(str, sizes)]
    log = out / f"times-{ranks}.log"
    start([[*command, *words]], log, f"the measurement on {ranks} ranks", OMP_NUM_THREADS="1")
    times: dict[str, Any] = json.loads(found.read_text())
    return times


class Costs(NamedTuple):
    """The three numbers of the model, from measurements of one message and of one addition."""

    latency_s: float  # of a message
    byte_s: float  # of a message, for each byte
    added_s: float  # of an addition, for each byte


def costs_of(rows: Sequence[dict[str, float]]) -> Costs:
    latency = min(row["message"] for row in rows)
    largest = rows[-1]
    byte_s = max(0.0, largest["message"] - latency) / largest["bytes"]
    return Costs(latency, byte_s, largest["add"] / largest["bytes"])


def predicted(
    name: str, ranks: int, size_bytes: float, costs: Costs, is_here: bool = False
) -> float:
    """Seconds by the model: each step takes the latency, and the time of what the busiest rank
    sends and adds. is_here: all ranks are on this machine, and those that share a core take
    turns."""
    steps = SCHEDULES[name](ranks)
    sent = chunks_of_busiest(steps) / ranks * size_bytes
    added = chunks_added(steps) / ranks * size_bytes
    turns = max(1.0, ranks / available_cores()) if is_here else 1.0
    return turns * (len(steps) * costs.latency_s + sent * costs.byte_s + added * costs.added_s)


def draw_times(found: Sequence[dict[str, Any]], path: Path) -> Figure:
    """Measured times over the size of the array, with the model's curves."""
    figure, panels = new_figure(1, len(found), width=3.7 * len(found), height=3.7, sharey=True)
    for axes, times in zip(panels, found, strict=True):
        rows = times["rows"]
        sizes = [row["bytes"] for row in rows]
        costs = costs_of(rows)
        for number, name in enumerate(SCHEDULES):
            colour = COLOURS[number]
            axes.plot(
                sizes,
                [1e3 * row[name] for row in rows],
                MARKERS[number],
                color=colour,
                ms=5,
                label=name,
            )
            model = [
                1e3 * predicted(name, times["ranks"], size, costs, is_here=True) for size in sizes
            ]
            axes.plot(sizes, model, color=colour, ls=DASHES[number], lw=1)
        of_mpi = [1e3 * row["MPI"] for row in rows]
        axes.plot(sizes, of_mpi, "x", color="black", ms=5, label="MPI_Allreduce")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        cores = available_cores()
        shared = f" on {cores} cores" if times["ranks"] > cores else ""
        axes.set_title(f"{times['ranks']} ranks{shared}", fontsize=9)
        ticks = [2**10, 2**14, 2**18, 2**22, 2**26]
        axes.set_xticks(ticks, ["1 KiB", "16 KiB", "256 KiB", "4 MiB", "64 MiB"], fontsize=7)
        axes.set_xlim(sizes[0] / 2, 2 * sizes[-1])
        axes.set_xlabel("array")
    panels[0].set_ylabel("milliseconds")
    panels[0].legend(frameon=False, fontsize=7, title="lines: the model", title_fontsize=7)
    figure.savefig(path, dpi=110)
    return figure


def main(options: argparse.Namespace) -> None:
    began = time.perf_counter()
    out: Path = options.out
    draw_steps(out)
    draw_costs(out)
    ranks = (2, 4) if options.quick else (2, 4, 8)
    sizes = [2**power for power in (range(10, 23, 4) if options.quick else range(10, 27, 2))]
    found = [measure(out, count, sizes) for count in ranks]
    for times in found:
        costs = costs_of(times["rows"])
        speed = 1e-9 / costs.byte_s if costs.byte_s else np.inf
        print(
            f"{times['ranks']} ranks: a message takes {1e6 * costs.latency_s:.0f} microseconds and "
            f"1 s for {speed:.1f} GB, an addition 1 s for {1e-9 / costs.added_s:.1f} GB; "
            f"load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    write_table(
        out / "times.csv",
        ["ranks", "bytes", "schedule", "seconds"],
        [
            (times["ranks"], row["bytes"], name, row[name])
            for times in found
            for row in times["rows"]
            for name in (*SCHEDULES, "MPI")
        ],
    )
    draw_times(found, out / "times.png")
    names = ", ".join(f"{out / name}.png" for name in ("ring", "costs", "times"))
    print(f"figures: {names}; {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    run_lab(main, Parser(__file__, __doc__, quick="2 and 4 ranks, four sizes"))
