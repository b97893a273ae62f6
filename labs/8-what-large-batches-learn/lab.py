"""Lab 8: what large batches learn: trust ratios of layers, batch norm on and off, the power law of
the amount of data, flat and sharp minima.

python -m hvdtrain lab 8 [--quick] [--data-root DIR]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))
from runs import Job, events_of, side_by_side, start, train, write_table

from hvdtrain.extras.figures.figure import COLOURS, DASHES, GREY, new_figure
from hvdtrain.extras.lab.command import Parser, run_lab

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OPTIMIZERS = {  # words that a rate was found for
    "lars": ("optim.name=lars", "optim.base_lr=10", "optim.trust=0.001"),
    "larc": ("optim.name=larc", "optim.base_lr=0.4"),
    "lamb": ("optim.name=lamb", "optim.base_lr=0.02"),
}
RATES = (0.25, 1.0, 4.0)  # times the square root rule


class Lab(NamedTuple):
    """What the full and the quick form do not share."""

    out: Path
    words: tuple[str, ...]  # of all jobs: data, network
    base: int  # the batch of base_rate
    base_rate: float
    ratio_batch: int
    ratio_epochs: int
    batches: tuple[int, ...]  # with and without batch norm
    epochs: int
    shares: tuple[float, ...]  # of the training set
    images: int  # of the training set
    steps: int  # with each share
    minima: tuple[int, int]  # the small and the large batch
    minima_epochs: tuple[int, int]  # of each


def full(out: Path, root: str) -> Lab:
    words = ("data.name=fashion_mnist", f"data.root={root}", "model.widths=[8,16,32]")
    shares = (1 / 256, 1 / 64, 1 / 16, 1 / 4, 1.0)
    batches = (32, 128, 512, 2048, 8192)
    return Lab(out, words, 128, 0.05, 1024, 4, batches, 2, shares, 60000, 4000, (64, 2048), (6, 24))


def quick(out: Path) -> Lab:
    words = ("model.widths=[8,16]",)
    shares = (0.05, 0.1, 0.25, 0.5, 1.0)
    return Lab(
        out, words, 16, 0.02, 128, 8, (16, 128, 512), 6, shares, 1437, 300, (16, 256), (8, 40)
    )


def job(lab: Lab, name: str, *words: str) -> Job:
    return Job(lab.out / name, ["model.name=convnet", *lab.words, *words])


def trust_ratios(lab: Lab) -> None:
    """The factor of each layer's learning rate over time, by LARS, LARC and LAMB."""
    jobs = [
        job(
            lab,
            f"ratios-{name}",
            *words,
            "log.trust_ratios=true",
            "log.every_steps=1",
            f"batch.size={lab.ratio_batch}",
            f"epochs={lab.ratio_epochs}",
            "recipe.scale=none",
            "recipe.schedule=cosine",
        )
        for name, words in OPTIMIZERS.items()
    ]
    side_by_side(train, jobs)
    found = {}
    rows = []
    for name, one in zip(OPTIMIZERS, jobs, strict=True):
        curves: dict[str, list[tuple[int, float]]] = {}
        for event in events_of(one.run, "trust_ratios"):
            for layer, ratio in event["ratios"].items():
                curves.setdefault(layer, []).append((event["step"], ratio))
        found[name] = curves
        rows += [(name, layer, *point) for layer, points in curves.items() for point in points]
        last = {layer: points[-1][1] for layer, points in curves.items()}
        spread = max(last.values()) / min(last.values())
        print(f"{name}: at the end the largest ratio is {spread:.1f} times the smallest")
    write_table(lab.out / "ratios.csv", ("optimizer", "layer", "step", "ratio"), rows)
    draw_ratios(found).savefig(lab.out / "ratios.png", dpi=110)


def draw_ratios(found: dict[str, dict[str, list[tuple[int, float]]]]) -> Figure:
    figure, panels = new_figure(1, len(found), width=11, height=3.8)
    for axes, (name, curves) in zip(panels, found.items(), strict=True):
        for index, (layer, points) in enumerate(curves.items()):
            axes.plot(
                *zip(*points, strict=True),
                color=COLOURS[index % len(COLOURS)],
                ls=DASHES[index // len(COLOURS)],
                lw=1.4,
                label=layer.removesuffix(".weight"),
            )
        axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_title(name.upper(), fontsize=10)
    panels[0].set_ylabel("factor of the learning rate")
    panels[-1].legend(frameon=False, fontsize=8)
    return figure


def norm_job(lab: Lab, norm: bool, batch: int, factor: float) -> Job:
    rate = factor * lab.base_rate * math.sqrt(batch / lab.base)
    return job(
        lab,
        f"norm-{str(norm).lower()}-{batch}-{factor:g}",
        f"model.norm={str(norm).lower()}",
        f"batch.size={batch}",
        f"optim.base_lr={rate:.6g}",
        "recipe.scale=none",
        "recipe.schedule=cosine",
        f"epochs={lab.epochs}",
    )


def norm_on_and_off(lab: Lab) -> None:
    """Accuracy over the batch, each with the best of three rates."""
    grid = [(norm, batch, f) for norm in (True, False) for batch in lab.batches for f in RATES]
    tables = side_by_side(train, [norm_job(lab, *one) for one in grid])
    accuracy = {one: _accuracy(table) for one, table in zip(grid, tables, strict=True)}
    best: dict[bool, list[tuple[int, float, float]]] = {True: [], False: []}
    for norm, points in best.items():
        for batch in lab.batches:
            of_rates = {f: accuracy[norm, batch, f] for f in RATES}
            factor = max(of_rates, key=lambda f: -1 if math.isnan(of_rates[f]) else of_rates[f])
            points.append((batch, of_rates[factor], factor))
            print(
                f"batch norm {'on ' if norm else 'off'}, batch {batch:5,}: "
                f"{100 * of_rates[factor]:.2f} % with {factor:g} times the square root rule",
                flush=True,
            )
    rows = [(norm, *point) for norm, points in best.items() for point in points]
    write_table(lab.out / "norm.csv", ("norm", "batch", "accuracy", "factor"), rows)
    draw_norm(lab, best).savefig(lab.out / "norm.png", dpi=110)


def draw_norm(lab: Lab, best: dict[bool, list[tuple[int, float, float]]]) -> Figure:
    figure, (axes,) = new_figure(width=7, height=4)
    for norm, marker, colour in ((True, "o", COLOURS[0]), (False, "s", COLOURS[1])):
        batch, accuracy, _ = zip(*best[norm], strict=True)
        label = "with batch norm" if norm else "without"
        axes.plot(batch, [100 * one for one in accuracy], marker=marker, color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lab.batches, [f"{batch:,}" for batch in lab.batches])
    axes.set_xlabel("batch (images)")
    axes.set_ylabel(f"validation accuracy after {lab.epochs} epochs (%)")
    axes.legend(frameon=False)
    return figure


def _accuracy(table: Any) -> float:
    """Of the last evaluation; NaN of a job that diverged."""
    return math.nan if table is None else float(table[table.kind == "epoch"].val_accuracy.iloc[-1])


def power_law(lab: Lab) -> None:
    """The error over the size of the training set, after the same number of steps."""
    jobs = [
        job(
            lab,
            f"share-{share:.4f}",
            f"data.share={share if share < 1 else 'null'}",
            f"batch.size={min(lab.base, 64)}",
            f"optim.base_lr={lab.base_rate / 2}",
            "recipe.scale=none",
            "recipe.schedule=cosine",
            f"stop.steps={lab.steps}",
            f"evaluate.every_steps={lab.steps}",
        )
        for share in lab.shares
    ]
    tables = side_by_side(train, jobs)
    rows = []
    for share, table in zip(lab.shares, tables, strict=True):
        accuracy = math.nan
        if table is not None:
            accuracy = float(table.val_accuracy.dropna().iloc[-1])
        rows.append((round(share * lab.images), 1.0 - accuracy))
        print(f"{rows[-1][0]:6,} images: error {100 * rows[-1][1]:.2f} %", flush=True)
    fitted = fit(rows)
    print(f"error = {fitted[0]:.3g} m^{fitted[1]:.3f} + {fitted[2]:.3f}")
    write_table(lab.out / "power_law.csv", ("images", "error"), rows)
    draw_power_law(rows, fitted).savefig(lab.out / "power-law.png", dpi=110)


def fit(rows: list[tuple[int, float]]) -> tuple[float, float, float]:
    """(a, b, c) of error = a m^b + c (Hestness 2017, arXiv:1712.00409, eq. 1 and its figure 6: c
    does not vanish with more data). For each c, a and b by least squares of the logarithms."""
    images, error = np.array(rows).T

    def line(c: float) -> tuple[float, float, float]:
        y = np.log(error - c)
        slope, first = np.polyfit(np.log(images), y, 1)
        return float(np.var(first + slope * np.log(images) - y)), float(slope), float(first)

    c = float(min(np.linspace(0.0, 0.98, 99) * error.min(), key=lambda c: line(c)[0]))
    _, slope, first = line(c)
    return math.exp(first), slope, c


def draw_power_law(rows: list[tuple[int, float]], fitted: tuple[float, float, float]) -> Figure:
    figure, (axes,) = new_figure(width=6.4, height=4)
    images, error = np.array(rows).T
    axes.plot(images, 100 * error, "o", color=COLOURS[0], label="measured")
    a, b, c = fitted
    grid = np.geomspace(images[0], images[-1], 50)
    label = f"{a:.2g} m^({b:.2f}) + {c:.3f}"
    axes.plot(grid, 100 * (a * grid**b + c), color=GREY, lw=1.2, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_xticks(images, [f"{one:,.0f}" for one in images])
    ticks = [one for one in (1, 2, 3, 5, 7, 10, 15, 20, 30, 50) if error.min() * 80 < one]
    axes.set_yticks(ticks, [f"{one}" for one in ticks])
    axes.set_ylim(80 * error.min(), 125 * error.max())
    axes.set_xlabel("training images, m")
    axes.set_ylabel("validation error (%)")
    axes.legend(frameon=False)
    return figure


def minima(lab: Lab) -> None:
    """The loss between a small-batch and a large-batch solution, and around each."""
    jobs = [
        job(
            lab,
            f"minimum-{batch}",
            "model.norm=false",
            f"batch.size={batch}",
            f"optim.base_lr={lab.base_rate * math.sqrt(batch / lab.base):.6g}",
            "recipe.scale=none",
            "recipe.warmup=10%",
            "recipe.schedule=cosine",
            f"epochs={epochs}",
        )
        for batch, epochs in zip(lab.minima, lab.minima_epochs, strict=True)
    ]
    for one, table in zip(jobs, side_by_side(train, jobs), strict=True):
        print(f"{one.run.name}: {100 * _accuracy(table):.2f} %", flush=True)
    result = lab.out / "landscape.json"
    picture = lab.out / "landscape.png"
    words = ["landscape", *(str(one.run) for one in jobs), "--directions", "2"]
    words += ["--json", str(result), "--png", str(picture)]
    start([[sys.executable, "-m", "hvdtrain", *words]], lab.out / "landscape.log", "landscape")
    for run, found in json.loads(result.read_text())["sharpness"].items():
        print(f"{Path(run).name}: sharpness {found['percent']:.2f} %, loss {found['loss']:.3f}")


def main(options: argparse.Namespace) -> None:
    began = time.perf_counter()
    lab = (
        quick(options.out)
        if options.quick
        else full(options.out, str(Path(options.data_root).resolve()))
    )
    for part in (trust_ratios, norm_on_and_off, power_law, minima):
        part(lab)
        print(f"{part.__name__}: {time.perf_counter() - began:.0f} s", flush=True)
    names = ("ratios", "norm", "power-law", "landscape")
    print(f"figures: {', '.join(str(options.out / f'{name}.png') for name in names)}")


if __name__ == "__main__":
    parser = Parser(__file__, __doc__, quick="digits, smaller")
    parser.add_argument(
        "--data-root",
        default="data",
        help="folder that holds FashionMNIST/raw; downloaded there otherwise",
    )
    run_lab(main, parser)
