"""Lab 4: an image GPT on two ranks: what it learns and draws, what a rank's memory is made of, and
how many layers fit into it.

python -m hvdtrain lab 4 [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image

sys.path.append(str(Path(__file__).resolve().parents[1]))
from runs import Job, event, launch, side_by_side, write_table

from hvdtrain.extras.figures.figure import COLOURS, integer_ticks, new_figure
from hvdtrain.extras.lab.command import Parser, run_lab

ROOT = Path(__file__).resolve().parents[2]
DIGITS = str(ROOT / "configs/image_gpt_digits.yaml")
CIFAR = str(ROOT / "configs/image_gpt_cifar10.yaml")
RANKS = 2
# 64 tokens of noise: what is in the images changes neither memory nor time. Each rank has 8 samples
# a step, in two passes.
WORDS = (
    "data.source=synthetic",
    "data.side=8",
    'data.source_options={"samples":64,"val_samples":4}',
    "comm.engine=mpi",
    "batch.size=16",
    "batch.micro=4",
    "batch.evaluate=2",
    "evaluate.samples=4",
    "speed.precision=fp32",
    "recipe.warmup=0",
    "recipe.schedule=constant",
    "recipe.floor=0",
    "log.samples=0",
    "log.every_steps=1",
    "checkpoint.every_steps=2",
    "stop.steps=4",
)
KINDS = ("weights", "gradients", "optimizer_state", "activations", "communication", "checkpoint")
ROOM_MB = 400  # of a rank, beside libraries and data
Way = tuple[int, str]  # shard.stage, model.recompute
WAYS: tuple[Way, ...] = ((0, "none"), (0, "all"), (1, "none"), (2, "none"), (3, "none"), (3, "all"))
QUICK: tuple[Way, ...] = ((0, "none"), (3, "none"))
FITTED: tuple[Way, ...] = ((0, "none"), (2, "all"), (3, "all"))
LINE = (
    4,
    12,
)  # layers of the plans through which the line of memory goes; below 4 another moment of a step has the peak  # noqa: E501
Plan = dict[Way, dict[str, int]]  # bytes of a rank, by kind


class Measured(NamedTuple):
    """One job of RANKS ranks."""

    way: Way
    layers: int
    predicted_mb: float  # of rank 0
    rank_mb: list[float]  # the most of each rank, beside libraries and data
    base_mb: float  # libraries and data
    step_ms: float
    losses: list[float]


def name(way: Way) -> str:
    return f"stage {way[0]}" + (", recomputed" if way[1] == "all" else "")


def words(way: Way, layers: int) -> list[str]:
    return [*WORDS, f"model.layers={layers}", f"shard.stage={way[0]}", f"model.recompute={way[1]}"]


def learn(out: Path, epochs: int) -> None:
    """configs/image_gpt_digits.yaml, shorter; with log.samples the job draws 16 images at each
    evaluation."""
    run = out / "digits"
    events = launch(Job(run, [f"epochs={epochs}", "comm.engine=mpi"], DIGITS), RANKS)
    rows = events[events.kind == "epoch"]
    counted = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/token_baselines.py"), "--config", DIGITS],
        check=True,
        capture_output=True,
        text=True,
    )
    counts = json.loads(counted.stdout)
    print(
        f"validation loss {rows.val_loss.iloc[-1]:.3f} nats per token after {epochs} epochs; of "
        f"counts {counts['above']:.3f}",
        flush=True,
    )
    write_table(
        out / "learning.csv",
        ["epoch", "nats per token"],
        list(zip(rows.epoch, rows.val_loss, strict=True)),
    )
    figure, (axes,) = new_figure(width=7, height=2.8)
    axes.plot(rows.epoch, rows.val_loss, "o-", color=COLOURS[0], label="image GPT")
    baselines = (
        ("unigram", "shares of the grey levels"),
        ("bigram", "after the pixel to the left"),
        ("above", "after the pixel above"),
    )
    for colour, (key, label) in zip(COLOURS[1:], baselines, strict=False):
        axes.axhline(counts[key], color=colour, ls="--", lw=1.2, label=label)
    axes.set_xlabel("epochs")
    axes.set_title("nats per token of the validation images", fontsize=9)
    integer_ticks(axes.xaxis)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    figure.savefig(out / "learning.png", dpi=110)
    draw_samples(run, out / "samples.png")


def draw_samples(run: Path, path: Path) -> None:
    """The images of the start, the end, and up to three evaluations between, each twice as late as
    the one before."""
    drawn = sorted((run / "samples").glob("step-*.png"))
    shown = sorted({0, *(len(drawn) - 1 >> k for k in range(4))})
    figure, panels = new_figure(len(shown), width=9, height=0.8 * len(shown))
    for axes, index in zip(panels, shown, strict=True):
        with Image.open(drawn[index]) as image:
            axes.imshow(image.convert("L"), cmap="gray", interpolation="nearest")
        axes.set_title(
            f"epoch {index}" if index else "before the first step", fontsize=9, loc="left"
        )
        axes.axis("off")
    figure.savefig(path, dpi=110)


def train(way: Way, layers: int, out: Path) -> Measured:
    run = out / f"{layers}-layers-{name(way).replace(', ', '-').replace(' ', '-')}"
    events = launch(Job(run, words(way, layers), CIFAR), RANKS)
    steps = events[events.kind == "step"]
    end = event(run, "end")
    predicted, measured, base = (
        end[f"{kind}_mb"] for kind in ("memory_predicted", "rank_memory", "memory_base")
    )
    found = Measured(
        way,
        layers,
        predicted,
        measured,
        base,
        1e3 * float(steps.window_s.iloc[1:].median()),
        list(steps.loss),
    )
    megabytes = " and ".join(f"{megabyte:.0f}" for megabyte in found.rank_mb)
    print(
        f"{name(way):20} {layers:2} layers: {megabytes} MB, predicted {found.predicted_mb:.0f}; "
        f"{found.step_ms:.0f} ms a step",
        flush=True,
    )
    return found


def plan(layers: int) -> Plan:
    """`hvdtrain plan --memory`: trains nothing."""
    command = [
        sys.executable,
        "-m",
        "hvdtrain",
        "plan",
        "--memory",
        "--json",
        "-",
        "--ranks",
        str(RANKS),
        "--config",
        CIFAR,
    ]
    done = subprocess.run(
        [*command, *words((0, "none"), layers)], check=True, capture_output=True, text=True
    )
    rows = json.loads(done.stdout)["memory"]["rows"]
    return {(row["stage"], row["recompute"]): row["bytes"] for row in rows}


def draw_memory(measured: Sequence[Measured], planned: Plan, path: Path) -> None:
    """Left, bytes by kind as predicted, and what the ranks took; right, the losses of the
    stages."""
    figure, (left, right) = new_figure(
        1, 2, width=10.5, height=3.9, gridspec_kw={"width_ratios": [1.6, 1]}
    )
    labels = [name(one.way).replace(", ", ",\n") for one in measured]
    bottom = [0.0] * len(measured)
    for colour, kind in zip((*COLOURS[:5], "#BBBBBB", "#DDDDDD"), (*KINDS, "other"), strict=True):
        heights = [share_mb(planned[one.way], kind) for one in measured]
        if not any(heights):
            continue
        label = kind.replace("_", " ").replace("checkpoint", "copy for a checkpoint")
        left.bar(labels, heights, 0.6, bottom, color=colour, label=label)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    for rank, marker in enumerate("ox"):
        left.plot(
            labels,
            [one.rank_mb[rank] for one in measured],
            marker,
            color="black",
            ms=6,
            label=f"measured, rank {rank}",
        )
    left.set_title(
        f"MB of a rank, {measured[0].layers} layers: predicted, and measured", fontsize=9
    )
    left.tick_params(axis="x", labelsize=7)
    left.legend(
        *left.get_legend_handles_labels(),
        frameon=False,
        fontsize=7,
        loc="upper left",
        bbox_to_anchor=(1, 1),
    )
    for index, one in enumerate(measured):
        style = {
            "color": COLOURS[index],
            "ms": 14 - 2 * index,
            "mfc": "none",
            "mew": 1.5,
            "lw": 0.8,
        }
        right.plot(range(1, len(one.losses) + 1), one.losses, "o-", label=name(one.way), **style)
    right.set_title("loss of each step", fontsize=9)
    right.set_xlabel("step")
    right.margins(0.1)
    right.set_xticks(range(1, len(measured[0].losses) + 1))
    right.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=110)


def share_mb(row: dict[str, int], kind: str) -> float:
    return (
        row["total"] - sum(row[known] for known in KINDS) if kind == "other" else row[kind]
    ) / 1e6


def predicted_mb(plans: dict[int, Plan], way: Way, layers: int) -> float:
    """By a straight line through the plans of two numbers of layers."""
    (few, one), (many, other) = sorted(plans.items())
    slope = (other[way]["total"] - one[way]["total"]) / (many - few)
    return (one[way]["total"] + slope * (layers - few)) / 1e6


def most_layers(plans: dict[int, Plan], way: Way, room_mb: float) -> int:
    none, one = (predicted_mb(plans, way, layers) for layers in (0, 1))
    return int((room_mb - none) / (one - none))


def draw_layers(plans: dict[int, Plan], measured: Sequence[Measured], path: Path) -> None:
    """Left, memory against layers; right, the most layers by prediction."""
    figure, (left, right) = new_figure(1, 2, width=10, height=3.6)
    for way in (way for way in next(iter(plans.values())) if way[0] in (0, 2, 3)):
        colour = COLOURS[way[0]]
        dashes = "-" if way[1] == "none" else "--"
        left.plot(
            [0, 36],
            [predicted_mb(plans, way, layers) for layers in (0, 36)],
            color=colour,
            ls=dashes,
            label=name(way),
        )
        for one in measured:
            if one.way == way:
                left.plot(one.layers, one.rank_mb[0], "o", color=colour, ms=5)
    left.axhline(ROOM_MB, color="#777777", lw=1)
    left.set_xlabel("layers")
    left.set_title("MB of rank 0: predicted (lines), measured (dots)", fontsize=9)
    left.set_ylim(0)
    left.legend(frameon=False, fontsize=8)
    most = {way: most_layers(plans, way, ROOM_MB) for way in FITTED}
    right.barh(
        [name(way) for way in most],
        list(most.values()),
        0.55,
        color=[COLOURS[stage] for stage, _ in most],
    )
    for row, layers in enumerate(most.values()):
        right.text(layers, row, f" {layers}", va="center")
    right.invert_yaxis()
    right.margins(x=0.1)
    right.set_xlabel("layers")
    right.set_title(f"most layers by prediction in {ROOM_MB} MB of a rank", fontsize=9)
    figure.savefig(path, dpi=110)


def main(options: argparse.Namespace) -> None:
    out = options.out
    # glibc returns arrays as soon as they are freed, so that resident memory is what is alive
    # (docs/memory.md)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "262144"
    began = time.perf_counter()
    learn(out, 2 if options.quick else 16)
    layers = 2 if options.quick else 12
    counts = (*LINE, layers) if layers not in LINE else LINE
    planned = dict(zip(counts, side_by_side(plan, counts), strict=True))
    plans = {count: planned[count] for count in LINE}
    measured = [train(way, layers, out) for way in (QUICK if options.quick else WAYS)]
    different = max(
        abs(a - b) for one in measured for a, b in zip(one.losses, measured[0].losses, strict=True)
    )
    print(f"losses of the ways differ by {different:.1e} at most", flush=True)
    write_table(
        out / "memory.csv",
        [
            "way",
            "layers",
            "predicted MB",
            *(f"MB of rank {rank}" for rank in range(RANKS)),
            "ms a step",
        ],
        [
            (name(one.way), one.layers, one.predicted_mb, *one.rank_mb, round(one.step_ms))
            for one in measured
        ],
    )
    draw_memory(measured, planned[layers], out / "memory.png")
    fitted = {way: most_layers(plans, way, ROOM_MB) for way in FITTED}
    print(
        f"by prediction {ROOM_MB} MB are enough for "
        + ", ".join(f"{most} layers ({name(way)})" for way, most in fitted.items()),
        flush=True,
    )
    more = [] if options.quick else [train(way, most, out) for way, most in fitted.items()]
    write_table(
        out / "layers.csv",
        ["way", "most layers by prediction"],
        [(name(way), most) for way, most in fitted.items()],
    )
    draw_layers(plans, [*measured, *more], out / "layers.png")
    figures = ", ".join(
        f"{out / figure}.png" for figure in ("learning", "samples", "memory", "layers")
    )
    print(f"figures: {figures}; {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    run_lab(main, Parser(__file__, __doc__, quick="2 epochs, 2 layers, stages 0 and 3"))
