"""Lab 1: gradient descent and SGD by hand, on a linear model in NumPy and torch; then batch sizes
on a real network.

python -m hvdtrain lab 1 [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

import hvdtrain
from hvdtrain.errors import REQUEUE
from hvdtrain.extras.figures.figure import COLOURS, log_scale, new_figure
from hvdtrain.extras.lab.command import Parser, run_lab

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAMPLES = 512
TRUE = np.array([1.0, -2.0])
START = np.array([-2.5, 2.0])
TARGET = 1.002  # times the smallest loss
RATES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.3, 0.8, 1.5)
SEEDS = 9
MOST_STEPS = 2000
Gradient = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]  # (w, x, y) -> (2,)


class Reached(NamedTuple):
    """What it took to come to a loss or an accuracy."""

    batch: int
    steps: float
    epochs: float
    seconds: float


def data(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """x (n, 2), whose columns have other scales: the surface is a long valley; y = x w + noise
    (n,)."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(SAMPLES, 2)) * np.array([1.0, 0.4])
    return x, x @ TRUE + rng.normal(0, 0.5, SAMPLES)


def loss(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    return float(((x @ w - y) ** 2).mean() / 2)


def by_hand(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """d/dw of mean((x w - y)^2) / 2."""
    return x.T @ (x @ w - y) / len(y)


def by_autograd(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The same from torch, which differentiates the loss itself."""
    weights = torch.tensor(w, requires_grad=True)
    ((torch.from_numpy(x) @ weights - torch.from_numpy(y)) ** 2).mean().div(2).backward()
    assert weights.grad is not None
    return weights.grad.numpy()


def descend(
    gradient: Gradient, batch: int, rate: float, epochs: int, seed: int = 1
) -> Iterator[np.ndarray]:
    """The weights before the first step and after each: batch = all samples is gradient descent,
    fewer is SGD."""
    x, y = data()
    rng = np.random.default_rng(seed)
    w = START.copy()
    yield w
    for _ in range(epochs):
        order = rng.permutation(SAMPLES)
        for start in range(0, SAMPLES - batch + 1, batch):
            rows = order[start : start + batch]
            w = w - rate * gradient(w, x[rows], y[rows])
            yield w


def check_frameworks() -> None:
    """NumPy's gradients by hand and torch's give the same path, to the rounding of float64."""
    for batch in (SAMPLES, 16):
        paths = [
            np.array(list(descend(gradient, batch, 0.3, 5))) for gradient in (by_hand, by_autograd)
        ]
        largest = np.abs(paths[0] - paths[1]).max()
        assert largest < 1e-12, largest
        print(
            f"batch {batch:3}: NumPy and torch differ by {largest:.1e} at most after "
            f"{len(paths[0]) - 1} steps",
            flush=True,
        )


def draw_paths(out: Path) -> None:
    x, y = data()
    figure, (axes,) = new_figure(width=6.4, height=5.8)
    grid = np.linspace(-3.2, 3.2, 161)
    surface = np.array([[loss(np.array([a, b]), x, y) for a in grid] for b in grid])
    axes.contour(
        grid,
        grid,
        surface,
        levels=np.geomspace(surface.min() * 1.05, surface.max(), 14),
        colors="#BBBBBB",
        linewidths=0.8,
    )
    ways = (
        ("gradient descent, 20 steps", SAMPLES, 0.8, 20),
        ("SGD, batch 8, 192 steps (3 epochs; square: after one)", 8, 0.3, 3),
    )
    for colour, (label, batch, rate, epochs) in zip(COLOURS, ways, strict=False):
        path = np.array(list(descend(by_hand, batch, rate, epochs)))
        axes.plot(*path.T, marker=".", ms=4, lw=1.2, color=colour, label=label)
    axes.plot(*path[len(path) // epochs], "s", color=colour, ms=7, mfc="white", mew=1.5)
    axes.plot(*TRUE, "k*", ms=11, label="the weights that made the data")
    axes.set_aspect("equal")  # else right angles are none
    axes.set_xlabel("first weight")
    axes.set_ylabel("second weight")
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    figure.savefig(out / "paths.png", dpi=110)


def noise(batch: int) -> float:
    """Standard deviation of the gradient of a batch at the start, over 2,000 batches that are drawn
    with replacement."""
    x, y = data()
    rng = np.random.default_rng(2)
    drawn = [
        by_hand(START, x[rows], y[rows])
        for rows in (rng.integers(SAMPLES, size=batch) for _ in range(2000))
    ]
    return float(np.sqrt(np.var(drawn, axis=0).sum()))


def time_to_loss(batch: int) -> Reached | None:
    """With the best of RATES, the median over SEEDS; None where none of them comes there."""
    x, y = data()
    below = TARGET * loss(np.linalg.lstsq(x, y, rcond=None)[0], x, y)

    def steps_of(rate: float, seed: int) -> float:
        path = itertools.islice(
            descend(by_hand, batch, rate, MOST_STEPS * batch // SAMPLES + 1, seed), MOST_STEPS
        )
        return next((step for step, w in enumerate(path) if loss(w, x, y) < below), math.inf)

    steps, rate = min(
        (statistics.median(steps_of(rate, seed) for seed in range(SEEDS)), rate) for rate in RATES
    )
    if steps == math.inf:
        return None
    return Reached(
        batch,
        steps,
        steps * batch / SAMPLES,
        min(seconds_of(batch, rate, int(steps)) for _ in range(5)),
    )


def seconds_of(batch: int, rate: float, steps: int) -> float:
    """Of the steps alone, without looking at the loss."""
    began = time.perf_counter()
    for _ in itertools.islice(descend(by_hand, batch, rate, steps), steps + 1):
        pass
    return time.perf_counter() - began


def linear_model(out: Path) -> None:
    batches = [2**k for k in range(10)]
    rows = [(time_to_loss(batch), noise(batch)) for batch in batches]
    reached = [found for found, _ in rows if found is not None]
    write(
        out / "linear.csv",
        [*Reached._fields, "noise of a gradient"],
        [(*found, noisy) for found, noisy in rows if found is not None],
    )
    figure, (left, middle, right) = new_figure(1, 3, width=11, height=3.2)
    left.plot(batches, [noisy for _, noisy in rows], "o-", color=COLOURS[0])
    left.plot(
        batches,
        [rows[0][1] / np.sqrt(batch) for batch in batches],
        "--",
        color="#777777",
        label="1 / sqrt(batch)",
    )
    left.legend(frameon=False, fontsize=8)
    x = [one.batch for one in reached]
    middle.plot(x, [one.steps for one in reached], "o-", color=COLOURS[0], label="steps")
    middle.plot(x, [one.epochs for one in reached], "o-", color=COLOURS[1], label="epochs")
    middle.legend(frameon=False, fontsize=8)
    right.plot(x, [1e3 * one.seconds for one in reached], "o-", color=COLOURS[0])
    titles = (
        "noise of a gradient",
        f"to {TARGET:g} x the smallest loss",
        "the same, on this machine",
    )
    labels = ("standard deviation", "steps, epochs", "milliseconds")
    for axes, title, label in zip((left, middle, right), titles, labels, strict=True):
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("batch")
        axes.set_ylabel(label)
        axes.set_xscale("log", base=2)
        log_scale(axes)
    figure.savefig(out / "linear.png", dpi=110)


def real_net(out: Path, batches: Sequence[int], epochs: int) -> None:
    """hvdtrain's digits: how long until 95 % of the validation samples are right. Trains anew each
    time."""
    rows = []
    shown = []
    for batch in batches:
        folder = out / f"batch-{batch}"
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier start of the lab
        words = [
            "model.name=convnet",
            "model.widths=[8,16]",
            f"batch.size={batch}",
            f"optim.base_lr={0.02 * (batch / 32) ** 0.5:.3g}",
        ]
        with (out / f"batch-{batch}.log").open("w") as log, contextlib.redirect_stdout(log):
            end = (f"epochs={epochs}", "log.targets=[0.95]", "stop.target=0.95")
            run = hvdtrain.train(None, *words, *end, f"run={folder}", "resume=no")
        if run.code == REQUEUE:  # Ctrl-C
            raise KeyboardInterrupt
        events = hvdtrain.read(run)
        target: Any = events[events.kind == "target"]
        if len(target):
            found = Reached(
                batch,
                float(target.step.iloc[0]),
                float(target.epochs.iloc[0]),
                float(target.seconds.iloc[0]),
            )
            rows.append(found)
            shown.append(
                f"{found.steps:.0f} steps, {found.epochs:.1f} epochs, {found.seconds:.1f} s"
            )
        print(
            f"batch {batch:4}: "
            f"{shown[-1] if len(target) else f'95 % not reached in {epochs} epochs'}",
            flush=True,
        )
    write(out / "digits.csv", Reached._fields, rows)
    missed = [batch for batch in batches if batch not in {row.batch for row in rows}]
    draw_net(rows, missed, epochs, out / "digits.png")
    if note := without_minimum(rows):
        print(note, flush=True)


def without_minimum(rows: Sequence[Reached]) -> str:
    """What to tell where the batch that takes least time has no slower one on both sides; empty
    where it has."""
    if not rows:
        return "95 % was reached with no batch: nothing to compare"
    ordered = sorted(rows)
    least = min(ordered, key=lambda row: row.seconds)
    if least not in (ordered[0], ordered[-1]):
        return ""
    return (
        f"batch {least.batch} took least, at an end of those that came to 95 %, so no minimum "
        "shows: without --quick there are more"
    )


def draw_net(rows: Sequence[Reached], missed: Sequence[int], epochs: int, path: Path) -> Figure:
    """The figure, written to `path`; missed: batches that did not come there in so many epochs, as
    crosses at the top."""
    figure, (left, right) = new_figure(1, 2, width=8, height=3.2)
    for axes, values, label in (
        (left, [row.steps for row in rows], "steps"),
        (right, [row.seconds for row in rows], "seconds"),
    ):
        axes.plot([row.batch for row in rows], values, "o-", color=COLOURS[1])
        if missed:  # at the top of the axes
            crosses = [0.97] * len(missed)
            axes.plot(
                missed,
                crosses,
                "x",
                color="#777777",
                transform=axes.get_xaxis_transform(),
                label=f"not in {epochs} epochs",
            )
            axes.legend(frameon=False, fontsize=8)
        axes.set_xscale("log", base=2)
        if rows:
            log_scale(axes)
        axes.set_xlabel("batch")
        axes.set_ylabel(label)
        axes.set_title(f"{label} to 95 % on digits", fontsize=9)
    figure.savefig(path, dpi=110)
    return figure


def write(path: Path, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *rows])


def main(options: argparse.Namespace) -> None:
    began = time.perf_counter()
    check_frameworks()
    draw_paths(options.out)
    linear_model(options.out)
    print(f"linear model: {time.perf_counter() - began:.0f} s", flush=True)
    real_net(
        options.out, (8, 32, 128, 512) if options.quick else (4, 8, 16, 32, 64, 128, 256, 512), 40
    )
    figures = ", ".join(f"{options.out / name}.png" for name in ("paths", "linear", "digits"))
    print(f"figures: {figures}; {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    run_lab(main, Parser(__file__, __doc__, quick="4 batches of the network in the place of 8"))
