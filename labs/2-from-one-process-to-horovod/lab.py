"""Lab 2: the same training on 1, 2 and 4 ranks, with both ways to divide the data: losses, and
images per second.

python -m hvdtrain lab 2 [--quick] [--hosts n1:2,n2:2]
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from runs import Job, launch, write_table

from hvdtrain.extras.figures.figure import COLOURS, drawn_values, integer_ticks, new_figure
from hvdtrain.extras.lab.command import Parser, run_lab

RANKS = (1, 2, 4)
JOB = (
    "model.name=convnet",
    "model.widths=[32,64]",
    "model.norm=false",
    "optim.base_lr=0.1",
    "speed.precision=fp64",
    "log.every_steps=5",
)
# images of a step, over all ranks
SMALL = 128
LARGE = 1024


def train(name: str, ranks: int, batch: int, words: list[str], options: argparse.Namespace) -> Any:
    """The evaluations of a job, a row each."""
    began = time.perf_counter()
    job = Job(options.out / f"{name}-{ranks}", [*JOB, f"batch.size={batch}", *words])
    events = launch(job, ranks, *(["-H", options.hosts] if options.hosts else []))
    epochs = events[events.kind == "epoch"]
    loss = epochs.val_loss.iloc[-1]
    seconds = time.perf_counter() - began
    print(
        f"{job.run.name:11} loss {loss:.6f}, {images_per_s(epochs):6,.0f} images/s, {seconds:.0f} "
        "s with the start",
        flush=True,
    )
    return epochs


def images_per_s(epochs: Any) -> float:
    """In training, the median of the epochs."""
    return float(epochs.samples_per_s.median())


def busy(load: float, cores: int) -> str:
    """A warning where other programs compute beside the lab, by the load average of the last
    minute; empty where none does."""
    if load < 0.25 * cores:
        return ""
    return (
        f"warning: other programs compute here (load {load:.1f} on {cores} cores), so images/s "
        "say little about ranks: try again later"
    )


def main(options: argparse.Namespace) -> None:
    warning = busy(os.getloadavg()[0], os.cpu_count() or 1)  # before the lab adds its own
    if warning:
        print(warning, flush=True)
    epochs = f"epochs={3 if options.quick else 40}"
    fewer = RANKS[:2] if options.quick else RANKS
    shared = {
        ranks: train("global", ranks, SMALL, [epochs, "data.sampling=global"], options)
        for ranks in fewer
    }
    parts = {
        ranks: train("partition", ranks, SMALL, [epochs, "data.sampling=partition"], options)
        for ranks in fewer[1:]
    }
    large = {ranks: train("large", ranks, LARGE, [epochs], options) for ranks in fewer}
    for name, found in (("global", shared), ("partition", parts)):
        for ranks in found.keys() - {1}:
            difference = abs(found[ranks].val_loss.to_numpy() - shared[1].val_loss.to_numpy()).max()
            print(
                f"{name:9} on {ranks}: losses differ from one process by {difference:.1e} at most"
            )
    draw_losses(options.out / "losses.png", shared, {1: shared[1], **parts})
    draw_throughput(options.out / "throughput.png", shared, large, warning)
    rows = [
        (name, ranks, images_per_s(epochs), epochs.val_loss.iloc[-1], epochs.val_accuracy.iloc[-1])
        for name, found in (("global", shared), ("partition", parts), ("large", large))
        for ranks, epochs in found.items()
    ]
    write_table(options.out / "ranks.csv", ("job", "ranks", "images/s", "loss", "accuracy"), rows)
    print(f"figures: {options.out / 'losses.png'}, {options.out / 'throughput.png'}")
    if warning:
        print(warning)


def draw_losses(path: Path, shared: dict[int, Any], parts: dict[int, Any]) -> None:
    figure, panels = new_figure(1, 2, width=9, height=3.4, sharey=True)
    for axes, sampling, found in zip(panels, ("global", "partition"), (shared, parts), strict=True):
        for (ranks, epochs), style in zip(found.items(), ("-", "o", "x"), strict=False):
            label = f"{ranks} ranks" if ranks > 1 else "1 process"
            axes.plot(
                epochs.epochs,
                epochs.val_loss,
                style,
                color=COLOURS[len(axes.lines)],
                label=label,
                ms=8,
                mfc="none",
            )
        axes.set_title(f"data.sampling={sampling}", fontsize=9)
        axes.set_xlabel("epochs")
        axes.set_yscale("log")
        axes.minorticks_off()
        integer_ticks(axes.xaxis)
        low, high = min(drawn_values(axes)), max(drawn_values(axes))
        ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2) if 0.5 * low < tick < 2 * high]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_ylim(low / 1.2, high * 1.2)  # whole markers
        axes.legend(frameon=False, fontsize=8)
    panels[0].set_ylabel("validation loss")
    figure.savefig(path, dpi=110)


def draw_throughput(
    path: Path, small: dict[int, Any], large: dict[int, Any], warning: str = ""
) -> None:
    figure, (axes,) = new_figure(width=5, height=3.8)
    for colour, batch, found in zip(COLOURS, (SMALL, LARGE), (small, large), strict=False):
        rates = [images_per_s(epochs) for epochs in found.values()]
        axes.plot(list(found), rates, "o-", color=colour, label=f"{batch:,} images a step")
        axes.plot(
            list(found),
            [rates[0] * ranks for ranks in found],
            "--",
            color=colour,
            lw=1,
            label="  ideal: one process x ranks",
        )
    if warning:  # whoever gets only the figure sees it, too
        axes.set_title(textwrap.fill(warning, 60), fontsize=7, color=COLOURS[1], loc="left")
    axes.set_xlabel("ranks")
    axes.set_ylabel("images/s")
    axes.set_xticks(list(small))
    axes.set_ylim(0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)  # covers nothing
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    parser = Parser(__file__, __doc__, quick="3 epochs in the place of 40, on 1 and 2 ranks")
    parser.add_argument("--hosts", help="as mpirun -H has them: n1:2,n2:2")
    run_lab(main, parser)
