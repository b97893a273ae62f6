"""What each rank sends and how long a step takes: a dense layer cut over ranks by schemes a, b, c, and data parallel training of it.

mpirun -np 2 python benchmarks/dense_schemes.py [--engine mpi|horovod|torchdist] [--width 4096] [--samples 128] [--rounds 10] [--json FILE]

Forward and backward of one layer of width x width, `samples` rows on each rank, and for data parallel the allreduce of its gradient. The
ways take turns. Bytes are what a rank must send if each message goes directly to its receiver. For
a part that all other ranks get, this is (ranks - 1) times the part. For a sum that one rank gets,
it is everything except the rank's own part, once. For an allreduce, it is 2 (ranks - 1) / ranks of
its size. An engine may send more: over a tree, or with Horovod an allreduce instead of a sum for
one rank. "most in a turn" is the largest sum of bytes that one rank sends for one turn's rows,
forward: b has one sender at a time, c all of them.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from hvdtrain.comm.communicator import Buffer, Communicator, Handle, Op, part_of
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.config import plugins
from hvdtrain.config.sections.comm import CommConfig
from hvdtrain.extras.dense.hybrid import HybridModel

SCHEMES: tuple[Any, ...] = ("a", "b", "c")
WAYS = (*SCHEMES, "data parallel")
ROWS_OF_TURN = re.compile(r"dense\.rows\.\d+")


class CountingCommunicator:
    """Counts the bytes of another communicator's collectives, by their names."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.sent: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def start_broadcast(self, x: Buffer, name: str, root: int = 0) -> Handle:
        self.sent[name] += (
            x.nbytes * (self._communicator.size - 1) * (self._communicator.rank == root)
        )
        return self._communicator.start_broadcast(x, name, root)

    def start_reduce(self, x: Buffer, name: str, root: int = 0) -> Handle:
        self.sent[name] += x.nbytes * (self._communicator.rank != root)
        return self._communicator.start_reduce(x, name, root)

    def start_spread(self, x: Buffer, name: str) -> Handle:
        self.sent[name] += self._own(x).nbytes * (self._communicator.size - 1)
        return self._communicator.start_spread(x, name)

    def start_reduce_scatter(self, x: Buffer, name: str) -> Handle:
        self.sent[name] += x.nbytes - self._own(x).nbytes
        return self._communicator.start_reduce_scatter(x, name)

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        self.sent[name] += 2 * x.nbytes * (self._communicator.size - 1) // self._communicator.size
        return self._communicator.allreduce(x, name, op)

    def allgather(self, x: Buffer, name: str) -> Buffer:
        self.sent[name] += x.nbytes * (self._communicator.size - 1)
        return self._communicator.allgather(x, name)

    def _own(self, x: Buffer) -> Buffer:
        return x[part_of(len(x), self._communicator.rank, self._communicator.size)]


class OneLayer(torch.nn.Module):
    """The inputs are what convolutions would have made."""

    dense_part = "fc"

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    communicator: Communicator = plugins.load("comm", options.engine, "").connect(
        placement(os.environ), CommConfig(engine=options.engine)
    )
    models = {}
    counting = {}
    seconds = {way: list[float]() for way in WAYS}
    for way in WAYS:
        torch.manual_seed(0)
        counter: Any = CountingCommunicator(communicator)
        layer, counting[way] = OneLayer(options.width), counter
        models[way] = layer if way == "data parallel" else HybridModel(layer, counter, way)
    x = torch.randn(
        options.samples, options.width, generator=torch.Generator().manual_seed(communicator.rank)
    )
    # the first step is left out
    gradients = {way: step(models[way], x, counting[way]) for way in WAYS}
    check(gradients, communicator)
    for _ in range(options.rounds):
        for way in WAYS:
            counting[way].sent.clear()
            communicator.allreduce(torch.zeros(1), "begin")
            start = time.perf_counter()
            step(models[way], x, counting[way])
            seconds[way].append(time.perf_counter() - start)
    rows = [row(way, seconds[way], counting[way].sent, communicator) for way in WAYS]
    if communicator.rank == 0:
        report(rows, options, communicator.size)
    communicator.close()


def step(model: torch.nn.Module, x: torch.Tensor, communicator: Communicator) -> torch.Tensor:
    """The gradient of the rank's part of the weights, or of all of them, of a loss that is
    different for each sample."""
    model.zero_grad()
    own = x.detach().requires_grad_()
    (model(own).square().sum() / len(x)).backward()
    weight, bias = model.parameters()
    assert weight.grad is not None and bias.grad is not None
    if isinstance(model, OneLayer):
        weight.grad = communicator.allreduce(weight.grad, "weight")
        bias.grad = communicator.allreduce(bias.grad, "bias")
    return weight.grad


def check(gradients: dict[str, torch.Tensor], communicator: Communicator) -> None:
    """All ways give the same gradient."""
    whole = gradients["data parallel"]
    own = whole[part_of(len(whole), communicator.rank, communicator.size)]
    for way in SCHEMES:
        gap = float((gradients[way] - own).norm() / own.norm())
        assert gap < 1e-5, (way, gap)


def row(
    way: str, seconds: list[float], sent: Counter[str], communicator: Communicator
) -> dict[str, Any]:
    """Returns a row: the times of the slowest rank, and the bytes of the busiest rank."""
    ms = 1e3 * torch.tensor(seconds, dtype=torch.float64)
    times = sorted(communicator.allreduce(ms, "ms", "max").tolist())
    turns = [count for name, count in sent.items() if ROWS_OF_TURN.fullmatch(name)]
    rows, back = (
        sum(
            count
            for name, count in sent.items()
            if name.startswith("dense.rows.") and name.endswith(".gradient") == is_back
        )
        for is_back in (False, True)
    )
    numbers = torch.tensor([sum(sent.values()), rows, back, max(turns, default=0)])
    total, forward, backward, turn = communicator.allreduce(numbers, "bytes", "max").tolist()
    return {
        "way": way,
        "bytes": total,
        "bytes_of_rows_forward": forward,
        "bytes_of_rows_backward": backward,
        "bytes_most_in_a_turn": turn,
        "ms": round(statistics.median(times), 3),
        "quartiles": [round(times[len(times) // 4], 3), round(times[-1 - len(times) // 4], 3)],
        "rounds": len(times),
    }


def report(rows: list[dict[str, Any]], options: argparse.Namespace, ranks: int) -> None:
    print(
        f"{options.engine}, {ranks} ranks on {os.cpu_count()} cores, {options.samples} samples a "
        f"rank, {options.width} x {options.width}"
    )
    print(
        "| | MB a step | rows, forward | rows, backward | most in a turn | ms, median (quartiles, "
        "n) |\n|---|---|---|---|---|---|"
    )
    for one in rows:
        kinds = ("bytes", "bytes_of_rows_forward", "bytes_of_rows_backward", "bytes_most_in_a_turn")
        low, high = one["quartiles"]
        megabytes = " | ".join(f"{one[kind] / 1e6:.2f}" for kind in kinds)
        print(
            f"| {one['way']} | {megabytes} | {one['ms']:.1f} ({low:.1f} to {high:.1f}, "
            f"{one['rounds']}) |"
        )
    if options.json:
        with Path(options.json).open("a") as file:
            file.writelines(
                json.dumps(
                    {
                        **one,
                        "engine": options.engine,
                        "ranks": ranks,
                        "samples": options.samples,
                        "width": options.width,
                    }
                )
                + "\n"
                for one in rows
            )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default="mpi", choices=["mpi", "horovod", "torchdist"])
    parser.add_argument("--width", type=int, default=4096, help="inputs and outputs of the layer")
    parser.add_argument("--samples", type=int, default=128, help="of each rank")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", metavar="FILE", help="append the rows to this file as JSON lines")
    return parser.parse_args()


if __name__ == "__main__":
    main()
