"""Accuracy of the same network after the same number of epochs, with one small-batch and several large-batch recipes.

python benchmarks/large_batch.py --root /scratch/data [--ranks 2] [--seeds 1,2,3] [--only NAME] ... [--out benchmarks/large_batch.jsonl]

Each job is a real `mpirun ... python -m hvdtrain`; its result is one line of the JSON lines file. A job that the file has already is not
run again. The output ends with the tables of benchmarks/recipes.md. `--root` holds FashionMNIST/raw; with `--cifar10 DIR`, a folder of
images by class (train/CLASS, test/CLASS), the recipes of CIFAR-10 run too. The tables have rows of either number of ranks; the lines say
which.
"""  # noqa: E501

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

TUNED = [*SMALL, "speed.precision=bf16", "batch.micro=512", "recipe.schedule=linear"]
MUON = ["--config", "configs/fashion_mnist_muon_4096.yaml"]
GROWTH = ["--config", "configs/fashion_mnist_muon_growth.yaml"]
CIFAR10_GROWTH = ["--config", "configs/cifar10_muon_growth.yaml"]
CIFAR10 = ["--config", "configs/cifar10_small_batch.yaml", "batch.micro=512"]

FASHION_MNIST: dict[str, list[str]] = {  # name -> arguments; each "+" is added to the line above
    "batch 128": SMALL,
    "batch 4096, nothing else changed": [*NAIVE, "recipe.scale=none"],
    "+ linear scaling": NAIVE,
    "+ warm-up": WARM,
    "+ LARC": [*WARM, "optim.name=larc"],
    "+ ghost batch norm": ["--config", "configs/fashion_mnist_large_batch.yaml"],
    "+ three times the epochs": [
        "--config",
        "configs/fashion_mnist_large_batch.yaml",
        "epochs=36",
        "recipe.warmup=9",
    ],
    "batch 4096, LAMB": ["--config", "configs/fashion_mnist_lamb.yaml"],
    "batch 4096, NovoGrad": ["--config", "configs/fashion_mnist_novograd.yaml"],
    "batch growing from 128 to 4096": ["--config", "configs/fashion_mnist_growth.yaml"],
    "batch 128, tuned": [*TUNED, "optim.base_lr=0.1", "model.label_smoothing=0.1"],
    "batch 128, tuned again": [
        *TUNED,
        "optim.base_lr=1",
        "optim.nesterov=true",
        "model.label_smoothing=0.1",
    ],
    "batch 128, Muon": [
        *TUNED,
        "optim.name=muon",
        "optim.base_lr=0.05",
        "optim.momentum=0.95",
        "optim.rest_rate=0.185",
        "model.label_smoothing=0.1",
    ],
    "batch 4096, Muon": MUON,
    "+ post-local SGD": [*MUON, "comm.local_steps=4", "comm.local_from=50%", "log.every_steps=12"],
    "batch 4096, Muon, averaged weights": ["--config", "configs/fashion_mnist_4096.yaml"],
    "+ twice the epochs": ["--config", "configs/fashion_mnist_4096.yaml", "epochs=24"],
    "batch growing from 256 to 4096, Muon": [
        *GROWTH,
        "optim.momentum=0.7",
        "optim.rest_rate=0.32",
        "model.label_smoothing=0",
    ],
    "+ label smoothing, momentum 0.9": GROWTH,
}
OF_CIFAR10: dict[str, list[str]] = {
    "CIFAR-10, batch 128": [*CIFAR10, "recipe.warmup=0"],
    "CIFAR-10, batch 128, warm-up": CIFAR10,
    "CIFAR-10, batch 128, Muon": [
        *CIFAR10,
        "recipe.warmup=0",
        "optim.name=muon",
        "optim.base_lr=0.045",
        "optim.momentum=0.9",
        "optim.rest_rate=0.615",
        "model.label_smoothing=0.1",
    ],
    "CIFAR-10, batch 2048, Muon": [
        *CIFAR10,
        "recipe.warmup=0",
        "batch.size=2048",
        "optim.name=muon",
        "optim.momentum=0.7",
        "optim.base_lr=0.2",
        "optim.rest_rate=0.2",
    ],
    "CIFAR-10, batch 2048, SGD": [
        *CIFAR10,
        "batch.size=2048",
        "optim.base_lr=0.54",
        "recipe.warmup=0.5",
    ],
    "CIFAR-10, batch growing from 256 to 2048, Muon": [
        *CIFAR10_GROWTH,
        "optim.base_lr=0.15",
        "optim.momentum=0.7",
        "optim.rest_rate=0.32",
        "model.label_smoothing=0",
    ],
    "CIFAR-10, + label smoothing, momentum 0.9": CIFAR10_GROWTH,
}
RECIPES = FASHION_MNIST | OF_CIFAR10
BASELINES = {
    "Fashion-MNIST": ["batch 128", "batch 128, tuned again"],
    "CIFAR-10": ["CIFAR-10, batch 128"],
}


def main() -> None:
    options = parse()
    out = Path(options.out)
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    names = options.only or list(RECIPES if options.cifar10 else FASHION_MNIST)
    for seed in map(int, options.seeds.split(",")):
        for name in names:
            if not any(
                row["recipe"] == name and row["seed"] == seed and row["extra"] == options.extra
                for row in done
            ):
                row = run(name, seed, options)
                done.append(row)
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(
                    f"{name}, seed {seed}: {row['accuracy']:.4f} in {row['seconds']:.0f} s",
                    flush=True,
                )
    print(
        table("Fashion-MNIST", FASHION_MNIST, done), table("CIFAR-10", OF_CIFAR10, done), sep="\n\n"
    )


def run(name: str, seed: int, options: argparse.Namespace) -> dict[str, object]:
    """Returns the result of one job; exits if the job fails."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "run"
        data = (
            [f"data.root={options.root}"]
            if name in FASHION_MNIST
            else ["data.name=folder", f"data.root={options.cifar10}"]
        )
        arguments = [*RECIPES[name], *data, f"seed={seed}", f"run={job}", *options.extra]
        launcher = [options.mpirun, "-np", str(options.ranks)] if options.ranks > 1 else []
        environment = {
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // options.ranks)),
            **os.environ,
        }
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
        return result(name, seed, job, options.ranks, options.extra)


def result(name: str, seed: int, job: Path, ranks: int, extra: list[str]) -> dict[str, object]:
    """The line of a job that is over, from its run folder."""
    events = [json.loads(line) for line in (job / "events.jsonl").read_text().splitlines()]
    epochs = [event for event in events if event["kind"] == "epoch"]
    recipe = next(line for line in events[0]["lines"] if line.startswith("recipe"))
    return {
        "recipe": name,
        "seed": seed,
        "extra": extra,
        "accuracy": epochs[-1]["val_accuracy"],
        "curve": [event["val_accuracy"] for event in epochs],
        "train_loss": epochs[-1]["train_loss"],
        "epochs": len(epochs),
        "steps": epochs[-1]["step"],
        "seconds": epochs[-1]["seconds"],
        "ranks": ranks,
        "says": recipe.removeprefix("recipe").strip(),
        "words": RECIPES[name],
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def table(title: str, names: dict[str, list[str]], rows: list[dict]) -> str:
    """Markdown: mean and standard deviation of the last epoch's validation accuracy over the seeds,
    and differences of the means."""
    found = {
        name: [row for row in rows if row["recipe"] == name and not row["extra"]] for name in names
    }
    means = {
        name: statistics.mean(100 * row["accuracy"] for row in rows)
        for name, rows in found.items()
        if rows
    }
    columns = [name for name in BASELINES[title] if name in means]
    lines = [
        f"| {title} | steps | accuracy, mean (sd, n) | "
        f"{' | '.join(f'to {name}' for name in columns)} |",
        "|---" * (3 + len(columns)) + "|",
    ]
    for name, mean in means.items():
        values = [100 * row["accuracy"] for row in found[name]]
        sd = statistics.stdev(values) if len(values) > 1 else float("nan")
        differences = " | ".join(f"{mean - means[column]:+.2f}" for column in columns)
        lines.append(
            f"| {name} | {found[name][0]['steps']:,} | {mean:.2f} % ({sd:.2f}, {len(values)}) | "
            f"{differences} |"
        )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", required=True, help="folder that holds FashionMNIST/raw")
    parser.add_argument(
        "--cifar10", help="folder that holds train/CLASS and test/CLASS; its recipes run as well"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument(
        "--only",
        action="append",
        choices=list(RECIPES),
        metavar="NAME",
        help="one recipe; can be repeated",
    )
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "large_batch.jsonl"))
    parser.add_argument("--mpirun", default="mpirun")
    parser.add_argument(
        "extra", nargs="*", help="key=value overrides for every job; such jobs are not in the table"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
