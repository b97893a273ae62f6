"""Images/s of augmentation on the host, one thread: of hvdtrain, whose samples of a batch are
computed together, and of torchvision.

python benchmarks/augment.py [--size 32] [--batch 128] [--rounds 7] [--json FILE]

Images of random areas, size x size x 3. In each round every method augments two batches
(torchvision: a quarter of one), and each round begins with another method; the first one warms up.
Parameters are drawn in that time. torchvision.transforms.v2 is called for each image, as a
DataLoader does, on a PIL image or on a uint8 tensor, whichever is faster; the ratio is to it in the
same round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blocks import in_turn
from PIL import Image

from hvdtrain.config.sections.augment import AugmentConfig
from hvdtrain.core.import_torchvision import import_torchvision
from hvdtrain.data.images import augment, mixing

JITTER = [0.4, 0.4, 0.4, 0.1]
WORDS: dict[str, dict[str, Any]] = {
    "crop and flip": {"crop": 4, "flip": True},
    "rand_augment=2": {"rand_augment": 2},
    "color_jitter=[0.4,0.4,0.4]": {"color_jitter": JITTER[:3]},
    "color_jitter=[0.4,0.4,0.4,0.1]": {"color_jitter": JITTER},
    "erase=0.25": {"erase": 0.25},
    "cutmix=1.0": {"cutmix": 1.0},
    "crop, flip, rand_augment=2, erase=0.25, cutmix=1.0": {
        "crop": 4,
        "flip": True,
        "rand_augment": 2,
        "erase": 0.25,
        "cutmix": 1.0,
    },
}


def images(count: int, size: int) -> np.ndarray:
    """uint8 (count, size, size, 3): areas with noise."""
    rng = np.random.default_rng(0)
    areas = np.kron(rng.normal(0, 60, (count, size // 4, size // 4, 3)), np.ones((1, 4, 4, 1)))
    return (128 + areas + rng.normal(0, 3, areas.shape)).clip(0, 255).astype(np.uint8)


def of_hvdtrain(config: AugmentConfig, x: np.ndarray) -> Callable[[int], float]:
    """Returns a function that measures the seconds of a number of batches. The partner of a mixture
    is also augmented."""
    n = len(x)
    shape = x.shape[1:]

    def block(steps: int) -> float:
        began = time.perf_counter()
        for step in range(steps):
            samples = np.arange(n)
            epochs = np.full(n, step)
            drawn = augment.draw(config, 1, epochs, samples, shape)
            batch: dict[str, Any] = {"x": x, "augmentation": drawn}
            partners = mixing.partners_of(config, 1, epochs, samples, n)
            if partners is not None:
                batch |= {
                    "partner_x": x[partners],
                    "partner_augmentation": augment.draw(config, 1, epochs, partners, shape),
                }
                batch |= {"mixup_weight": drawn.mixup_weight, "cutmix_box": drawn.cutmix_box}
            augment.augment_batch(batch)
        return time.perf_counter() - began

    return block


def of_torchvision(transform: Callable[[Any], Any], x: list[Any]) -> Callable[[int], float]:
    """Seconds of as many images, one by one."""

    def block(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            for image in x:
                transform(image)
        return time.perf_counter() - began

    return block


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    import_torchvision()
    from torchvision.transforms import v2

    torch.set_num_threads(1)
    steps = 2
    x = images(options.batch, options.size)
    few = [torch.from_numpy(each).permute(2, 0, 1) for each in x[: options.batch // 4]]
    kinds = {"PIL": [Image.fromarray(each) for each in x[: options.batch // 4]], "tensors": few}
    theirs = {
        "rand_augment=2": v2.RandAugment(2),
        "color_jitter=[0.4,0.4,0.4]": v2.ColorJitter(*JITTER[:3]),
        "color_jitter=[0.4,0.4,0.4,0.1]": v2.ColorJitter(*JITTER),
    }
    count: dict[str, int] = {}
    blocks: dict[str, Callable[[int], float]] = {}
    for name, words in WORDS.items():
        blocks[name], count[name] = of_hvdtrain(AugmentConfig(**words), x), options.batch * steps
    for name, transform in theirs.items():
        for kind, each in kinds.items():
            blocks[f"{name}, torchvision on {kind}"] = of_torchvision(transform, each)
            count[f"{name}, torchvision on {kind}"] = len(each) * steps
    times = in_turn(blocks, options.rounds, steps)
    rates = {name: [count[name] / seconds for seconds in each] for name, each in times.items()}
    for name, each in rates.items():
        line: dict[str, Any] = {
            "augmentation": name,
            "images_per_s": round(statistics.median(each)),
            "range": [round(min(each)), round(max(each))],
        }
        if name in theirs:
            ratios = [
                own / max(rates[f"{name}, torchvision on {kind}"][number] for kind in kinds)
                for number, own in enumerate(each)
            ]
            line |= {
                "to_torchvision": round(statistics.median(ratios), 2),
                "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
            }
        line |= {
            "n": options.rounds,
            "size": options.size,
            "batch": options.batch,
            "cores": os.cpu_count(),
            "machine": platform.machine(),
        }
        print(json.dumps(line))
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
