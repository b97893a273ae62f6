"""Dense layers cut over ranks, schemes a, b and c: {case: largest difference to one process}, on
the ranks.

The differences are relative, of the losses and of all gradients of three steps of SGD with momentum
in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy

from hvdtrain.comm.communicator import Buffer, Communicator, CompletedHandle, Handle, part_of
from hvdtrain.extras.dense.cut import Scheme, turn_learning_rate
from hvdtrain.extras.dense.hybrid import HybridModel
from hvdtrain.frameworks.stopwatch import HostStopwatch
from hvdtrain.frameworks.torch.models import alexnet, convnet
from hvdtrain.frameworks.torch.parallel.buckets import Buckets

CLASSES = 10  # which 4 ranks do not divide
SCHEMES: tuple[Scheme, ...] = ("a", "b", "c")
LR = 0.3
MOMENTUM = 0.9
WEIGHT_DECAY = 0.01
UPDATES = {"a": 1, "b": 3, "c": 3}  # of the dense part in a step of the variable batch


class Step(NamedTuple):
    """What a step came to: the mean loss of the global batch, and the gradients by the parameters'
    names."""

    loss: float
    gradients: dict[str, torch.Tensor]


def model_of(name: str) -> torch.nn.Module:
    torch.manual_seed(7)
    if name == "alexnet":
        return alexnet.build(
            "alexnet", (16, 16, 2), CLASSES, widths=(4, 5, 4, 3, 6), dense=(13, 9), dropout=0.0
        ).double()
    # 4 ranks have 3 neurons
    dense = {"convnet": (11,), "convnet fc": (), "convnet narrow": (3,)}[name]
    return convnet.build(
        "convnet", (8, 8, 2), CLASSES, widths=(4, 6), norm=False, dense=dense
    ).double()


def shares(size: int) -> list[list[int]]:
    """Samples of each rank in each step: even, uneven, and some ranks or all but one without
    any."""
    return [
        [4] * size,
        [3 + 2 * rank for rank in range(size)],
        [0 if rank % 2 == 0 else 5 for rank in range(size)],
    ]


def samples(name: str, count: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    side = 16 if name == "alexnet" else 8
    x = torch.randn(count, 2, side, side, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (count,), generator=generator)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def one_process(name: str, size: int) -> Iterator[Step]:
    model = model_of(name)
    optimizer = optimizer_of(model.parameters())
    for step, rows in enumerate(shares(size)):
        x, y = samples(name, sum(rows), step)
        loss = cross_entropy(model(x), y)
        loss.backward()
        yield Step(float(loss.detach()), gradients(model))
        optimizer.step()
        optimizer.zero_grad()


def on_ranks(
    name: str, scheme: Scheme, communicator: Communicator, faulty: Communicator | None = None
) -> Iterator[Step]:
    """Computes like training: forward of a rank's own samples, backward of their losses / global
    batch, other gradients summed."""
    model = model_of(name)
    wholes = [p.clone() for p in model.parameters()]
    hybrid = HybridModel(model, faulty or communicator, scheme)
    for p, first in zip(model.parameters(), wholes, strict=True):
        assert torch.equal(
            p, hybrid.cuts()[p].take(first).view(p.shape) if p in hybrid.cuts() else first
        )
    optimizer = optimizer_of(model.parameters())
    for step, rows in enumerate(shares(communicator.size)):
        x, y = own_part(samples(name, sum(rows), step), rows, communicator.rank)
        loss = cross_entropy(hybrid(x), y, reduction="none").sum() / sum(rows)
        loss.backward()
        sum_others(hybrid, communicator)
        yield Step(
            over_ranks(float(loss.detach()), communicator),
            whole(gradients(model), hybrid, communicator),
        )
        optimizer.step()
        optimizer.zero_grad()


def in_buckets(name: str, scheme: Scheme, communicator: Communicator) -> Iterator[Step]:
    """Like on_ranks(), in two micro-batches, and with the strategy that sums the other gradients in
    overlapped buckets."""
    model = model_of(name)
    hybrid = HybridModel(model, communicator, scheme)
    dense = {id(p) for p in hybrid.dense_parameters()}
    strategy = Buckets(
        [(n, p) for n, p in model.named_parameters() if id(p) not in dense],
        communicator,
        300,
        HostStopwatch(),
    )
    optimizer = optimizer_of(model.parameters())

    def one_pass(
        micro: tuple[torch.Tensor, torch.Tensor], divisor: int, is_last: bool
    ) -> dict[str, Any]:
        loss = cross_entropy(hybrid(micro[0]), micro[1], reduction="none").sum() / divisor
        loss.backward()
        return {"loss": loss.detach()}

    for step, rows in enumerate(shares(communicator.size)):
        x, y = own_part(samples(name, sum(rows), step), rows, communicator.rank)
        half = len(x) // 2
        sums = strategy.run([(x[:half], y[:half]), (x[half:], y[half:])], sum(rows), one_pass)
        strategy.reduce()
        yield Step(
            over_ranks(float(sums["loss"]), communicator),
            whole(gradients(model), hybrid, communicator),
        )
        optimizer.step()
        optimizer.zero_grad()


def own_part(
    batch: tuple[torch.Tensor, torch.Tensor], rows: list[int], rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    own = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
    return batch[0][own], batch[1][own]


def over_ranks(number: float, communicator: Communicator) -> float:
    return float(communicator.allreduce(torch.tensor([number], dtype=torch.float64), "loss"))


def sum_others(hybrid: HybridModel, communicator: Communicator) -> None:
    """Sums the gradients of all parameters except the dense ones."""
    dense = {id(p) for p in hybrid.dense_parameters()}
    for name, p in hybrid.model.named_parameters():
        if id(p) not in dense:
            p.grad = communicator.allreduce(
                torch.zeros_like(p) if p.grad is None else p.grad, f"gradient.{name}"
            )


def whole(
    found: dict[str, torch.Tensor], hybrid: HybridModel, communicator: Communicator
) -> dict[str, torch.Tensor]:
    """The parts of the dense parameters put together."""
    dense = {id(p) for p in hybrid.dense_parameters()}
    parameters = dict(hybrid.model.named_parameters())
    return {
        name: communicator.allgather(g, f"whole.{name}") if id(parameters[name]) in dense else g
        for name, g in found.items()
    }


def largest_difference(found: Iterator[Step], expected: Iterator[Step]) -> float:
    """Returns the largest relative difference; NaN if a number is not finite."""
    gaps = []
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.gradients.keys() == theirs.gradients.keys(), (
            ours.gradients.keys(),
            theirs.gradients.keys(),
        )
        gaps.append(abs(ours.loss - theirs.loss) / theirs.loss)
        gaps += [
            float((g - theirs.gradients[name]).norm() / theirs.gradients[name].norm())
            for name, g in ours.gradients.items()
        ]
    return float(torch.tensor(gaps).max())  # which keeps a NaN


def one_process_in_turns(name: str, scheme: Scheme, size: int) -> Iterator[Step]:
    """Variable batch: after each turn the dense part steps by the mean over its samples; the
    gradient of the others is added up.

    Yields the dense parameters' values after the step instead of their gradients.
    """
    model: Any = model_of(name)
    dense = list(dict(model.named_modules())[model.dense_part].parameters())
    others = [p for p in model.parameters() if all(p is not d for d in dense)]
    optimizer = optimizer_of(others)
    dense_optimizer = optimizer_of(dense)
    for step, rows in enumerate(shares(size)):
        (all_x, all_y), total = samples(name, sum(rows), step), 0.0
        order = torch.arange(len(all_x))
        updates = UPDATES[scheme]
        for turn in (
            [order[turn::updates] for turn in range(updates)]
            if scheme == "c"
            else order.tensor_split(updates)
        ):
            x = all_x[turn]
            y = all_y[turn]
            loss = cross_entropy(model(x), y)
            share = len(x) / sum(rows)
            found = torch.autograd.grad(loss, [*dense, *others])
            for p, g in zip([*dense, *others], found, strict=True):
                p.grad = (
                    g
                    if any(p is d for d in dense)
                    else g * share + (0 if p.grad is None else p.grad)
                )
            dense_step(dense_optimizer, len(x), sum(rows))
            total += float(loss.detach()) * share
        yield Step(
            total,
            {
                n: p.grad if p.grad is not None else p.detach().clone()
                for n, p in model.named_parameters()
            },
        )
        optimizer.step()
        optimizer.zero_grad()


def dense_step(optimizer: torch.optim.Optimizer, samples: int, batch: int) -> None:
    optimizer.param_groups[0]["lr"] = turn_learning_rate(LR, samples, batch)
    optimizer.step()
    optimizer.zero_grad()


def on_ranks_in_turns(name: str, scheme: Scheme, communicator: Communicator) -> Iterator[Step]:
    """Yields the same as one_process_in_turns(), computed on the ranks."""
    model = model_of(name)
    hybrid = HybridModel(model, communicator, scheme)
    dense = hybrid.dense_parameters()
    others = [p for p in model.parameters() if all(p is not d for d in dense)]
    optimizer = optimizer_of(others)
    dense_optimizer = optimizer_of(dense)
    for step, rows in enumerate(shares(communicator.size)):
        x, y = own_part(samples(name, sum(rows), step), rows, communicator.rank)
        total = 0.0
        for turn in hybrid.turns(x, UPDATES[scheme]):
            loss = cross_entropy(turn.outputs, y[turn.rows], reduction="none").sum()
            (loss / turn.samples).backward()
            dense_step(dense_optimizer, turn.samples, sum(rows))
            total += float(loss.detach()) / sum(rows)
        sum_others(hybrid, communicator)
        found = {
            n: p.grad if p.grad is not None else p.detach().clone()
            for n, p in model.named_parameters()
        }
        yield Step(over_ranks(total, communicator), whole(found, hybrid, communicator))
        optimizer.step()
        optimizer.zero_grad()


class NotSummed:
    """A communicator that gives back a rank's own rows of the gradient of gathered activations,
    without what other ranks have of it."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def start_reduce(self, x: Buffer, name: str, root: int = 0) -> Handle:
        return (
            CompletedHandle(x)
            if name.startswith("dense.rows")
            else self._communicator.start_reduce(x, name, root)
        )

    def start_reduce_scatter(self, x: Buffer, name: str) -> Handle:
        if not name.startswith("dense.rows"):
            return self._communicator.start_reduce_scatter(x, name)
        return CompletedHandle(x[part_of(len(x), self._communicator.rank, self._communicator.size)])


def evaluated(name: str, scheme: Scheme, communicator: Communicator) -> float:
    """Outputs without gradients, of the uneven step."""
    rows = shares(communicator.size)[1]
    x, _ = samples(name, sum(rows), 1)
    hybrid = HybridModel(model_of(name), communicator, scheme).eval()
    mine = own_part((x, x), rows, communicator.rank)[0]
    with torch.no_grad():
        found = hybrid(mine)
        expected = model_of(name)(mine)
    assert not found.requires_grad
    return float((found - expected).norm() / expected.norm())


def by_case(communicator: Communicator) -> dict[str, float]:
    size = communicator.size
    found: dict[str, float] = {}
    for scheme in SCHEMES:
        for name in ("convnet", "convnet fc", "convnet narrow", "alexnet"):
            found[f"{name} {scheme}"] = largest_difference(
                on_ranks(name, scheme, communicator), one_process(name, size)
            )
        found[f"in buckets {scheme}"] = largest_difference(
            in_buckets("convnet", scheme, communicator), one_process("convnet", size)
        )
        found[f"evaluated {scheme}"] = evaluated("alexnet", scheme, communicator)
        in_turns = on_ranks_in_turns("alexnet", scheme, communicator)
        found[f"variable batch {scheme}"] = largest_difference(
            in_turns, one_process_in_turns("alexnet", scheme, size)
        )
        faulty: Any = NotSummed(communicator)
        found[f"faulty {scheme}"] = largest_difference(
            on_ranks("convnet", scheme, communicator, faulty), one_process("convnet", size)
        )
    return found
