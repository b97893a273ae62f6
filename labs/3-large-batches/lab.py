"""Lab 3: large batches: what each recipe saves of the accuracy, and how many steps a larger batch
saves.

python -m hvdtrain lab 3 [--quick] [--data-root DIR]
"""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))
from runs import Job, launch, side_by_side, train, write_table

from hvdtrain.extras.figures.figure import COLOURS, new_figure
from hvdtrain.extras.lab.command import Parser, run_lab

LINEAR = ("recipe.scale=linear",)
WARM = (*LINEAR, "recipe.warmup=25%")
GROWTH = ("recipe.schedule=steps", "recipe.growth=decays")
SQUARE_ROOT = ("recipe.scale=sqrt", "optim.base_batch=4096", "recipe.warmup=25%")
RECIPES: dict[str, tuple[str, ...]] = {  # words that win over those of Lab.words
    "SGD, nothing changed": ("recipe.scale=none",),
    "linear scaling": LINEAR,
    "scaling, warm-up": WARM,
    "scaling, warm-up, noise": (*WARM, "recipe.sample_noise=1"),
    "LARC": (*WARM, "optim.name=larc"),
    "LARC, ghost batch norm": (*WARM, "optim.name=larc", "norm.kind=ghost"),
    "LAMB": (*SQUARE_ROOT, "optim.name=lamb", "optim.base_lr=0.06"),
    "NovoGrad": (*SQUARE_ROOT, "optim.name=novograd", "optim.base_lr=0.1"),
    "a batch that grows": GROWTH,
}


class Lab(NamedTuple):
    """What the full and the quick form do not share."""

    out: Path
    words: tuple[str, ...]  # of all jobs: data, network
    base: int  # the batch that the rate was found for
    epochs: int
    large: tuple[int, ...]  # batches of the recipes
    batches: tuple[int, ...]  # of the way to the target
    target: float  # accuracy
    most_epochs: int  # on the way to it
    images: int  # of the training set


def full(out: Path, root: str) -> Lab:
    words = (
        "data.name=fashion_mnist",
        f"data.root={root}",
        "model.widths=[8,16,32]",
        "optim.base_lr=0.05",
    )
    return Lab(out, words, 128, 6, (1024, 8192), tuple(2**k for k in range(5, 14)), 0.84, 20, 60000)


def quick(out: Path) -> Lab:
    return Lab(
        out,
        ("model.widths=[8,16]", "optim.base_lr=0.02"),
        16,
        8,
        (128, 1024),
        (16, 128, 1024),
        0.9,
        60,
        1437,
    )


def recipe_job(lab: Lab, name: str, batch: int) -> Job:
    words = [
        *_shared(lab),
        f"epochs={lab.epochs}",
        "recipe.schedule=cosine",
        *RECIPES[name],
        f"batch.size={batch}",
    ]
    if "norm.kind=ghost" in words:
        words.append(f"norm.ghost={lab.base}")
    if (
        RECIPES[name] is GROWTH
    ):  # from the small batch in two steps to this one, where a schedule would lower the rate
        factor = math.sqrt(lab.base / batch)
        words += [
            f"batch.size={lab.base}",
            f"recipe.batch_max={batch}",
            f"recipe.gamma={factor:.7f}",
        ]
        words.append(f"recipe.milestones=[{lab.epochs / 3:.4f},{lab.epochs * 2 / 3:.4f}]")
    return Job(lab.out / f"{name.replace(',', '').replace(' ', '-')}-{batch}".lower(), words)


def _shared(lab: Lab) -> list[str]:
    return [
        "model.name=convnet",
        f"optim.base_batch={lab.base}",
        "optim.weight_decay=1e-4",
        *lab.words,
    ]


def recipes(lab: Lab) -> None:
    """Accuracy after the same epochs, with each recipe and batch."""
    names = [(name, batch) for batch in lab.large for name in RECIPES]
    first = ("SGD, nothing changed", lab.base)
    tables = side_by_side(train, [recipe_job(lab, *one) for one in (first, *names)])
    found = {one: _accuracy(table) for one, table in zip((first, *names), tables, strict=True)}
    for (name, batch), accuracy in found.items():
        print(f"batch {batch:4}, {name:23} {100 * accuracy:6.2f} %", flush=True)
    write_table(
        lab.out / "recipes.csv",
        ("recipe", "batch", "accuracy"),
        [(*one, accuracy) for one, accuracy in found.items()],
    )
    if line := too_few_steps(lab, found):
        print(line, flush=True)
    draw_recipes(lab, found)


def too_few_steps(lab: Lab, found: dict[tuple[str, int], float]) -> str:
    """Empty where LARC and LAMB gain on scaling with warm-up, at the largest batch. A job that
    diverged has NaN."""
    batch = lab.large[-1]
    without = found["scaling, warm-up", batch]
    lacking = [
        name
        for name in ("LARC", "LAMB")
        if not math.isnan(without) and not found[name, batch] > without
    ]
    if not lacking:
        return ""
    steps = math.ceil(lab.epochs * lab.images / batch)
    one = len(lacking) == 1
    what = f"{steps} steps are too few to show what {'it is' if one else 'they are'} for"
    return (
        f"batch {batch:,}: {' and '.join(lacking)} {'is' if one else 'are'} not above scaling "
        f"with warm-up; {what}"
    )


def draw_recipes(lab: Lab, found: dict[tuple[str, int], float]) -> Any:
    """Returns the figure, after writing it."""
    first = ("SGD, nothing changed", lab.base)
    figure, (axes,) = new_figure(width=7.6, height=4.4)
    # as wide as the axes: the legend is to their right
    axes.set_title(textwrap.fill(too_few_steps(lab, found), 80), loc="left", fontsize=8)
    axes.axhline(100 * found[first], color="#777777", ls=":", lw=1.5)
    axes.plot(lab.base, 100 * found[first], "k*", ms=13, label=f"SGD, batch {lab.base}")
    for index, name in enumerate(RECIPES):
        points = [100 * found[name, batch] for batch in lab.large]
        axes.plot(
            lab.large,
            points,
            marker="osD^vP*Xd"[index],
            lw=1.3,
            color=COLOURS[index % 6],
            ls="--" if index > 5 else "-",
            ms=6,
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks([lab.base, *lab.large], [f"{batch:,}" for batch in (lab.base, *lab.large)])
    axes.set_xlabel("batch (images)")
    axes.set_ylabel(f"validation accuracy after {lab.epochs} epochs (%)")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(lab.out / "accuracy.png", dpi=110)
    return figure


def _accuracy(table: Any) -> float:
    """Of the last evaluation; NaN of a job that diverged."""
    return math.nan if table is None else float(table[table.kind == "epoch"].val_accuracy.iloc[-1])


def target_job(lab: Lab, batch: int, rate: float, most_steps: int, *words: str) -> Job:
    """A constant rate; ends at the target, or after most_steps. It looks 15 times an epoch, or
    every step where these are fewer."""
    every = max(1, lab.images // 15 // batch)
    end = [
        f"stop.target={lab.target}",
        f"stop.steps={most_steps}",
        f"evaluate.every_steps={every}",
        "recipe.scale=none",
    ]
    end += [f"evaluate.samples={min(2500, lab.images // 4)}"]
    return Job(
        lab.out / f"target-{batch}-{rate:.4g}",
        [*_shared(lab), *end, f"batch.size={batch}", f"optim.base_lr={rate:.6g}", *words],
    )


def steps_to_target(task: tuple[Lab, int]) -> tuple[float, float]:
    """(steps, rate) of one batch with the best rate: climbs by factors of 2 from the square root
    rule, up or down."""
    lab, batch = task
    start = float(
        next(word for word in lab.words if "base_lr" in word).partition("=")[2]
    ) * math.sqrt(batch / lab.base)
    tried: dict[int, float] = {}  # power of 2 -> steps

    def steps_at(power: int) -> float:
        if power not in tried:
            best = min(tried.values(), default=math.inf)  # a rate that is slower need not go on
            most = lab.most_epochs * lab.images // batch if best == math.inf else int(best)
            tried[power] = _steps(train(target_job(lab, batch, start * 2.0**power, most)))
        return tried[power]

    power = 0
    for direction in (1, -1):
        while steps_at(power + direction) < steps_at(power):
            power += direction
    return steps_at(power), start * 2.0**power


def _steps(table: Any) -> float:
    """To the target; infinity where it was not reached."""
    if table is None or not (table.kind == "target").any():
        return math.inf
    return float(table[table.kind == "target"].step.iloc[0])


def three_regimes(lab: Lab) -> None:
    """Steps to the target against the batch, with the noise scale that was measured on the way
    there."""
    reached = side_by_side(steps_to_target, [(lab, batch) for batch in lab.batches])
    rows = []
    missed = []
    for batch, (steps, rate) in zip(lab.batches, reached, strict=True):
        if steps < math.inf:
            rows.append((batch, steps, rate))
        else:
            missed.append(batch)
    if line := not_reached(lab, missed):
        print(line, flush=True)
    for batch, steps, rate in rows:
        print(
            f"batch {batch:4}: {steps:5.0f} steps, {steps * batch:9,.0f} images to "
            f"{lab.target:.0%} with rate {rate:.3g}",
            flush=True,
        )
    rate = next(rate for batch, _, rate in rows if batch == lab.base)
    steps = int(next(steps for batch, steps, _ in rows if batch == lab.base))
    noisy = launch(
        target_job(lab, lab.base, rate, steps, "log.noise_scale=true")._replace(
            run=lab.out / "noise"
        ),
        2,
    )
    scale = noisy[noisy.kind == "step"].noise_scale.dropna().to_numpy()
    low = float(np.quantile(scale, 0.1))
    high = float(scale[-1])
    least, critical = fit(rows)
    print(
        f"noise scale: {low:,.0f} at first, {high:,.0f} at the target; fit: at least {least:.0f} "
        f"steps, critical batch {critical:,.0f}"
    )
    write_table(lab.out / "steps.csv", ("batch", "steps", "rate"), rows)
    draw_regimes(lab, np.array(rows), (low, high), (least, critical), missed)


def not_reached(lab: Lab, missed: list[int]) -> str:
    """Which batches are not in the figure; empty where all are."""
    batches = ", ".join(f"{batch:,}" for batch in missed)
    return (
        f"no point: batch {batches} did not come to {lab.target:.0%} in {lab.most_epochs} epochs"
        if missed
        else ""
    )


def fit(rows: list[tuple[int, float, float]]) -> tuple[float, float]:
    """S_min and B_crit of steps = S_min (1 + B_crit / batch), McCandlish 2018, eq. 2.11: least
    squares of the logarithms."""
    batch, steps = np.array(rows).T[:2]

    def shape(critical: float) -> np.ndarray:
        return np.log(steps) - np.log1p(critical / batch)

    critical = min(np.geomspace(1, 1e5, 1001), key=lambda one: float(shape(one).var()))
    return float(np.exp(shape(critical).mean())), float(critical)


def draw_regimes(
    lab: Lab,
    rows: np.ndarray,
    noise: tuple[float, float],
    fitted: tuple[float, float],
    missed: list[int],
) -> Any:
    """Returns the figure, after writing it."""
    batch, steps, _ = rows.T
    grid = np.geomspace(batch[0], batch[-1], 100)
    line = fitted[0] * (1 + fitted[1] / grid)
    figure, (left, right) = new_figure(1, 2, width=10, height=4)
    for axes, factor, name in ((left, 1.0, "steps"), (right, batch, "images")):
        axes.axvspan(
            min(noise),
            max(noise),
            color=COLOURS[4],
            alpha=0.25,
            lw=0,
            label="measured noise scale, first to last",
        )
        axes.plot(
            batch, steps * factor, "o", color=COLOURS[0], label="measured, best rate of each batch"
        )
        label = f"{fitted[0]:.0f} steps x (1 + {fitted[1]:,.0f} / batch)"
        axes.plot(
            grid, line * (grid if name == "images" else 1), "-", color=COLOURS[0], lw=1, label=label
        )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(
            batch[:: 2 if len(batch) > 5 else 1],
            [f"{one:,.0f}" for one in batch[:: 2 if len(batch) > 5 else 1]],
        )
        axes.set_xlabel("batch (images)")
        axes.minorticks_off()
        axes.set_yticks([digit * 10**power for power in range(8) for digit in (1, 2, 5)])
        axes.yaxis.set_major_formatter("{x:,.0f}")
        low = (steps * factor).min()
        high = (steps * factor).max()
        axes.set_ylim(low / 2, high * 2)
        axes.set_ylabel(f"{name} to {lab.target:.0%}")
    left.plot(
        batch,
        steps[0] * batch[0] / batch,
        "--",
        color="#777777",
        lw=1.2,
        label="perfect scaling: half the steps for twice the batch",
    )
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    figure.suptitle(not_reached(lab, missed), fontsize=8)
    figure.savefig(lab.out / "steps.png", dpi=110)
    return figure


def main(options: argparse.Namespace) -> None:
    began = time.perf_counter()
    lab = (
        quick(options.out)
        if options.quick
        else full(options.out, str(Path(options.data_root).resolve()))
    )
    recipes(lab)
    print(f"recipes: {time.perf_counter() - began:.0f} s", flush=True)
    three_regimes(lab)
    print(
        f"figures: {options.out / 'accuracy.png'}, {options.out / 'steps.png'}; "
        f"{time.perf_counter() - began:.0f} s"
    )


if __name__ == "__main__":
    parser = Parser(__file__, __doc__, quick="digits, batches 16 to 1,024")
    parser.add_argument(
        "--data-root",
        default="data",
        help="folder that holds FashionMNIST/raw; downloaded there otherwise",
    )
    run_lab(main, parser)
