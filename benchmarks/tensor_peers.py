"""Milliseconds of a training step on a tensor group: hvdtrain's cut layers, and PyTorch's
parallelize_module() with DTensors, in turn.

mpirun -np 2 python benchmarks/tensor_peers.py [--rounds 40] [--samples 8] [--layers 4] [--width 128] [--json FILE]

Both have the same GPT, weights and samples, SGD in float32, and collectives over the torchdist
engine's Gloo group. The layers are cut in the same way: ColwiseParallel and RowwiseParallel, and
SequenceParallel if hvdtrain has parallel.sequence=true. The rows of DTensor's matrix of queries,
keys and values are in another order, so that its even parts are whole heads of all three. Its loss
is loss_parallel()'s, from logits in parts like hvdtrain's, or computed from gathered logits. A
round is one step of each, after two warm-up steps; rounds alternate which one begins. The script
fails if the losses of a step differ. The ratio is hvdtrain's time divided by the other's in the
same round, for a step and for its passes without the optimizer: median and quartiles.
"""  # noqa: E501

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from blocks import spread
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.config import plugins
from hvdtrain.config.sections.comm import CommConfig
from hvdtrain.extras.tensor.plan import cut_model, plan_of
from hvdtrain.frameworks.torch.models import gpt

LR = 0.05
WARM_UP = 2
HEADS = 4
PEERS = ("loss_parallel", "gathered logits")


class Case(NamedTuple):
    """One of the cases that take turns."""

    sequence: bool
    name: str  # hvdtrain, or one of PEERS


class Took(NamedTuple):
    """Seconds of the slowest rank."""

    step: float
    passes: float


# tokens (n, context + 1) -> the mean loss, when its passes have ended
OneStep = Callable[[torch.Tensor], tuple[float, float]]


def ours(model: nn.Module, ranks: Communicator, sequence: bool) -> OneStep:
    cuts = cut_model(model, plan_of(model, "tensor_peers"), ranks, sequence=sequence)
    # each rank's gradient is for its own positions
    summed = [p for p in model.parameters() if sequence and p not in cuts]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def one_step(tokens: torch.Tensor) -> tuple[float, float]:
        loss = model(tokens[:, :-1]).cross_entropy(tokens[:, 1:], 0.0, -100).mean()
        loss.backward()
        if summed:
            gradients = [p.grad for p in summed if p.grad is not None]
            whole = ranks.allreduce(
                torch.cat([each.flatten() for each in gradients]), "whole parameters"
            )
            for gradient, part in zip(
                gradients, whole.split([each.numel() for each in gradients]), strict=True
            ):
                gradient.copy_(part.view_as(gradient))
        end = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach()), end

    return one_step


def theirs(
    model: nn.Module, ranks: Communicator, sequence: bool, is_parallel_loss: bool
) -> OneStep:
    mesh = init_device_mesh("cpu", (ranks.size,))
    heads_of_each_rank(model, ranks.size)
    parallelize_module(model, mesh, plan(len(model.blocks), sequence, is_parallel_loss))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, foreach=False)  # of tensors and DTensors

    def one_step(tokens: torch.Tensor) -> tuple[float, float]:
        with loss_parallel() if is_parallel_loss else nullcontext():
            loss = functional.cross_entropy(
                model(tokens[:, :-1]).flatten(0, -2), tokens[:, 1:].flatten()
            )
            loss.backward()
        end = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach()), end

    return one_step


def plan(layers: int, sequence: bool, is_parallel_loss: bool) -> dict[str, ParallelStyle]:
    """Returns the plan of the tutorial of torch.distributed.tensor.parallel."""
    between = Shard(1) if sequence else Replicate()
    columns = ColwiseParallel(input_layouts=between)
    rows = RowwiseParallel(output_layouts=between)
    styles: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if is_parallel_loss else Replicate(),
            use_local_output=not is_parallel_loss,
        ),
    }
    if sequence:
        styles |= {
            "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
            "norm": SequenceParallel(),
        }
    for i in range(layers):
        block = f"blocks.{i}"
        styles |= {
            f"{block}.attention.inputs": columns,
            f"{block}.attention.output": rows,
            f"{block}.fc1": columns,
            f"{block}.fc2": rows,
        }
        styles |= (
            {f"{block}.norm1": SequenceParallel(), f"{block}.norm2": SequenceParallel()}
            if sequence
            else {}
        )
    return styles


@torch.no_grad()
def heads_of_each_rank(model: nn.Module, size: int) -> None:
    """Rows (3, ranks, width / ranks) of each layer that gives queries, keys and values become
    (ranks, 3, width / ranks)."""
    for name, layer in model.named_modules():
        if name.endswith("attention.inputs"):
            for p in layer.parameters():
                p.copy_(p.unflatten(0, (3, size, -1)).transpose(0, 1).flatten(0, 2))


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    ranks: Communicator = plugins.load("comm", "torchdist", "").connect(
        placement(os.environ), CommConfig(engine="torchdist")
    )
    assert dist.get_backend() == "gloo"
    torch.manual_seed(1)
    model = gpt.build(
        "gpt",
        options.context,
        options.vocabulary,
        layers=options.layers,
        heads=HEADS,
        width=options.width,
    )
    steps: dict[Case, OneStep] = {}
    for sequence in (False, True):
        steps[Case(sequence, "hvdtrain")] = ours(copy.deepcopy(model), ranks, sequence)
        for peer in PEERS:
            steps[Case(sequence, peer)] = theirs(
                copy.deepcopy(model), ranks, sequence, peer == "loss_parallel"
            )
    times, largest = in_turn(steps, ranks, options)
    if largest > 1e-5:
        raise SystemExit(f"they do not train the same: losses differ by {largest:.1g}")
    if ranks.rank == 0:
        report(times, largest, options)
    ranks.close()


def in_turn(
    steps: dict[Case, OneStep], ranks: Communicator, options: argparse.Namespace
) -> tuple[dict[Case, list[Took]], float]:
    """The times of each in every round, and the largest difference of losses in a step."""
    times: dict[Case, list[Took]] = {case: [] for case in steps}
    generator = torch.Generator().manual_seed(0)
    cases = list(steps)
    largest = 0.0
    for number in range(-WARM_UP, options.rounds):
        tokens = torch.randint(
            options.vocabulary, (options.samples, options.context + 1), generator=generator
        )
        losses = []
        first = number % len(cases)
        for case in cases[first:] + cases[:first]:
            ranks.allgather_object(0)
            start = time.perf_counter()
            loss, end_of_passes = steps[case](tokens)
            of_ranks = ranks.allgather_object([time.perf_counter() - start, end_of_passes - start])
            losses.append(loss)
            times[case] += [Took(*map(max, zip(*of_ranks, strict=True)))] if number >= 0 else []
        largest = max(largest, max(losses) - min(losses))
    return times, max(ranks.allgather_object(largest))


def report(times: dict[Case, list[Took]], largest: float, options: argparse.Namespace) -> None:
    print(
        f"{options.rounds} rounds, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, losses "
        f"within {largest:.1g}"
    )
    print(
        "| parallel.sequence | DTensor with | hvdtrain, ms a step | DTensor, ms a step | ratio | "
        "of the passes |\n|---|---|---|---|---|---|"
    )
    for sequence in (False, True):
        own = times[Case(sequence, "hvdtrain")]
        for peer in PEERS:
            other = times[Case(sequence, peer)]
            ratios = [
                spread(
                    [getattr(a, part) / getattr(b, part) for a, b in zip(own, other, strict=True)],
                    3,
                )
                for part in Took._fields
            ]
            of_both = [spread([1e3 * each.step for each in found], 1) for found in (own, other)]
            columns = [f"{median} ({low} to {high})" for median, (low, high) in (*of_both, *ratios)]
            print(f"| {str(sequence).lower()} | {peer} | {' | '.join(columns)} |")
            if options.json:
                sizes: dict[str, Any] = {
                    name: value for name, value in vars(options).items() if name != "json"
                }
                row = {
                    "sequence": sequence,
                    "peer": peer,
                    "hvdtrain_ms": of_both[0],
                    "torch_ms": of_both[1],
                    "ratio": ratios[0],
                }
                row |= {
                    "ratio_of_passes": ratios[1],
                    "torch": torch.__version__,
                    "load": round(os.getloadavg()[0], 1),
                }
                with options.json.open("a") as file:
                    file.write(json.dumps(row | sizes) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=64, help="positions; a multiple of ranks")
    parser.add_argument("--vocabulary", type=int, default=512, help="tokens; a multiple of ranks")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="append the rows to this file as JSON lines"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
