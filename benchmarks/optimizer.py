"""Milliseconds of one optimizer step on ResNet-50's parameters, each rule against torch.optim.SGD(foreach=True), in alternating pairs.

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


def parameters(device: str) -> list[torch.nn.Parameter]:
    """Weights of ResNet-50 with gradients, 25.6 million numbers in 161 tensors."""
    torch.manual_seed(0)
    weights = list(import_torchvision().models.resnet50().to(device).parameters())
    for p in weights:
        p.grad = torch.randn_like(p) * 1e-3
    return weights


def ms(optimizer: torch.optim.Optimizer, device: str) -> float:
    """One step, from an idle device to an idle device."""
    wait: Callable[[], Any] = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    optimizer.step()
    wait()
    return (time.perf_counter() - start) * 1e3


def compare(name: str, device: str, rounds: int) -> dict[str, Any]:
    """A rule against torch.optim's SGD; every second round the other one begins."""
    rule = importlib.import_module(f"hvdtrain.optim.{name}").build()
    hyper: dict[str, Any] = {"lr": 1e-4, "weight_decay": 1e-4}
    ours = RuleOptimizer(parameters(device), rule, **hyper)
    torchs = torch.optim.SGD(parameters(device), momentum=0.9, foreach=True, **hyper)
    times: dict[torch.optim.Optimizer, list[float]] = {ours: [], torchs: []}
    for turn in range(rounds + 3):  # three rounds to warm up: they make the slots
        for one in (ours, torchs) if turn % 2 else (torchs, ours):
            times[one].append(ms(one, device))
    a, b = times[ours][3:], times[torchs][3:]
    ratios = statistics.quantiles((x / y for x, y in zip(a, b, strict=True)), n=4)
    return {
        "rule": name,
        "device": device,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "ms": round(statistics.median(a), 2),
        "sgd_ms": round(statistics.median(b), 2),
        "ratio": round(ratios[1], 3),
        "ratio_quartiles": [round(ratios[0], 3), round(ratios[2], 3)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rules", nargs="*", default=RULES, metavar="RULE")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    for device in ["cpu", *["cuda"] * torch.cuda.is_available()]:
        for name in words.rules:
            row = compare(name, device, words.rounds)
            low, high = row["ratio_quartiles"]
            text = f"{name:9} {device:5} {row['ms']:7.2f} ms, torch.optim.SGD {row['sgd_ms']:7.2f} ms, ratio {row['ratio']:.3f}"
            print(json.dumps(row) if words.json else f"{text} (quartiles {low:.3f} to {high:.3f}, {words.rounds} rounds)")


if __name__ == "__main__":
    main()
