"""Milliseconds of one optimizer step on ResNet-50's parameters, each rule against
torch.optim.SGD(foreach=True), in alternating pairs.

OMP_NUM_THREADS=2 python benchmarks/optimizer.py [--rounds 25] [--json] [RULE ...]
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.core.import_torchvision import import_torchvision
from hvdtrain.frameworks.torch.optim.rule_optimizer import RuleOptimizer

RULES = ["larc", "lars", "sgd", "adam", "adamw", "lamb", "novograd"]
WARM_UP_ROUNDS = 3  # the first one creates the optimizer state


def parameters(device: str) -> list[torch.nn.Parameter]:
    """Weights of ResNet-50 with gradients, 25.6 million numbers in 161 tensors."""
    torch.manual_seed(0)
    weights = list(import_torchvision().models.resnet50().to(device).parameters())
    for p in weights:
        p.grad = torch.randn_like(p) * 1e-3
    return weights


def ms(optimizer: torch.optim.Optimizer, device: str) -> float:
    """Milliseconds of one step, from an idle device to an idle device."""
    synchronize: Callable[[], Any] = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    optimizer.step()
    synchronize()
    return (time.perf_counter() - start) * 1e3


def compare(name: str, device: str, rounds: int) -> dict[str, Any]:
    """A rule compared with torch.optim's SGD; the order alternates between rounds."""
    rule = importlib.import_module(f"hvdtrain.optim.{name}").build()
    hyper: dict[str, Any] = {"lr": 1e-4, "weight_decay": 1e-4}
    ours = RuleOptimizer(parameters(device), rule, **hyper)
    torchs = torch.optim.SGD(parameters(device), momentum=0.9, foreach=True, **hyper)
    times: dict[torch.optim.Optimizer, list[float]] = {ours: [], torchs: []}
    for number in range(rounds + WARM_UP_ROUNDS):
        for optimizer in (ours, torchs) if number % 2 else (torchs, ours):
            times[optimizer].append(ms(optimizer, device))
    our_ms = times[ours][WARM_UP_ROUNDS:]
    torch_ms = times[torchs][WARM_UP_ROUNDS:]
    low, median, high = statistics.quantiles(
        (a / b for a, b in zip(our_ms, torch_ms, strict=True)), n=4
    )
    return {
        "rule": name,
        "device": device,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "ms": round(statistics.median(our_ms), 2),
        "sgd_ms": round(statistics.median(torch_ms), 2),
        "ratio": round(median, 3),
        "ratio_quartiles": [round(low, 3), round(high, 3)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rules", nargs="*", default=RULES, metavar="RULE")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for device in ["cpu", *["cuda"] * torch.cuda.is_available()]:
        for name in options.rules:
            row = compare(name, device, options.rounds)
            low, high = row["ratio_quartiles"]
            line = (
                f"{name:9} {device:5} {row['ms']:7.2f} ms, torch.optim.SGD {row['sgd_ms']:7.2f} "
                f"ms, ratio {row['ratio']:.3f}"
            )
            print(
                json.dumps(row)
                if options.json
                else f"{line} (quartiles {low:.3f} to {high:.3f}, {options.rounds} rounds)"
            )


if __name__ == "__main__":
    main()
