"""Compares norms over ranks with one process: {case: largest difference}, on the ranks.

Every case computes on all ranks before results are compared, so that a wrong number on one rank
lets no other rank wait.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence, Sized
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.core.metrics import Sums, zero_sums
from hvdtrain.extras.batch_norms.use_norm import use_norm
from hvdtrain.frameworks.stopwatch import HostStopwatch
from hvdtrain.frameworks.torch.models import convnet
from hvdtrain.frameworks.torch.parallel.buckets import Buckets
from hvdtrain.frameworks.torch.parallel.by_library import HorovodOptimizer

SHARES: dict[str, Callable[[int, int], int]] = {  # samples of a rank, from rank and size
    "even": lambda rank, size: 8,
    "uneven": lambda rank, size: 5 + 6 * rank,
    "first_empty": lambda rank, size: 12 * rank,
    "last_empty": lambda rank, size: 11 * (size - 1 - rank),
    "only_last": lambda rank, size: 15 * (rank == size - 1),
    "one_each": lambda rank, size: 1,
}
LAYERS: dict[
    str, Callable[[], tuple[nn.Module, tuple[int, ...]]]
] = {  # a layer, and the shape of a sample
    "1d": lambda: (nn.BatchNorm1d(3), (3,)),
    "1d_length": lambda: (nn.BatchNorm1d(3), (3, 5)),
    "2d": lambda: (nn.BatchNorm2d(3, eps=0.01, momentum=0.3), (3, 4, 5)),
    "3d": lambda: (nn.BatchNorm3d(2), (2, 2, 3, 2)),
    "cumulative": lambda: (nn.BatchNorm2d(3, momentum=None), (3, 4, 5)),
    "without_affine": lambda: (nn.BatchNorm2d(3, affine=False), (3, 4, 5)),
    "without_running": lambda: (nn.BatchNorm2d(3, track_running_stats=False), (3, 4, 5)),
}
Case = Callable[[Communicator], float]


def apart(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Returns the largest difference, divided by the largest number if that is above 1."""
    pairs = [(a.detach(), b.detach()) for a, b in zip(mine, theirs, strict=True)]
    assert all(a.shape == b.shape for a, b in pairs), [(a.shape, b.shape) for a, b in pairs]
    return max(
        [
            float((a - b).abs().max()) / max(1.0, float(b.abs().max()))
            for a, b in pairs
            if b.numel()
        ],
        default=0.0,
    )


def cut(communicator: Communicator, shares: Callable[[int, int], int]) -> tuple[int, slice]:
    """All samples, and which of them are this rank's."""
    counts = [shares(rank, communicator.size) for rank in range(communicator.size)]
    start = sum(counts[: communicator.rank])
    return sum(counts), slice(start, start + counts[communicator.rank])


def summed(communicator: Communicator, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [communicator.allreduce(g.clone(), f"sum.{i}") for i, g in enumerate(gradients)]


def buffers(model: nn.Module) -> list[torch.Tensor]:
    return [b.to(torch.float64, copy=True) for b in model.buffers()]


def sync_layer(layer: str, shares: str, dtype: torch.dtype, communicator: Communicator) -> float:
    """Three steps of one layer on all ranks, and the plain layer on the joined batch: outputs,
    gradients, buffers; then evaluation."""
    torch.manual_seed(7)
    plain, shape = LAYERS[layer]()
    plain = plain.to(dtype)
    for p in plain.parameters():
        nn.init.uniform_(p, 0.5, 2)
    model = use_norm(
        nn.Sequential(nn.Identity(), copy.deepcopy(plain)), "sync", 1, "averaged", communicator
    )
    total, mine = cut(communicator, SHARES[shares])
    found: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    for _ in range(3):
        whole = (3 * torch.randn(total, *shape, dtype=dtype) - 1).requires_grad_()
        slope = torch.randn_like(whole)
        part = whole.detach()[mine].requires_grad_()
        outputs = model(part)
        joined = plain(whole)
        (outputs * slope[mine]).sum().backward()
        (joined * slope).sum().backward()
        found += [
            outputs,
            part.grad,
            *summed(communicator, [p.grad for p in model.parameters()]),
            *buffers(model),
        ]
        expected += [
            joined[mine],
            whole.grad[mine],
            *[p.grad.clone() for p in plain.parameters()],
            *buffers(plain),
        ]
    if layer != "without_running":
        found, expected = [*found, model.eval()(part)], [*expected, plain.eval()(whole)[mine]]
    # to the last bit
    same = len(set(communicator.allgather_object(str([b.tolist() for b in buffers(model)])))) == 1
    return apart(found, expected) if same else float("inf")


def far_from_zero(communicator: Communicator) -> float:
    """fp32 around 1000 with deviation 1, each rank around another mean: sums of squares would lose
    the variance."""
    torch.manual_seed(8)
    whole = (
        torch.randn(16 * communicator.size, 2, 3, 3)
        + 1000
        + torch.arange(16 * communicator.size).div(16, rounding_mode="floor").view(-1, 1, 1, 1)
    )
    model = use_norm(nn.BatchNorm2d(2, momentum=1.0), "sync", 1, "averaged", communicator)
    plain = nn.BatchNorm2d(2, momentum=1.0).double()
    mine = slice(16 * communicator.rank, 16 * communicator.rank + 16)
    return apart(
        [model(whole[mine]).double(), *buffers(model)],
        [plain(whole.double())[mine], *buffers(plain)],
    )


def small_net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(9)
    return convnet.build("convnet", (8, 8, 1), 5, widths=(4, 6, 8)).to(dtype)


def images(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 1, 8, 8, dtype=dtype), torch.randint(5, (count,))


def learn(model: nn.Module, x: torch.Tensor, y: torch.Tensor, batch: int) -> torch.Tensor:
    """Backward from the loss summed over these samples, as a share of the global batch; the
    logits."""
    logits = model(x)
    (functional.cross_entropy(logits, y, reduction="sum") / batch).backward()
    return logits


def sync_net(shares: str, dtype: torch.dtype, kind: str, communicator: Communicator) -> float:
    """A network whose gradients are reduced in backward, as its norms are: two passes, the second
    of them the last of the step."""
    plain = small_net(dtype)
    model = use_norm(copy.deepcopy(plain), "sync", 1, "averaged", communicator)
    named = list(model.named_parameters())
    total, mine = cut(communicator, SHARES[shares])
    logits = []
    joined = []

    def one_pass(batch: Sized, divisor: int, is_last: bool) -> Sums:
        x, y = images(total, dtype)
        logits.append(learn(model, x[mine], y[mine], divisor))
        joined.append(learn(plain, x, y, divisor)[mine])
        return zero_sums(("loss", "right"))

    strategy = (
        HorovodOptimizer(named, communicator)
        if kind == "optimizer"
        else Buckets(named, communicator, 256, HostStopwatch())
    )
    strategy.wrap(model, torch.optim.SGD(model.parameters(), lr=0.0))
    strategy.run([range(0), range(0)], total, one_pass)
    strategy.reduce()
    found = [*logits, *[p.grad for p in model.parameters()], *buffers(model)]
    return apart(found, [*joined, *[p.grad for p in plain.parameters()], *buffers(plain)])


def ghosts_of_ranks(dtype: torch.dtype, per_rank: int, communicator: Communicator) -> float:
    """`size` ranks with `per_rank` ghosts of 32 each are one rank with all these ghosts: outputs,
    summed gradients, mean statistics."""
    alone = use_norm(small_net(dtype), "ghost", 32, "averaged", SingleProcessCommunicator())
    model = use_norm(small_net(dtype), "ghost", 32, "averaged", communicator)
    samples = 32 * per_rank
    total, mine = cut(communicator, lambda rank, size: samples)
    found = []
    expected = []
    for _ in range(2):
        x, y = images(total, dtype)
        found.append(learn(model, x[mine], y[mine], total))
        expected.append(learn(alone, x, y, total)[mine])
    # sync_buffers() averages; the counts of updates are equal on all ranks
    running = [b / communicator.size for b in buffers(model)]
    found += [
        *summed(communicator, [p.grad for p in model.parameters()]),
        *summed(communicator, running),
    ]
    return apart(found, [*expected, *[p.grad for p in alone.parameters()], *buffers(alone)])


def one_value_in_all(communicator: Communicator) -> float:
    """One sample of one value on the last rank, none elsewhere: every rank says what torch says,
    and none waits."""
    model = use_norm(nn.BatchNorm1d(3), "sync", 1, "averaged", communicator)
    try:
        model(torch.zeros(int(communicator.rank == communicator.size - 1), 3))
    except ValueError as error:
        return (
            0.0
            if "Expected more than 1 value per channel when training" in str(error)
            else float("inf")
        )
    return float("inf")


def cases(engine: str) -> dict[str, Case]:
    kinds = {"fp64": torch.float64, "fp32": torch.float32}
    found: dict[str, Case] = {}
    for name, dtype in kinds.items():
        found |= {
            f"layer-{layer}-{s}-{name}": partial(sync_layer, layer, s, dtype)
            for layer in LAYERS
            for s in SHARES
        }
        for strategy in ("buckets", *(["optimizer"] * (engine == "horovod"))):
            found |= {
                f"net-{strategy}-{s}-{name}": partial(sync_net, s, dtype, strategy) for s in SHARES
            }
        found |= {
            f"ghosts-{per_rank}-{name}": partial(ghosts_of_ranks, dtype, per_rank)
            for per_rank in (1, 2)
        }
    return found | {"far_from_zero-fp32": far_from_zero, "one_value-fp32": one_value_in_all}


def apart_by_case(communicator: Communicator, engine: str) -> dict[str, float]:
    """The largest difference from one process."""
    warnings.simplefilter("error")
    return {case: run(communicator) for case, run in cases(engine).items()}
