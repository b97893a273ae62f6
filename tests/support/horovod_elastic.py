"""Three ranks train with hvd.elastic, one is killed, two continue: python
tests/support/horovod_elastic.py OUT.json [WHO]

OUT: what rank 0 has in the end, and what one process computes that is told when the rank was lost.
WHO: the rank that is killed; -1: none.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import hvdtrain.horovod as hvd

BATCHES = 12
KILLED_AT = 7
COMMIT_EVERY = 3
who = int(sys.argv[2]) if len(sys.argv) > 2 else 1


def gradient(weight: torch.Tensor, batch: int, rank: int) -> torch.Tensor:
    return weight.detach() * 0.1 + batch + 0.01 * (rank + 1)


@hvd.elastic.run
def train(state: Any) -> None:
    while state.batch < BATCHES:
        if state.batch == KILLED_AT and state.first_rank == who:
            os.kill(os.getpid(), signal.SIGKILL)
        weight = state.model.weight
        state.optimizer.zero_grad()
        (weight * gradient(weight, state.batch, hvd.rank())).sum().backward()
        state.optimizer.step()
        state.batch += 1
        if state.batch % COMMIT_EVERY == 0:
            state.commit()


def alone(sizes: list[int]) -> torch.Tensor:
    """Returns the weight if sizes[i] ranks computed batch i."""
    weight = torch.ones(1, 2, dtype=torch.float64)
    velocity = torch.zeros(1, 2, dtype=torch.float64)
    for batch, size in enumerate(sizes):
        velocity = (
            0.9 * velocity + sum(gradient(weight, batch, rank) for rank in range(size)) / size
        )
        weight = weight - 0.01 * velocity
    return weight


def main() -> None:
    hvd.init()
    model = torch.nn.Linear(2, 1, bias=False).double()
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, batch=0)
    first_size = hvd.size()
    state.first_rank = hvd.rank()
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    train(state)
    committed = KILLED_AT // COMMIT_EVERY * COMMIT_EVERY
    sizes = (
        [first_size] * BATCHES
        if who < 0
        else [first_size] * committed + [first_size - 1] * (BATCHES - committed)
    )
    found = hvd.allgather(model.weight.detach())
    if hvd.rank() == 0:
        row = {
            "found": found.tolist(),
            "expected": alone(sizes).tolist(),
            "resets": resets,
            "size": hvd.size(),
        }
        Path(sys.argv[1]).write_text(json.dumps(row))


main()
