"""Lab 2: the same training on 1, 2 and 4 ranks, with both ways to divide the data: losses, and images per second.

python labs/2-from-one-process-to-horovod/lab.py --out FOLDER [--quick] [--hosts n1:2,n2:2]
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hvdtrain
from hvdtrain.report.figures.style import COLOURS, new_figure, run_style

RANKS = (1, 2, 4)
SAMPLINGS = ("global", "partition")


def train(ranks: int, sampling: str, out: Path, epochs: int, hosts: str | None) -> Any:
    """Runs `hvdtrain launch -np RANKS`; returns the events of the run."""
    run = out / f"{sampling}-{ranks}"
    launch = ["launch", "-np", str(ranks), *(["-H", hosts] if hosts else ["--oversubscribe"]), "--"]
    job = [
        "model.name=convnet",
        "model.widths=[32,64]",
        "model.norm=false",
        "batch.size=128",
        "optim.base_lr=0.1",
        "speed.precision=fp64",
        f"epochs={epochs}",
    ]
    job += [f"data.sampling={sampling}", f"run={run}", "resume=no", "log.every_steps=5"]
    began = time.perf_counter()
    with (out / f"{sampling}-{ranks}.log").open("w") as log:
        done = subprocess.run([sys.executable, "-m", "hvdtrain", *launch, *job], stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit(f"the job on {ranks} ranks ended with code {done.returncode}: {log.name}")
    events = hvdtrain.read(run)
    epochs_seen = events[events.kind == "epoch"]
    last = epochs_seen.iloc[-1]
    rate = float(epochs_seen.samples_per_s.median())
    print(
        f"{ranks} ranks, {sampling:9}: loss {last.val_loss:.6f}, accuracy {last.val_accuracy:.4f}, {rate:,.0f} images/s, "
        f"{time.perf_counter() - began:.0f} s with the start",
        flush=True,
    )
    return epochs_seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--hosts", help="as mpirun -H has them: n1:2,n2:2")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    epochs = 3 if options.quick else 20
    found = {(sampling, ranks): train(ranks, sampling, options.out, epochs, options.hosts) for sampling in SAMPLINGS for ranks in RANKS}
    alone = found["global", 1].val_loss.to_numpy()
    for (sampling, ranks), events in found.items():
        print(f"{sampling:9} on {ranks}: losses differ from one process by {abs(events.val_loss.to_numpy() - alone).max():.1e} at most")
    draw(options.out, found)
    with (options.out / "ranks.csv").open("w", newline="") as file:
        rows = [
            (s, n, float(e.samples_per_s.median()), float(e.val_loss.iloc[-1]), float(e.val_accuracy.iloc[-1]))
            for (s, n), e in found.items()
        ]
        csv.writer(file).writerows([("sampling", "ranks", "images/s", "loss", "accuracy"), *rows])
    print(f"figures: {options.out / 'losses.png'}, {options.out / 'throughput.png'}")


def draw(out: Path, found: dict[tuple[str, int], Any]) -> None:
    figure, panels = new_figure(1, 2, width=9, height=3.4, sharey=True)
    for axes, sampling in zip(panels, SAMPLINGS, strict=True):
        for index, ranks in enumerate(RANKS):
            events = found[sampling, ranks]
            axes.plot(events.epochs, events.val_loss, label=f"{ranks} ranks", lw=2.6 - 0.8 * index, **run_style(index))
        axes.set_title(f"data.sampling={sampling}", fontsize=9)
        axes.set_xlabel("epochs")
        axes.set_yscale("log")
        axes.legend(frameon=False, fontsize=8)
    panels[0].set_ylabel("validation loss")
    figure.savefig(out / "losses.png", dpi=110)
    figure, (axes,) = new_figure(width=5, height=3.4)
    rates = [float(found["global", ranks].samples_per_s.median()) for ranks in RANKS]
    axes.plot(RANKS, rates, "o-", color=COLOURS[0], label="measured")
    axes.plot(RANKS, [rates[0] * ranks for ranks in RANKS], "--", color="#777777", label="ranks x one process")
    axes.set_xlabel("ranks")
    axes.set_ylabel("images/s")
    axes.set_xticks(RANKS)
    axes.set_ylim(0)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(out / "throughput.png", dpi=110)


if __name__ == "__main__":
    main()
