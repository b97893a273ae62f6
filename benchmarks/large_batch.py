"""Accuracy of the same network after the same number of epochs, with one small-batch and several large-batch recipes.

python benchmarks/large_batch.py --root /scratch/data [--ranks 2] [--seeds 1,2,3] [--only NAME] ... [--out benchmarks/large_batch.jsonl]

Each job is a real `mpirun ... python -m hvdtrain`; its result is one line of the JSON lines file. A job that the file has already is not
run again. The output ends with the table of the README.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--config", "configs/fashion_mnist_small_batch.yaml"]
NAIVE = [*SMALL, "batch.size=4096"]
WARM = [*NAIVE, "recipe.warmup=3"]

RECIPES: dict[str, list[str]] = {  # name -> arguments; each "+" is added to the line above
    "batch 128": SMALL,
    "batch 4096, nothing else changed": [*NAIVE, "recipe.scale=none"],
    "+ linear scaling": NAIVE,
    "+ warm-up": WARM,
    "+ LARC": [*WARM, "optim.name=larc"],
    "+ ghost batch norm": ["--config", "configs/fashion_mnist_large_batch.yaml"],
    "+ three times the epochs": ["--config", "configs/fashion_mnist_large_batch.yaml", "epochs=36", "recipe.warmup=9"],
    "batch 4096, LAMB": ["--config", "configs/fashion_mnist_lamb.yaml"],
    "batch 4096, NovoGrad": ["--config", "configs/fashion_mnist_novograd.yaml"],
    "batch growing from 128 to 4096": ["--config", "configs/fashion_mnist_growth.yaml"],
}


def main() -> None:
    options = parse()
    out = Path(options.out)
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    names = options.only or list(RECIPES)
    for seed in map(int, options.seeds.split(",")):
        for name in names:
            if not any(row["recipe"] == name and row["seed"] == seed and row["extra"] == options.extra for row in done):
                row = run(name, seed, options)
                done.append(row)
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{name}, seed {seed}: {row['accuracy']:.4f} in {row['seconds']:.0f} s", flush=True)
    print(table(done))


def run(name: str, seed: int, options: argparse.Namespace) -> dict[str, object]:
    """The result of one job; exits where the job fails."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "run"
        arguments = [*RECIPES[name], f"data.root={options.root}", f"seed={seed}", f"run={job}", *options.extra]
        launcher = [options.mpirun, "-np", str(options.ranks)] if options.ranks > 1 else []
        environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // options.ranks)), **os.environ}
        done = subprocess.run(
            [*launcher, sys.executable, "-m", "hvdtrain", *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{name}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        events = [json.loads(line) for line in (job / "events.jsonl").read_text().splitlines()]
    epochs = [event for event in events if event["kind"] == "epoch"]
    recipe = next(line for line in events[0]["lines"] if line.startswith("recipe"))
    return {
        "recipe": name,
        "seed": seed,
        "extra": options.extra,
        "accuracy": epochs[-1]["val_accuracy"],
        "curve": [event["val_accuracy"] for event in epochs],
        "train_loss": epochs[-1]["train_loss"],
        "epochs": len(epochs),
        "steps": epochs[-1]["step"],
        "seconds": epochs[-1]["seconds"],
        "ranks": options.ranks,
        "says": recipe.removeprefix("recipe").strip(),
        "words": RECIPES[name],
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def table(rows: list[dict]) -> str:
    """Markdown: mean and standard deviation of the last epoch's validation accuracy over the seeds."""
    lines = ["| recipe | steps | accuracy, mean (sd, n) | to the baseline |", "|---|---|---|---|"]
    baseline = statistics.mean([row["accuracy"] for row in rows if row["recipe"] == "batch 128"] or [float("nan")])
    for name in RECIPES:
        found = [row for row in rows if row["recipe"] == name and not row["extra"]]
        if found:
            values = [100 * row["accuracy"] for row in found]
            mean, sd = statistics.mean(values), statistics.stdev(values) if len(values) > 1 else float("nan")
            lines.append(f"| {name} | {found[0]['steps']} | {mean:.2f} % ({sd:.2f}, {len(values)}) | {mean - 100 * baseline:+.2f} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="folder that holds FashionMNIST/raw")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--only", action="append", choices=list(RECIPES), metavar="NAME", help="one recipe; can be repeated")
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "large_batch.jsonl"))
    parser.add_argument("--mpirun", default="mpirun")
    parser.add_argument("extra", nargs="*", help="key=value overrides for every job; such jobs are not in the table")
    return parser.parse_args()


if __name__ == "__main__":
    main()
