"""Models that a script passes to hvdtrain.train(), on the ranks: each object's outputs after
training, and what was reported."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from ranks import of_this_copy
from torch import nn

import hvdtrain

BASE = {
    "batch.size": 12,
    "epochs": 2,
    "optim.base_lr": 0.1,
    "log.every_steps": 1,
    "guard.equal_steps": None,
    "speed.precision": "fp64",
}
# the longer it trains
WORSE = (
    "stop.restore_best=true checkpoint.keep_last=1 epochs=4 recipe.schedule=exponential "
    "recipe.gamma=3"
)
STRATEGIES = {  # name -> words of a job
    "one process's": "",
    "averages": "optim.ema=0.9",
    "averages in parts": "optim.ema=0.9 shard.stage=1",
    "stage 1": "shard.stage=1",
    "stage 2": "shard.stage=2",
    "stage 3": "shard.stage=3",
    "best of stage 3": f"shard.stage=3 {WORSE}",
    "best of stage 1": f"shard.stage=1 optim.ema=0.5 {WORSE}",
    "pipeline": "parallel.pipeline=2",
    "pipeline of adam": "parallel.pipeline=2 optim.name=adam optim.base_lr=0.01 shard.stage=1",
    "tensor": "parallel.tensor=2",
    "dense": "parallel.dense=b",
    "servers": "servers.count=1",
    "asynchronous servers": "servers.count=1 servers.bound=2",
    "local steps": "comm.local_steps=2 log.every_steps=2",
    "buckets, stopped within an epoch": "comm.reduce=bucket stop.steps=7",
}
STRATEGIES = {name: words for name, words in STRATEGIES.items() if of_this_copy([words])}


class Net(nn.Sequential):
    """A model that every strategy can take: units of a pipeline, a dense part, layers to cut; a
    buffer that training changes."""

    dense_part = "dense"

    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        self.one = nn.Linear(3, 8)
        self.norm = nn.BatchNorm1d(8) if has_norm else nn.Tanh()
        self.dense = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))

    def tensor_plan(self) -> dict[str, str]:
        return {"dense.0": "columns", "dense.2": "rows"}


def data(samples: int, seed: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).uniform(-1, 1, (samples, 3))
    return {"x": x, "y": x.prod(1, keepdims=True)}


def after_training(folder: str, engine: str, strategies: list[str]) -> dict[str, Any]:
    """Returns by strategy: the last evaluation's loss, the object's loss, how far the object's
    weights moved, and their distance from run.weights."""
    train = data(65, 0)
    val = data(33, 1)
    found = {}
    for number, strategy in enumerate(strategies):
        torch.manual_seed(0)
        net = Net("pipeline" not in strategy).double()  # whose stages have no running statistics
        before = [p.detach().clone() for p in net.parameters()]
        words = [*STRATEGIES[strategy].split(), f"comm.engine={engine}", f"run={folder}/{number}"]
        run = hvdtrain.train(
            BASE, *words, model=net, train_data=train, val_data=val, loss=nn.MSELoss()
        )
        with torch.no_grad():
            loss = nn.functional.mse_loss(
                net(torch.tensor(val["x"])), torch.tensor(val["y"])
            ).item()
        moved = max(
            (p - old).abs().max().item() for p, old in zip(net.parameters(), before, strict=True)
        )
        state = net.state_dict()
        raw = {name: torch.from_numpy(array) for name, array in run.weights.items()}
        assert state.keys() == raw.keys(), strategy
        apart = max((state[name] - raw[name]).abs().max().item() for name in state)
        found[strategy] = {
            "reported": run.last,
            "best": run.best,
            "object": loss,
            "moved": moved,
            "from_raw": apart,
        }
    return found


def main(folder: str, engine: str, *strategies: str) -> None:
    """One line of JSON on each rank."""
    found = after_training(folder, engine, list(strategies) or list(STRATEGIES))
    sys.stderr.write(f"after {json.dumps(found)}\n")
