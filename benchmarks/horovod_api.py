"""Compares hvdtrain.horovod with Horovod: its synthetic benchmark, and each call, alternating. Rows
go to horovod_api.jsonl.

python benchmarks/horovod_api.py [--rounds 5] [--ranks 2] [--steps 6] [--former DIR]
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hvdtrain.core.import_torchvision import import_torchvision

HERE = Path(__file__).resolve().parent
MODULES = {"hvdtrain-mpi": ("hvdtrain.horovod", "mpi"), "horovod": ("horovod.torch", "horovod")}
SIZES = (1, 16, 1024, 65_536, 1_048_576)  # floats
CALL_SIZES = (160, 2_621_440)  # floats on each rank; grouped calls split them into 10 tensors


def small_net() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Linear(256, 256) if i % 2 == 0 else nn.ReLU() for i in range(19)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(256, 10)), torch.randn(64, 256)


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """6 gradients, 0.9 MB."""
    layers = nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
    return nn.Sequential(*layers), torch.randn(32, 784)


def convnet() -> tuple[nn.Module, torch.Tensor]:
    """20 gradients, 0.3 MB."""
    widths = 3, 16, 16, 32, 32, 64, 64
    layers: list[nn.Module] = []
    for before, width in itertools.pairwise(widths):
        stride = 2 if width == 2 * before else 1
        layers += [
            nn.Conv2d(before, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    ), torch.randn(32, 3, 32, 32)


def resnet50() -> tuple[nn.Module, torch.Tensor]:
    """161 gradients, 102 MB, as in Horovod's benchmark; images of 64 x 64 keep it to a second a
    step."""
    return import_torchvision().models.resnet50(), torch.randn(4, 3, 64, 64)


NETS = {"small": small_net, "mlp": mlp, "convnet": convnet, "resnet50": resnet50}


def steps_s(hvd: Any, name: str, steps: int) -> list[float]:
    """Seconds of each step of the synthetic benchmark, after two that warm up."""
    torch.manual_seed(0)
    model, x = NETS[name]()
    y = torch.randint(0, 10, (len(x),))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    found = []
    for step in range(steps + 2):
        start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step >= 2:
            found.append(time.perf_counter() - start)
    return found


def small_us(hvd: Any, length: int) -> float:
    """Microseconds of one allreduce that is waited for."""
    x = torch.ones(length)
    turns = 500 if length < 100_000 else 30
    for _ in range(20):
        hvd.allreduce(x, op=hvd.Sum, name="x")
    start = time.perf_counter()
    for _ in range(turns):
        hvd.allreduce(x, op=hvd.Sum, name="x")
    return (time.perf_counter() - start) / turns * 1e6


def calls_us(hvd: Any) -> dict[str, dict[int, float]]:
    """Microseconds of each call that is waited for: the median of 5 runs of several."""
    found: dict[str, dict[int, float]] = {}
    for length in CALL_SIZES:
        x = torch.ones(length // 16, 16)
        parts = list(torch.ones(10, length // 160, 16))
        calls = {
            "allreduce": lambda x=x: hvd.allreduce(x, op=hvd.Average, name="x"),
            "allreduce_": lambda x=x: hvd.allreduce_(x, op=hvd.Average, name="x"),
            "grouped_allreduce": lambda parts=parts: hvd.grouped_allreduce(
                parts, op=hvd.Average, name="x"
            ),
            "allgather": lambda x=x: hvd.allgather(x, name="x"),
            "grouped_allgather": lambda parts=parts: hvd.grouped_allgather(parts, name="x"),
            "broadcast_": lambda x=x: hvd.broadcast_(x, 0, name="x"),
            "alltoall": lambda x=x: hvd.alltoall(x, name="x"),
            "reducescatter": lambda x=x: hvd.reducescatter(x, op=hvd.Average, name="x"),
            "grouped_reducescatter": lambda parts=parts: hvd.grouped_reducescatter(
                parts, op=hvd.Average, name="x"
            ),
        }
        for name, call in calls.items():
            found.setdefault(name, {})[length] = round(
                median_us(call, 4 if length > 10_000 else 40), 1
            )
    return found


def median_us(call: Callable[[], Any], turns: int) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(turns):
            call()
        times.append((time.perf_counter() - start) / turns * 1e6)
    return statistics.median(times)


def on_rank(label: str, steps: int) -> None:
    torch.set_num_threads(1)
    module, _ = MODULES[label.removesuffix("-former")]
    hvd = importlib.import_module(module)
    hvd.init()
    row: dict[str, Any] = {"module": label, "ranks": hvd.size()}
    row["allreduce_us"] = {length: round(small_us(hvd, length), 1) for length in SIZES}
    row["calls_us"] = calls_us(hvd)
    for name in ("small", "mlp", "convnet"):
        row[f"{name}_ms"] = round(statistics.median(steps_s(hvd, name, 60)) * 1e3, 3)
    row["resnet50_s"] = round(statistics.median(steps_s(hvd, "resnet50", steps)), 4)
    if hvd.rank() == 0:
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--former", type=Path, help="another checkout of this project, which is timed too"
    )
    parser.add_argument("--on-rank")
    options = parser.parse_args()
    if options.on_rank:
        on_rank(options.on_rank, options.steps)
        return
    mpirun = shutil.which("mpirun") or "mpirun"
    runs = [(label, engine, HERE.parent) for label, (_, engine) in MODULES.items()]
    if options.former:
        runs.append(("hvdtrain-mpi-former", "mpi", options.former))
    for turn in range(options.rounds):
        first = turn % len(runs)  # which of them runs first changes from round to round
        for label, engine, root in runs[first:] + runs[:first]:
            command = [
                mpirun,
                "-np",
                str(options.ranks),
                sys.executable,
                __file__,
                "--on-rank",
                label,
                "--steps",
                str(options.steps),
            ]
            env = {**os.environ, "HVDTRAIN_ENGINE": engine, "PYTHONPATH": str(root)}
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=280, env=env, check=True
            )
            row = {
                **json.loads(done.stdout.splitlines()[-1]),
                "round": turn,
                "date": str(datetime.date.today()),
            }
            print(json.dumps(row), flush=True)
            with (HERE / "horovod_api.jsonl").open("a") as rows:
                rows.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
