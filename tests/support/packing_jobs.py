"""Jobs on rows of packed sequences, on the ranks of this start; and their steps by hand, each
sequence alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sequence_jobs import JOB, STEPS, VOCABULARY, by_hand, tokens
from torch.nn import functional

import hvdtrain
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.extras.packing.packed import first_fit
from hvdtrain.frameworks.torch.models.gpt import GPT, build

# of 19 rows: 3, 2 and 2 on three ranks
ROW = 32
BATCH = 7
PACK = f"data.pack={ROW}"


def gpt() -> GPT:
    """Returns a GPT with the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        found = build("gpt", ROW - 1, VOCABULARY, layers=2, heads=2, width=8)
    assert isinstance(found, GPT)
    return found.double()


def packed(
    run: str, *words: str, of: Callable[[list[np.ndarray]], Any] = lambda found: {"tokens": found}
) -> Any:
    """The job after STEPS steps, or as words say."""
    job: dict[str, Any] = {"run": run, "stop.steps": STEPS, "task.name": "language"}
    options = [*JOB, PACK, f"batch.size={BATCH}", "batch.micro=2", *words]
    return hvdtrain.train(
        job, *options, model=gpt(), train_data=of(tokens()), val_data=of(tokens(20, 8))
    )


def on_ranks(folder: str, *ways: str) -> int:
    """One job after the other on the mpi engine, each "RUN word word"; rank 0 leaves their
    weights."""
    os.chdir(folder)
    for way in ways:
        run, *words = way.split()
        found = packed(run, *words, "comm.engine=mpi").weights
        if placement(os.environ).rank == 0:
            np.savez(f"{run}.npz", **found)
    return 0


def alone(model: torch.nn.Module, sequence: np.ndarray) -> tuple[torch.Tensor, int]:
    """The sum of the losses of a sequence that the model reads by itself, and how many tokens are
    predicted."""
    one = torch.from_numpy(sequence)
    if len(one) < 2:
        return torch.zeros((), dtype=torch.float64), 0
    return functional.cross_entropy(model(one[None, :-1])[0], one[1:], reduction="sum"), len(
        one
    ) - 1


def packed_by_hand() -> dict[str, np.ndarray]:
    sequences = tokens()
    rows = first_fit(np.array([len(one) for one in sequences]), ROW)

    def loss(model: torch.nn.Module, row: int) -> tuple[torch.Tensor, int]:
        found = [
            alone(model, sequences[number])
            for number in rows.values[rows.edges[row] : rows.edges[row + 1]]
        ]
        return torch.stack([one for one, _ in found]).sum(), sum(count for _, count in found)

    return by_hand(gpt(), loss, len(rows), BATCH)
