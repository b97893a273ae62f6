"""Dense layers whose neurons are partitioned over ranks, the exchange of their rows, and the turns
in which rows are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from hvdtrain.comm.communicator import Communicator, part_of
from hvdtrain.core.arrays import Cut
from hvdtrain.errors import UserError

Sizes = Sequence[int]  # number of rows of each rank, the same on all ranks; some may be 0
Wait = Callable[[], torch.Tensor]
# layers that a rank can apply to its neurons without the others
ELEMENTWISE = (
    *(
        nn.ReLU,
        nn.LeakyReLU,
        nn.ELU,
        nn.SELU,
        nn.GELU,
        nn.SiLU,
        nn.Sigmoid,
        nn.Tanh,
        nn.Softplus,
        nn.Hardtanh,
        nn.Identity,
    ),
    *(nn.Dropout, nn.AlphaDropout),
)


class ColumnParallelChain:
    """Linear layers partitioned by output features with part_of(): if they do not divide evenly,
    the first ranks have one more neuron.

    A rank has rows of the whole weights, with their biases, in the modules of the chain itself, so
    that parameters keep their names. Elementwise layers are applied to a rank's neurons before all
    neurons are gathered; for dropout, each rank needs different random numbers. `lead` contains the
    modules before the first linear layer, which are replicated.
    """

    def __init__(self, chain: nn.Module, exchange: AdjointExchange, name: str, where: str) -> None:
        """Cuts `chain`, the part `name` of a model: one nn.Linear, or an nn.Sequential. Raises
        UserError for other layers in it."""
        layers = list(_flattened(name, chain))
        first = next(
            (i for i, (_, layer) in enumerate(layers) if isinstance(layer, nn.Linear)), None
        )
        if first is None:
            what = f"{name!r}, the dense part, has no linear layer"
            raise UserError(
                what, where, "dense_part = the name of an nn.Linear, or of an nn.Sequential of them"
            )
        for path, layer in layers[first:]:
            if not isinstance(layer, (nn.Linear, *ELEMENTWISE)):
                what = f"{path} is {type(layer).__name__}, which cannot be divided by neurons"
                raise UserError(
                    what,
                    where,
                    "a dense part of nn.Linear and elementwise layers (nn.ReLU, nn.Dropout ...), "
                    "or leave it out",
                )
        linear = [layer for _, layer in layers[first:] if isinstance(layer, nn.Linear)]
        if len(set(linear)) < len(linear):
            raise UserError(
                f"{name!r} contains the same linear layer twice",
                where,
                "use separate layers, or leave it out",
            )
        self.lead = nn.Sequential(*(layer for _, layer in layers[:first]))
        self._layers = [layer for _, layer in layers[first:]]
        self._exchange = exchange
        self.inputs = linear[0].in_features
        self.outputs = linear[-1].out_features
        self.names = [path for path, layer in layers[first:] if isinstance(layer, nn.Linear)]
        # numbers sent for each sample to each other rank in each pass
        self.sent_numbers = self.inputs + sum(layer.out_features for layer in linear)
        self._widths = [
            [_length(layer.out_features, rank, exchange.size) for rank in range(exchange.size)]
            for layer in linear
        ]
        self.cuts = {p: cut for layer in linear for p, cut in _keep_part(layer, exchange).items()}
        self.parameters = list(self.cuts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps x (n, inputs), the same on all ranks, to (n, outputs) on all ranks. A collective,
        and so is its backward pass."""
        cut = 0  # number of completed linear layers
        for layer in self._layers:
            if not isinstance(layer, nn.Linear):
                x = layer(x)  # (n, own neurons)
                continue
            x = self._all_neurons(x, cut - 1) if cut else x
            # layer() would be the whole chain again if the chain is one layer
            x = nn.functional.linear(x, layer.weight, layer.bias)
            cut += 1
        return self._all_neurons(x, cut - 1)

    def _all_neurons(self, own: torch.Tensor, number: int) -> torch.Tensor:
        # 16 bits under autocast, which not every engine can sum
        own = own.to(self.parameters[0].dtype)
        if (
            self._exchange.size == 1
        ):  # a gathered tensor is transposed, with which some processors round otherwise
            return own
        whole: torch.Tensor = GatherColumns.apply(
            own, self._exchange, self._widths[number], f"dense.{number}.neurons"
        )
        return whole


def _flattened(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the layers of nested sequences in order, with their names."""
    if type(module).forward is not nn.Sequential.forward:
        yield path, module
        return
    for name, child in module._modules.items():  # includes a module that occurs twice
        if child is not None:
            yield from _flattened(f"{path}.{name}", child)


def _length(outputs: int, rank: int, size: int) -> int:
    part = part_of(outputs, rank, size)
    return part.stop - part.start


@torch.no_grad()
def _keep_part(layer: nn.Linear, exchange: AdjointExchange) -> dict[nn.Parameter, Cut]:
    """Reduces the layer's parameters to this rank's part; returns which part it is."""
    cut = Cut(0, 1, exchange.size, exchange.rank, layer.out_features)
    cuts = {}
    for name, p in list(layer.named_parameters()):
        part = nn.Parameter(cut.take(p.detach()).clone(), p.requires_grad)
        setattr(layer, name, part)
        cuts[part] = cut
    layer.out_features = _length(layer.out_features, exchange.rank, exchange.size)
    return cuts


class AdjointExchange:
    """A pair of adjoint collectives: start_gather() and start_sum() are each other's backward pass
    if the loss is the sum over ranks.

    If several ranks have rows, each sends as many as the rank with the most, so that all parts of a
    collective have the same size. If only one has rows, the collectives are a broadcast from it and
    a reduction to it. Every rank calls both with the same sizes and names. They block unless the
    engine is "asynchronous".
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.rank = communicator.rank
        self.size = communicator.size

    def _ready(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the tensor without a gradient, in host memory unless the engine takes GPU
        memory."""
        return x.detach() if "device_memory" in self._communicator.features else x.detach().cpu()

    def rows_of_ranks(self, own: int) -> list[int]:
        """Returns the number of rows of each rank. A collective."""
        return [
            int(rows)
            for rows in self._communicator.allgather(np.array([own]), "dense.rows_of_ranks")
        ]

    def start_gather(self, own: torch.Tensor, sizes: Sizes, name: str) -> Wait:
        """Gathers own (sizes[rank], ...) to (sum of sizes, ...), the rows of all ranks in rank
        order. `own` is not changed."""
        assert len(own) == sizes[self.rank], (own.shape, sizes)
        device = own.device
        sent = self._ready(own)
        if (only := _only(sizes)) is not None:
            rows = (
                sent.contiguous()
                if only == self.rank
                else sent.new_empty(sizes[only], *sent.shape[1:])
            )
            handle = self._communicator.start_broadcast(rows, name, only)
            return lambda: handle.wait().to(device)
        parts = sent.new_empty(self.size, max(sizes), *sent.shape[1:])
        parts[self.rank, : len(sent)] = sent
        handle = self._communicator.start_spread(parts.view(-1), name)
        return lambda: _without_padding(handle.wait().view(parts.shape), sizes).to(device)

    def start_sum(self, x: torch.Tensor, sizes: Sizes, name: str) -> Wait:
        """Reduces x (sum of sizes, ...) to (sizes[rank], ...), the sum over ranks of this rank's
        rows. `x` is not changed."""
        assert len(x) == sum(sizes), (x.shape, sizes)
        device = x.device
        sent = self._ready(x)
        if (only := _only(sizes)) is not None:
            handle = self._communicator.start_reduce(
                sent.clone(memory_format=torch.contiguous_format), name, only
            )
            return lambda: handle.wait()[: sizes[self.rank]].to(device)
        parts = sent.new_zeros(self.size, max(sizes), *sent.shape[1:])
        for part, rows in zip(parts, sent.split(list(sizes)), strict=True):
            part[: len(rows)] = rows
        handle = self._communicator.start_reduce_scatter(parts.view(-1), name)
        return lambda: handle.wait().view(parts.shape[1:])[: sizes[self.rank]].to(device)


def _only(sizes: Sizes) -> int | None:
    """Returns the only rank with rows; None if there are several."""
    holders = [rank for rank, rows in enumerate(sizes) if rows]
    return holders[0] if len(holders) == 1 else None


def _without_padding(parts: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Removes padding: (ranks, most rows, ...) -> (sum of sizes, ...)."""
    if min(sizes) == max(sizes):
        return parts.flatten(0, 1)
    return torch.cat([part[:rows] for part, rows in zip(parts, sizes, strict=True)])


class GatherColumns(torch.autograd.Function):
    """Gathers own (n, widths[rank]) to (n, sum of widths) on all ranks. Backward returns the sum
    over ranks of the gradient of the rank's columns."""

    @staticmethod
    def forward(
        ctx: Any, own: torch.Tensor, exchange: AdjointExchange, widths: Sizes, name: str
    ) -> torch.Tensor:
        ctx.exchange = exchange
        ctx.widths = widths
        ctx.name = name
        return exchange.start_gather(own.T, widths, name)().T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (
            ctx.exchange.start_sum(gradient.T, ctx.widths, f"{ctx.name}.gradient")().T,
            None,
            None,
            None,
        )


Scheme = Literal["a", "b", "c"]
Turn = list[range]  # the rows that each rank contributes


def rows_of_turns(scheme: Scheme, rows: list[int]) -> list[Turn]:
    """Returns the turns of a step with one update; rows[rank] is a rank's number of rows. Empty
    turns are skipped.

    a: one turn with all rows; b: one turn for each rank, with its rows; c: as many turns as ranks,
    with 1 / ranks of each rank's rows (Krizhevsky 2014, arXiv:1404.5997, section 3, forward pass,
    step 3).
    """
    size = len(rows)
    if scheme == "a":
        turns = [[range(own) for own in rows]]
    elif scheme == "b":
        turns = [
            [range(own if rank == turn else 0) for rank, own in enumerate(rows)]
            for turn in range(size)
        ]
    else:
        turns = [[range(own)[part_of(own, turn, size)] for own in rows] for turn in range(size)]
    return [turn for turn in turns if any(turn)]


def rows_of_updates(scheme: Scheme, rows: list[int], updates: int) -> list[Turn]:
    """Returns the `updates` turns of a step, except empty ones; each ends with an update of the
    dense layers.

    The rows of all ranks, in rank order, are one batch. A turn has the same rows of it on any
    number of ranks. In b they are contiguous: the rows of one rank if there are as many updates as
    ranks, with equal shares. In c a turn has every `updates`-th row, so that all ranks contribute.
    """
    assert scheme != "a", "a has one turn"
    turns = []
    for turn in range(updates):
        part = part_of(sum(rows), turn, updates)
        first = 0
        turns.append(list[range]())
        for own in rows:
            if scheme == "b":
                turns[-1].append(range(own)[max(part.start - first, 0) : max(part.stop - first, 0)])
            else:
                turns[-1].append(range(own)[(turn - first) % updates :: updates])
            first += own
    return [turn for turn in turns if any(turn)]


def turn_learning_rate(lr: float, samples: int, batch: int) -> float:
    """Returns the learning rate of the dense part in a turn of `samples` samples: `lr`, the rate of
    the whole batch, in proportion.

    Krizhevsky 2014, section 5: in theory it is the square root of the ratio of the batches, but the
    ratio itself worked best, with unchanged momentum and weight decay.
    """
    return lr * samples / batch
