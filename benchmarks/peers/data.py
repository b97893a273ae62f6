"""What the peers have in common: options, Fashion-MNIST in memory, the network, and the clock that
prints the script's line of JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hvdtrain.data.datasets.idx import build as read
from hvdtrain.frameworks.torch.models.wide_resnet import build

# of Fashion-MNIST's training images
MEAN = 0.2860
STD = 0.3530
LR = 0.02
MOMENTUM = 0.9
WIDTHS = (16, 16, 32, 64)
SEED = 1
# what makes DDP fastest here
DDP: dict[str, Any] = {
    "gradient_as_bucket_view": True,
    "static_graph": True,
    "broadcast_buffers": False,
}
Gather = Callable[[list[float]], list[list[float]]]  # each rank's numbers, in rank order


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of every script, with the same defaults."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--root", type=Path, required=True, help="folder that holds FashionMNIST/raw"
    )
    options.add_argument(
        "--precision", choices=["fp32", "bf16"], default="fp32", help="bf16: autocast"
    )
    options.add_argument("--dropout", type=float, default=0.0)
    options.add_argument("--batch", type=int, default=128, help="samples of a step over all ranks")
    options.add_argument("--warmup", type=int, default=10, help="steps before the first block")
    options.add_argument("--blocks", type=int, default=3)
    options.add_argument("--steps", type=int, default=30, help="steps of a block")
    options.add_argument(
        "--bound",
        type=float,
        default=1.5,
        help="the script fails unless the last block's loss is below (chance: ln 10)",
    )
    return options


def take_rank() -> tuple[int, int]:
    """(rank, size) from mpirun's variables, which are also set under the names that
    torch.distributed reads."""
    for torch_name, mpi_name in {
        "RANK": "RANK",
        "WORLD_SIZE": "SIZE",
        "LOCAL_RANK": "LOCAL_RANK",
        "LOCAL_WORLD_SIZE": "LOCAL_SIZE",
    }.items():
        os.environ[torch_name] = os.environ[f"OMPI_COMM_WORLD_{mpi_name}"]
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def images(root: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 (n, 28, 28, 1) and int64 (n,)."""
    source: Any = read("fashion_mnist", root, "train", download=False)
    return torch.from_numpy(source.x.copy()), torch.from_numpy(source.y.copy())


def normalized(x: torch.Tensor) -> torch.Tensor:
    """uint8 (n, H, W, C) -> float (n, C, H, W), channels innermost: a fifth faster than outermost
    on a CPU."""
    return x.permute(0, 3, 1, 2).float().sub_(255 * MEAN).div_(255 * STD)


def shards(
    arrays: tuple[torch.Tensor, torch.Tensor], rank: int, size: int, samples: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches of `samples` for this rank; the shuffle of an epoch is the same on all ranks,
    and each takes its own part."""
    x, y = arrays
    generator = torch.Generator().manual_seed(SEED)
    while True:
        order = torch.randperm(len(y), generator=generator)[rank::size]
        for rows in order[: len(order) // samples * samples].split(samples):
            yield x[rows], y[rows]


def network(dropout: float, plain: bool = True) -> nn.Module:
    """hvdtrain's wide residual network, with the same initial weights in every script; `plain` with
    torch's own dropout."""
    torch.manual_seed(SEED)
    model = build("wide_resnet", (28, 28, 1), 10, widths=WIDTHS, dropout=dropout)
    for block in model.modules() if plain else ():
        if hasattr(block, "dropout"):
            block.dropout = nn.Dropout(dropout)
    return model


class Clock:
    """Measures each block: milliseconds a step of the slowest rank, processor time of a rank with
    all its threads, and the mean loss.

    Processor time separates work from waiting on a busy machine; it includes threads that poll
    while they wait.
    """

    def __init__(self, options: argparse.Namespace, gather: Gather) -> None:
        self._options = options
        self._gather = gather
        self._began = 0.0
        self._cpu_began = 0.0
        self.cpu_ms_per_step: list[float] = []
        self.ms_per_step: list[float] = []
        self.losses: list[float] = []

    def begin(self) -> None:
        """Starts a block on all ranks together. A collective: every rank calls it."""
        self._gather([0.0])
        self._began = time.perf_counter()
        self._cpu_began = time.process_time()

    def end(self, loss: float) -> None:
        """Ends a block; `loss` is the mean over this rank's samples. A collective: every rank calls
        it."""
        rows = self._gather(
            [time.perf_counter() - self._began, time.process_time() - self._cpu_began, loss]
        )
        seconds, cpu_seconds, losses = zip(*rows, strict=True)
        self.ms_per_step.append(round(1e3 * max(seconds) / self._options.steps, 3))
        self.cpu_ms_per_step.append(
            round(1e3 * statistics.mean(cpu_seconds) / self._options.steps, 3)
        )
        self.losses.append(round(statistics.mean(losses), 4))

    def run(self, block: Callable[[int], float]) -> None:
        """All blocks, after the warm-up; block(steps) trains that many steps and returns this
        rank's mean loss."""
        block(self._options.warmup)
        for _ in range(self._options.blocks):
            self.begin()
            self.end(block(self._options.steps))

    def print_result(self, rank: int, peer: str, versions: Mapping[str, str]) -> None:
        """Prints the script's line of JSON, on rank 0. Exits unless the loss is below the bound:
        without learning there is no result."""
        if not self.losses[-1] < self._options.bound:
            raise SystemExit(
                f"{peer}: loss {self.losses} of the blocks, expected to end below "
                f"{self._options.bound}"
            )
        if rank == 0:
            facts = {
                name: value
                for name, value in vars(self._options).items()
                if name not in ("root", "bound")
            }
            line = {
                "peer": peer,
                "ms_per_step": self.ms_per_step,
                "cpu_ms_per_step": self.cpu_ms_per_step,
                "losses": self.losses,
                **facts,
                "threads": torch.get_num_threads(),
            }
            print(
                json.dumps(
                    line
                    | {
                        "versions": {
                            "python": platform.python_version(),
                            "torch": torch.__version__,
                            **versions,
                        }
                    }
                ),
                flush=True,
            )
