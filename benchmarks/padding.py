"""Seconds of an epoch of sentences with different lengths, by kind of padding.

Sentences are padded to the longest in the data, in a pass, or in a pass of similar lengths.

python benchmarks/padding.py --rounds 5 --json benchmarks/padding.jsonl

Lengths are log-normal, like the lengths of real sentences. The variants alternate, each as a
separate job from the same weights; their losses must agree.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hvdtrain
from hvdtrain.data.source import NamedArrays

VOCABULARY = 256
LONGEST = 256
SAMPLES = 256
MICRO = 16
JOB = [
    "task.name=language",
    "model.name=gpt",
    "model.layers=2",
    "model.heads=4",
    "model.width=64",
    "optim.name=sgd",
    "optim.base_lr=0.1",
]
JOB += [
    "batch.size=128",
    f"batch.micro={MICRO}",
    "epochs=2",
    "speed.precision=fp64",
    "log.display=lines",
]


def sentences(samples: int, seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(3.2, 0.7, samples), 2, LONGEST).astype(int)
    lengths[0] = LONGEST
    return [random.integers(0, VOCABULARY, length) for length in lengths]


def whole(samples: list[np.ndarray]) -> NamedArrays:
    """Returns the samples padded to the longest with a special token, which is not predicted."""
    rows = [np.pad(one, (0, LONGEST - len(one)), constant_values=VOCABULARY) for one in samples]
    return NamedArrays({"tokens": np.array(rows)}, {"tokens": VOCABULARY + 1})


def job(way: str, run: Path) -> tuple[float, float]:
    """Seconds of the second epoch's steps, and the validation loss."""
    sets: list[Any] = [sentences(SAMPLES, 0), sentences(64, 1)]
    if way == "longest of the data":
        sets = [whole(one) for one in sets]
        words = [f"task.ignore={VOCABULARY}"]
    else:
        sets = [{"tokens": one} for one in sets]
        words = [f"data.pad={{tokens: {VOCABULARY}}}"]
    words += ["data.bucket_by=length"] if way == "longest of each pass, by length" else []
    found = hvdtrain.train({"run": f"{run}"}, *JOB, *words, train_data=sets[0], val_data=sets[1])
    epochs = hvdtrain.read(found).query("kind == 'epoch'")
    return float(epochs["seconds"].iloc[-1]), found.last


WAYS = ("longest of the data", "longest of each pass", "longest of each pass, by length")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for way in itertools.islice(itertools.cycle(WAYS), number, number + len(WAYS)):
                found, losses[way] = job(way, Path(folder) / f"{number}-{way.replace(' ', '-')}")
                seconds[way].append(found)
    assert max(losses.values()) - min(losses.values()) < 1e-12, losses
    for way, found in seconds.items():
        ratios = [base / one for one, base in zip(found, seconds[WAYS[0]], strict=True)]
        row = {
            "way": way,
            "epoch_s": statistics.median(found),
            "range": [min(found), max(found)],
            "n": len(found),
        }
        row |= {
            "times": statistics.median(ratios),
            "times_range": [min(ratios), max(ratios)],
            "val_loss": losses[way],
        }
        row |= {
            "cores": len(os.sched_getaffinity(0)),
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
        }
        print(
            f"{way:34} {statistics.median(found):7.2f} s  x {statistics.median(ratios):5.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )
        if options.json:
            with options.json.open("a") as out:
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
