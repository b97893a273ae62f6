"""Accuracy and seconds of configs/cifar10_speed.yaml, what each of its ideas is worth, and the same network by hand in plain torch.

    python benchmarks/cifar10_speed.py FOLDER [--parts record,left-out,added,by-hand] [--seeds 0,1,2] [--ranks 2] [key=value ...]
    python benchmarks/cifar10_speed.py FOLDER --gpu [--together 6]

FOLDER has cifar-10-batches-bin, the original, or images in train/CLASS and test/CLASS; the column `data` tells them apart. Each job of
hvdtrain is a real `mpirun -np RANKS`, which evaluates 2,000 images after each epoch; `hvdtrain evaluate` then counts all, with six views
and with one. `left-out` trains for two epochs with the first seed, once with everything and once without each idea; `added` with one more.
A row is appended to benchmarks/cifar10_speed.jsonl when its job ends; jobs that already have a row
are skipped. `train_s` is the time of training steps only; `seconds` includes the start and
evaluations.

--gpu: one process, where a job takes seconds. It counts all images after each epoch itself, with six views; `left-out` and `added`
train for all epochs with every seed, --together at a time (their seconds then say nothing).
"""  # noqa: E501

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import yaml
from step import device_name

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "cifar10_speed.yaml"
WORDS = ["comm.engine=mpi", "evaluate.samples=2000"]
SHORT = ["epochs=2"]
MEASURED = ("record", "by-hand")  # parts whose seconds count: one job at a time
# In the place of Muon: rates and decays of airbench94 (KellerJordan/cifar10-airbench) for means
# over 2,000 samples; the head as with Muon.
SGD = {
    "name": "sgd",
    "nesterov": True,
    "momentum": 0.85,
    "base_lr": 2.93,
    "exclude": "none",
    "weight_decay": 0.00133,
    "groups": [
        {"names": "*.bias", "rate": 64, "decay": 0.015625},
        {"names": "fc.weight", "rate": 457, "decay": 0.00224},
    ],
}

LEFT_OUT: dict[str, list[str]] = {
    "nothing": [],
    "whitening from data": ["model.whitening=false"],
    "identity at the start": ["model.identity=false"],
    "Muon (SGD instead)": [],
    "rates of groups": ["optim.groups=[]"],
    "alternating flip (random instead)": ["augment.flip=true"],
    "translation": ["augment.crop=0", "augment.pad=zeros"],
    "reflection (black border instead)": ["augment.pad=zeros"],
    "label smoothing": ["model.label_smoothing=0"],
    "falling rate": ["recipe.schedule=constant"],
    "bf16 (fp32 instead)": ["speed.precision=fp32"],
}
# ideas that the record does without
ADDED: dict[str, list[str]] = {"average of the weights": ["optim.ema=0.9"]}


def main() -> None:
    options = parse()
    out = Path(options.out)
    done = (
        [{"device": ""} | json.loads(line) for line in out.read_text().splitlines()]
        if out.exists()
        else []
    )
    jobs = [
        job
        for job in planned(options)
        if not any(key_of(job, options).items() <= row.items() for row in done)
    ]
    for is_measured, at_a_time in ((True, 1), (False, options.together)):
        of_kind = [job for job in jobs if (job[0] in MEASURED) == is_measured]
        with ThreadPoolExecutor(at_a_time) as pool:
            for row in pool.map(lambda job: measured(job, options), of_kind):
                done.append(row)
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(
                    f"{row['part']}, {row['name']}, seed {row['seed']}: {row['accuracy']:.4f}, "
                    f"{row['train_s']:.1f} s of training",
                    flush=True,
                )
    done = [row for row in done if row["device"] == options.device]
    for data in ("original", "folder"):
        print(data, summary([row for row in done if row["data"] == data]), sep=":\n")


Job = tuple[str, str, int, list[str]]  # part, name, seed, arguments


def key_of(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Which row is the job's."""
    part, name, seed, _ = job
    return {
        "part": part,
        "name": name,
        "seed": seed,
        "extra": options.extra,
        "data": options.data,
        "device": options.device,
    }


def measured(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    part, name, seed, arguments = job
    result = (
        by_hand(options.folder, seed) if part == "by-hand" else run(name, arguments, seed, options)
    )
    return {**key_of(job, options), **result, "date": today()}


def planned(options: argparse.Namespace) -> list[Job]:
    seeds = [int(seed) for seed in options.seeds.split(",")]
    parts = options.parts.split(",")
    words, short, few = (
        (list[str](), list[str](), seeds) if options.gpu else (WORDS, SHORT, seeds[:1])
    )
    jobs = [("record", "all", seed, words) for seed in seeds if "record" in parts]
    jobs += [("by-hand", "plain torch", seed, []) for seed in seeds if "by-hand" in parts]
    for part, ideas in (("left-out", LEFT_OUT), ("added", ADDED)):
        jobs += [
            (part, name, seed, [*words, *short, *keys])
            for name, keys in ideas.items()
            for seed in few
            if part in parts
        ]
    return jobs


def run(name: str, arguments: list[str], seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Trains on ranks, then evaluates all images. Exits if a job fails."""
    environment = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // options.ranks)),
        **os.environ,
    }
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "run"
        config = yaml.safe_load(CONFIG.read_text())
        if name.startswith("Muon"):
            config["optim"] = SGD
        Path(folder, "config.yaml").write_text(yaml.safe_dump(config))
        arguments = ["--config", f"{folder}/config.yaml", *arguments]
        words = [
            f"data.name={'cifar10' if options.data == 'original' else 'folder'}",
            f"data.root={options.folder}",
        ]
        command = [sys.executable, "-m", "hvdtrain"]
        launcher = [options.mpirun, "-np", str(options.ranks)] if options.ranks > 1 else []
        call(
            [*launcher, *command, *arguments, *words, f"seed={seed}", f"run={job}", *options.extra],
            environment,
        )
        accuracy = {}
        for key, views in () if options.gpu else (("accuracy", 6), ("accuracy_one_view", 1)):
            call(
                [
                    *launcher,
                    *command,
                    "evaluate",
                    str(job),
                    f"evaluate.views={views}",
                    "--json",
                    f"{folder}/{views}.json",
                ],
                environment,
            )
            accuracy[key] = json.loads(Path(folder, f"{views}.json").read_text())["accuracy"]
        events = [json.loads(line) for line in (job / "events.jsonl").read_text().splitlines()]
    epochs = [event for event in events if event["kind"] == "epoch"]
    return {
        **(accuracy or {"accuracy": epochs[-1]["val_accuracy"]}),
        "epochs": epochs[-1]["epochs"],
        "steps": epochs[-1]["step"],
        "train_s": sum(event["epoch_s"] for event in epochs),
        "seconds": epochs[-1]["seconds"],
        "curve": [event["val_accuracy"] for event in epochs],  # on 2,000 images; with --gpu on all
        "curve_s": [event["seconds"] for event in epochs],
        "train_loss": epochs[-1]["train_loss"],
        "ranks": options.ranks,
    }


def call(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(
            f"exit code {done.returncode}: "
            f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )


def by_hand(folder: Path, seed: int) -> dict[str, Any]:
    """benchmarks/cifar10_speed_by_hand.py, in one process with a thread for each core."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "cifar10_speed_by_hand.py"),
        str(folder),
        "--seeds",
        str(seed),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count() or 1)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"the loop by hand ended with code {done.returncode}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {key: row[key] for key in ("accuracy", "epochs", "train_s", "evaluate_s")}


def summary(rows: list[dict[str, Any]]) -> str:
    lines = []
    for part in ("record", "by-hand"):
        found = [row for row in rows if row["part"] == part and not row["extra"]]
        for key, scale, form in (("accuracy", 100, "{:.2f} %"), ("train_s", 1, "{:.2f} s")):
            values = [scale * row[key] for row in found]
            if values:
                spread = statistics.stdev(values) if len(values) > 1 else float("nan")
                lines.append(
                    f"{part:8} {key:9} {form.format(statistics.mean(values))} (sd {spread:.2f}, "
                    f"n={len(values)})"
                )
    words = {"left-out": "without", "added": "with"}
    short = [row for row in rows if row["part"] in words and not row["extra"]]
    found = {
        (row["part"], row["name"]): [100 * row["accuracy"] for row in short if row["name"] == name]
        for row in short
        if (name := row["name"])
    }
    whole = statistics.mean(found.get(("left-out", "nothing"), [float("nan")]))
    for (part, name), values in found.items():
        mean = statistics.mean(values)
        spread = statistics.stdev(values) if len(values) > 1 else float("nan")
        lines.append(
            f"{words[part]} {name}: {mean:.2f} % (sd {spread:.2f}, n={len(values)}; "
            f"{mean - whole:+.2f} points)"
        )
    return "\n".join(lines)


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", default="record,left-out,added,by-hand")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mpirun", default="mpirun")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--together", type=int, default=1)
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "cifar10_speed.jsonl"))
    parser.add_argument(
        "extra",
        nargs="*",
        help="key=value for each job of hvdtrain; such rows are not in the summary",
    )
    options = parser.parse_intermixed_args()
    options.ranks = 1 if options.gpu else options.ranks
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.device = device_name(device) if options.gpu else ""  # "": a CPU, as in rows without it
    options.data = "original" if (options.folder / "cifar-10-batches-bin").is_dir() else "folder"
    return options


if __name__ == "__main__":
    main()
