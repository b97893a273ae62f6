"""Compares Horovod's PyTorch examples on hvdtrain.horovod and on Horovod: every loss that they
compute, on every rank. Rows go to a file.

git clone --depth 1 --branch v0.28.1 https://github.com/horovod/horovod
python benchmarks/horovod_examples.py horovod/examples [--ranks 2,4] [--only mnist] [--json benchmarks/horovod_examples.jsonl]

The examples are unchanged except for the lines that import horovod. Their data are small and
generated here: digits in MNIST's files, pictures in folders. A function that replaces torch's loss,
and calls it, records the losses. "horovod again" is a second run of Horovod's, and "on horovod" is
hvdtrain.horovod with HVDTRAIN_ENGINE=horovod. The ranks start once for all examples of an engine.
"""  # noqa: E501

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import runpy
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
IMPORTS = {
    "import horovod.torch as hvd\n": "import hvdtrain.horovod as hvd\n",
    "\nimport horovod\n": "\nimport hvdtrain.horovod as horovod\n",
}
# of Horovod, in some versions of the synthetic benchmark: left out for all
ON_GPUS_ALONE = "norm_layer=hvd.SyncBatchNorm"
HOROVOD = "horovod"
# row -> HVDTRAIN_ENGINE
ENGINES = {
    HOROVOD: "",
    "horovod again": "",
    "mpi": "mpi",
    "torchdist": "torchdist",
    "on horovod": "horovod",
}
LIMIT_S = 400


class Example(NamedTuple):
    """A script of Horovod's, and the arguments of each of its runs, one after another in one
    folder."""

    script: str
    runs: tuple[str, ...]


MNIST = "--data-dir ../digits --epochs 2 --batch-size 32 --lr 0.02"
PICTURES = (
    "--base-lr 0.001 --train-dir ../pictures/train --val-dir ../pictures/val --batch-size 2 "
    "--val-batch-size 4"
)
SYNTHETIC = (
    "--model resnet18 --batch-size 2 --num-warmup-batches 2 --num-iters 2 --num-batches-per-iter 2"
)
EXAMPLES = {
    "mnist": Example("pytorch_mnist.py", (MNIST,)),
    "mnist fp16": Example("pytorch_mnist.py", (f"{MNIST} --fp16-allreduce",)),
    "mnist adasum": Example("pytorch_mnist.py", (f"{MNIST} --use-adasum",)),
    "mnist predivide": Example("pytorch_mnist.py", (f"{MNIST} --gradient-predivide-factor 2",)),
    "synthetic": Example("pytorch_synthetic_benchmark.py", (SYNTHETIC,)),
    "synthetic adasum": Example("pytorch_synthetic_benchmark.py", (f"{SYNTHETIC} --use-adasum",)),
    # The second run resumes from the first run's checkpoint. Without weight decay: see
    # docs/horovod-api.md, broadcast_optimizer_state.
    "imagenet": Example(
        "pytorch_imagenet_resnet50.py",
        (f"{PICTURES} --wd 0 --epochs 1", f"{PICTURES} --wd 0 --epochs 2"),
    ),
    "imagenet passes": Example(
        "pytorch_imagenet_resnet50.py", (f"{PICTURES} --wd 0 --epochs 1 --batches-per-allreduce 2",)
    ),
    "mnist elastic": Example("pytorch_mnist_elastic.py", (MNIST,)),
}


def make_digits(folder: Path) -> None:
    """1,024 and 256 images of 28 x 28 in MNIST's files: a prototype of each class, and noise."""
    raw = folder / "MNIST" / "raw"
    rng = np.random.default_rng(0)
    raw.mkdir(parents=True)
    prototypes = rng.integers(0, 200, (10, 28, 28))
    for part, count in (("train", 1024), ("t10k", 256)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        images = np.clip(prototypes[labels] + rng.normal(0, 60, (count, 28, 28)), 0, 255).astype(
            np.uint8
        )
        (raw / f"{part}-images-idx3-ubyte").write_bytes(
            struct.pack(">IIII", 0x803, count, 28, 28) + images.tobytes()
        )
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 0x801, count) + labels.tobytes()
        )


def make_pictures(folder: Path) -> None:
    """Folders of classes, 8 + 4 pictures of 64 x 64 in each of three."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for part, count in (("train", 8), ("val", 4)):
        for label in range(3):
            place = folder / part / f"class {label}"
            place.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 120, (64, 64, 3)) + np.eye(3, dtype=int)[label] * 120
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{i}.png")


def on_rank(names: Sequence[str]) -> None:
    """Runs examples one after another in this folder, and writes their losses."""
    rank = os.environ["OMPI_COMM_WORLD_RANK"]
    losses = list[float]()
    found = dict[str, list[float]]()

    def noted(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            loss = function(*args, **kwargs)
            losses.append(loss.item())
            return loss

        return call

    functional = torch.nn.functional
    threads = torch.get_num_threads()
    home = Path.cwd()
    functional.nll_loss = noted(functional.nll_loss)
    functional.cross_entropy = noted(functional.cross_entropy)
    for name in names:
        (home / name).mkdir(exist_ok=True)
        os.chdir(home / name)
        for arguments in EXAMPLES[name].runs:
            torch.set_num_threads(threads)
            torch.manual_seed(int(rank))  # of examples that do not seed: other data on each rank
            sys.argv = [EXAMPLES[name].script, *arguments.split()]
            runpy.run_path(str(home / EXAMPLES[name].script), run_name="__main__")
        found[name] = list(losses)
        losses.clear()
    (home / f"found.{rank}").write_text(json.dumps(found))


def run(
    names: Sequence[str], sources: dict[str, str], engine: str, ranks: int, data: Path
) -> list[dict[str, list[float]]]:
    """The losses of each rank, by example. sources: {script: its text}. The ranks start once for
    all examples."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("digits", "pictures"):
            Path(folder, name).symlink_to(data / name)
        for script, text in sources.items():
            Path(folder, script).write_text(
                (_changed(text) if engine else text).replace(ON_GPUS_ALONE, "")
            )
        # HOME: an example leaves a lock there.
        env = {**os.environ, "HVDTRAIN_ENGINE": engine, "PYTHONPATH": str(ROOT), "HOME": folder}
        mpirun = [
            "timeout",
            "-k",
            "5",
            str(LIMIT_S),
            shutil.which("mpirun") or "mpirun",
            "-np",
            str(ranks),
            sys.executable,
        ]
        command = [*mpirun, __file__, "--on-rank", *names]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=folder, env=env, check=False
        )
        if done.returncode:
            raise SystemExit(
                f"{engine or HOROVOD} on {ranks} ranks ended with {done.returncode}\n{done.stderr}"
            )
        return [json.loads(Path(folder, f"found.{rank}").read_text()) for rank in range(ranks)]


def _changed(text: str) -> str:
    for old, new in IMPORTS.items():
        text = text.replace(old, new)
    return text


def rows_of(
    name: str, source: str, found: dict[str, list[dict[str, list[float]]]]
) -> list[dict[str, Any]]:
    """found: of each engine, Horovod's own first."""
    example = EXAMPLES[name]
    # (ranks, losses)
    losses = {
        label: np.array([of_rank[name] for of_rank in ranks]) for label, ranks in found.items()
    }
    expected = losses[HOROVOD]
    rows = []
    for label, own in losses.items():
        row: dict[str, Any] = {
            "example": name,
            "script": example.script,
            "sha256": hashlib.sha256(source.encode()).hexdigest(),
        }
        row |= {
            "arguments": list(example.runs),
            "ranks": len(own),
            "engine": label,
            "losses": own.size,
            "first": own[0, 0],
            "last": own[0, -1],
        }
        difference = np.abs(own - expected) / np.abs(expected)
        row |= {
            "equal": int((difference == 0).sum()),
            "largest_difference": float(difference.max()),
        }
        rows.append(
            {
                **row,
                "median_difference": float(np.median(difference)),
                "differences": [float(f"{x:.1e}") for x in difference.max(0)],
            }
        )
    return rows


def line_of(row: dict[str, Any]) -> str:
    text = (
        f"{row['example']:16} {row['ranks']} {row['engine']:14} {row['first']:.6f} "
        f"{row['last']:.6f}"
    )
    largest = row["largest_difference"]
    median = row["median_difference"]
    return (
        f"{text} {row['equal']:4} of {row['losses']:3} equal, largest relative difference "
        f"{largest:.1e}, median {median:.1e}"
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="has Horovod's examples, in any folder below it")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--only", choices=EXAMPLES, action="append")
    parser.add_argument("--engines", default=",".join(ENGINES), help="beside Horovod")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    names = options.only or list(EXAMPLES)
    sources = {}
    for script in {EXAMPLES[name].script for name in names}:
        path = next(options.folder.rglob(script), None)
        if path is None:
            raise SystemExit(f"{options.folder} has no {script}: {__doc__}")
        sources[script] = path.read_text()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        make_digits(data / "digits")
        make_pictures(data / "pictures")
        for ranks in map(int, options.ranks.split(",")):
            engines = {
                label: engine
                for label, engine in ENGINES.items()
                if label in (HOROVOD, *options.engines.split(","))
            }
            found = {
                label: run(names, sources, engine, ranks, data) for label, engine in engines.items()
            }
            for row in [
                row
                for name in names
                for row in rows_of(name, sources[EXAMPLES[name].script], found)
            ]:
                print(line_of(row), flush=True)
                if options.json:
                    with options.json.open("a") as file:
                        file.write(
                            json.dumps(
                                {
                                    **row,
                                    "torch": torch.__version__,
                                    "date": str(datetime.date.today()),
                                }
                            )
                            + "\n"
                        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--on-rank"]:
        on_rank(sys.argv[2:])
    else:
        main(sys.argv[1:])
