"""hvdtrain.horovod beside Horovod: its synthetic benchmark, and small allreduces, alternating. Rows go to horovod_api.jsonl.

python benchmarks/horovod_api.py [--rounds 5] [--ranks 2] [--steps 6]
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

HERE = Path(__file__).resolve().parent
MODULES = {"hvdtrain-mpi": ("hvdtrain.horovod", "mpi"), "horovod": ("horovod.torch", "horovod")}
SIZES = (1, 16, 1024, 65_536, 1_048_576)  # floats


def small_net() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Linear(256, 256) if i % 2 == 0 else nn.ReLU() for i in range(19)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(256, 10)), torch.randn(64, 256)


def resnet50() -> tuple[nn.Module, torch.Tensor]:
    """161 gradients, 102 MB, as in Horovod's benchmark; images of 64 x 64 keep it to a second a step."""
    from torchvision.models import resnet50 as build

    return build(), torch.randn(4, 3, 64, 64)


def steps_s(hvd: Any, name: str, steps: int) -> list[float]:
    """Seconds of each step of the synthetic benchmark, after two that warm up."""
    torch.manual_seed(0)
    model, x = {"small": small_net, "resnet50": resnet50}[name]()
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
    x, turns = torch.ones(length), 500 if length < 100_000 else 30
    for _ in range(20):
        hvd.allreduce(x, op=hvd.Sum, name="x")
    start = time.perf_counter()
    for _ in range(turns):
        hvd.allreduce(x, op=hvd.Sum, name="x")
    return (time.perf_counter() - start) / turns * 1e6


def on_rank(label: str, steps: int) -> None:
    torch.set_num_threads(1)
    module, _ = MODULES[label]
    hvd = importlib.import_module(module)
    hvd.init()
    row: dict[str, Any] = {"module": label, "ranks": hvd.size()}
    row["allreduce_us"] = {length: round(small_us(hvd, length), 1) for length in SIZES}
    row["small_ms"] = round(statistics.median(steps_s(hvd, "small", 60)) * 1e3, 3)
    row["resnet50_s"] = round(statistics.median(steps_s(hvd, "resnet50", steps)), 4)
    if hvd.rank() == 0:
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--on-rank", choices=MODULES)
    options = parser.parse_args()
    if options.on_rank:
        on_rank(options.on_rank, options.steps)
        return
    mpirun = shutil.which("mpirun") or "mpirun"
    for turn in range(options.rounds):
        for label, (_, engine) in MODULES.items():
            command = [mpirun, "-np", str(options.ranks), sys.executable, __file__, "--on-rank", label, "--steps", str(options.steps)]
            env = {**os.environ, "HVDTRAIN_ENGINE": engine, "PYTHONPATH": str(HERE.parent)}
            done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env, check=True)
            row = {**json.loads(done.stdout.splitlines()[-1]), "round": turn, "date": str(datetime.date.today())}
            print(json.dumps(row), flush=True)
            with (HERE / "horovod_api.jsonl").open("a") as rows:
                rows.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
