"""ElasticSampler: each rank's samples of an epoch; after a loss those that nobody has had are divided anew."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

import torch

from hvdtrain.horovod.job import JOB


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Every rank has equally many: some samples come twice where they do not divide.

    Call record_batch() after each batch, set_epoch() at the end of an epoch, and give it to the TorchState.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """seed: the same on every rank."""
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0  # epoch, and how many samples of it all ranks together have had
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, with an order of its own."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every rank has had so many samples more."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divides what is left among the ranks that there are now."""
        self.num_replicas, self.rank = JOB.engine.size, JOB.engine.rank
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        again = [left[i % len(left)] for i in range(len(left), self.total_size)]
        return iter((left + again)[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
