"""HybridModel and its strategy: data parallel in the convolutions, model parallel in the dense
layers.

Source: Krizhevsky 2014, arXiv:1404.5997, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.mesh import Mesh
from hvdtrain.comm.staging import KINDS
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Cut
from hvdtrain.errors import UserError
from hvdtrain.extras.dense.cut import (
    AdjointExchange,
    ColumnParallelChain,
    Scheme,
    Turn,
    Wait,
    rows_of_turns,
    rows_of_updates,
)
from hvdtrain.extras.dense.keys import DenseKeys
from hvdtrain.frameworks.stopwatch import Stopwatch
from hvdtrain.frameworks.torch.parallel.zero_1_and_2 import ZeroStrategy, of_shards, total_over
from hvdtrain.frameworks.torch.strategy import (
    Around,
    NamedParameters,
    Shard,
    Wrapped,
    fill_missing,
    nccl_ranks,
)

Context = Callable[[], AbstractContextManager[Any]]


class HybridModel(nn.Module):
    """A model whose `dense_part`, its last submodule, is partitioned over ranks; the rest is
    replicated.

    forward() returns the outputs of a rank's samples. Every rank runs backward from the sum of its
    losses. That computes complete gradients for the rank's part of the dense layers, and for all
    other parameters the gradients of its samples, which are summed over ranks as usual. Both passes
    are collectives, also on ranks without samples. Sums over ranks of losses and metrics count each
    sample once, because a rank only has the outputs of its samples.
    """

    def __init__(
        self,
        model: nn.Module,
        communicator: Communicator,
        scheme: Scheme,
        where: str = "parallel.dense",
    ) -> None:
        """Partitions the dense part of `model`, whose weights are the same on all ranks. Raises
        UserError if it has no suitable dense part."""
        super().__init__()
        name = getattr(model, "dense_part", None)
        chain = dict(model.named_modules()).get(name) if isinstance(name, str) else None
        if chain is None:
            what = (
                f"{type(model).__name__} has no attribute `dense_part` that names its last "
                "submodule"
            )
            raise UserError(
                what, where, "a model that has one: convnet, alexnet; or leave parallel.dense out"
            )
        self.model = model
        self._dense = DenseTurns(chain, str(name), communicator, scheme, where)
        chain.forward = self._dense.__call__  # the names of its parameters stay as they are

    def dense_parameters(self) -> list[nn.Parameter]:
        """Returns the rank's parts, in the order of the layers."""
        return self._dense.layers.parameters

    def cuts(self) -> dict[nn.Parameter, Cut]:
        """Returns which part of the whole each of dense_parameters() is."""
        return self._dense.layers.cuts

    def summary(self, batch: int | None) -> str:
        """Returns "dense.fc1, dense.fc cut by outputs over 2 ranks, ...", with the data that a
        rank sends in a step of `batch` samples over all ranks."""
        layers = self._dense.layers
        size = self._dense.exchange.size
        cut = (
            f"{', '.join(layers.names)} cut by outputs over {size} ranks, scheme "
            f"{self._dense.scheme}"
        )
        if batch is None:
            return cut
        kb = (
            2
            * (size - 1)
            * layers.sent_numbers
            * (batch / size)
            * layers.parameters[0].element_size()
            / 1e3
        )
        sent = f"{kb / 1e3:.3g} MB" if kb >= 1e3 else f"{kb:.3g} kB"
        return f"{cut}: {sent} of activations a step from each rank"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes x (n, ...) -> (n, outputs); n may be 0 and differ between ranks. Without
        samples, the convolutions are not called."""
        if not len(x):
            # backward is a collective
            return self._dense.outputs(
                self._dense.no_rows().requires_grad_(torch.is_grad_enabled())
            )
        return self._dense.passed_by(self.model, x)

    def turns(
        self, x: torch.Tensor, updates: int, context: Context = nullcontext
    ) -> Iterator[OwnTurn]:
        """The variable batch (section 3.2): the dense part may be updated after each turn, the
        convolutions after all of them.

        For each turn, the caller runs backward on every rank from the sum of the losses of the
        turn's outputs / OwnTurn.samples. Then the dense parameters have the gradients of the mean
        over the turn, and the caller may update and zero them. After the last turn, the
        convolutions have the gradient of local losses / the samples of the step on all ranks. It is
        not the gradient of a single model, as the paper notes, because each turn used different
        dense weights. A turn keeps activations until it is over.

        `context`: context of each part of the forward pass, such as autocast, which keeps 16-bit
        copies of weights while it is active.
        """
        with context():
            own = self._inputs_of_dense(x)
        turns = self._dense.turns_of(len(own), updates)
        waits = []
        batch = sum(len(rows) for turn in turns for rows in turn)
        for turn in self._dense.gathered(own, turns, needs_gradient=True):
            with context():
                outputs = self._dense.layers(turn.x)[turn.own]
            yield OwnTurn(turn.rows, outputs, len(turn.x))
            assert turn.x.grad is not None, "the caller goes backward in each turn"
            waits.append(
                (
                    turn.rows,
                    turn.start_sum(self._dense.exchange, turn.x.grad * (len(turn.x) / batch)),
                )
            )
        gradient = torch.empty_like(own)
        for rows, wait in waits:
            gradient[rows] = wait()
        if own.requires_grad:
            own.backward(gradient)

    def _inputs_of_dense(self, x: torch.Tensor) -> torch.Tensor:
        """Returns (n, features), with the graph of the convolutions."""
        if not len(x):
            return self._dense.no_rows()
        self._dense.returns_inputs = True
        try:
            inputs = self._dense.passed_by(self.model, x)
        finally:
            self._dense.returns_inputs = False
        return inputs


class OwnTurn(NamedTuple):
    """The outputs of a rank in one turn of HybridModel.turns()."""

    rows: slice  # the rank's samples in this turn; may be empty
    outputs: torch.Tensor  # (n, outputs) of those samples
    samples: int  # samples of all ranks in this turn


class DenseTurns:
    """Replaces the dense part of a model: local rows (n, ...) -> outputs (n, outputs). All ranks
    compute all rows, in turns."""

    def __init__(
        self, chain: nn.Module, name: str, communicator: Communicator, scheme: Scheme, where: str
    ) -> None:
        self.exchange = AdjointExchange(communicator)
        self.scheme = scheme
        self.layers = ColumnParallelChain(chain, self.exchange, name, where)
        # return the inputs of the partitioned layers instead of outputs
        self.returns_inputs = False
        self._name = name
        self._where = where
        self._calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the outputs. A collective, as is its backward pass, also on ranks without rows.
        Raises UserError for a second call in a pass."""
        self._calls += 1
        self._check_calls(at_least=0)
        own = self.layers.lead(x).to(self.layers.parameters[0].dtype)
        return own if self.returns_inputs else self.outputs(own)

    def passed_by(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Runs the whole model. Raises UserError if it does not call its dense part exactly once,
        because other ranks do."""
        self._calls = 0
        features: torch.Tensor = model(x)
        self._check_calls(at_least=1)
        return features

    def _check_calls(self, at_least: int) -> None:
        if not at_least <= self._calls <= 1:
            times = "twice" if self._calls else "not"
            what = (
                f"a forward pass of the model calls {self._name!r} {times}, but all ranks compute "
                "it together exactly once"
            )
            raise UserError(
                what, self._where, "a forward() that calls it once; or leave parallel.dense out"
            )

    def outputs(self, own: torch.Tensor) -> torch.Tensor:
        """Computes own (n, inputs) -> (n, outputs)."""
        outputs: torch.Tensor = _InTurns.apply(
            own, self, torch.is_grad_enabled(), *self.layers.parameters
        )
        return outputs

    def no_rows(self) -> torch.Tensor:
        """Returns an empty batch, (0, inputs)."""
        return self.layers.parameters[0].new_zeros(0, self.layers.inputs)

    def turns_of(self, own: int, updates: int = 1) -> list[Turn]:
        """Returns the turns of a step in which this rank has `own` rows and the layers have
        `updates` updates. A collective."""
        rows = self.exchange.rows_of_ranks(own)
        return (
            rows_of_turns(self.scheme, rows)
            if updates == 1
            else rows_of_updates(self.scheme, rows, updates)
        )

    def gathered(
        self, own: torch.Tensor, turns: list[Turn], needs_gradient: bool
    ) -> Iterator[GatheredTurn]:
        """Yields the rows of each turn from own (n, inputs). The next turn's rows are sent while
        the caller computes."""
        rank = self.exchange.rank
        own = own.detach()
        wait = self._start(0, own, turns) if turns else None
        for number, turn in enumerate(turns):
            assert wait is not None
            x = wait().requires_grad_(needs_gradient)
            wait = self._start(number + 1, own, turns) if number + 1 < len(turns) else None
            first = sum(map(len, turn[:rank]))
            yield GatheredTurn(
                number,
                list(map(len, turn)),
                x,
                slice(first, first + len(turn[rank])),
                _as_slice(turn[rank]),
            )

    def _start(self, number: int, own: torch.Tensor, turns: list[Turn]) -> Wait:
        turn = turns[number]
        return self.exchange.start_gather(
            own[_as_slice(turn[self.exchange.rank])], list(map(len, turn)), f"dense.rows.{number}"
        )


class GatheredTurn(NamedTuple):
    """The rows of one turn, on all ranks."""

    number: int
    sizes: list[int]  # rows of each rank
    x: torch.Tensor  # (sum of sizes, features), a leaf
    own: slice  # slice of this rank's rows in x
    rows: slice  # their positions among all rows of this rank; may be every third one

    def start_sum(self, exchange: AdjointExchange, gradient: torch.Tensor) -> Wait:
        """Starts to send the gradient of x back to the ranks of its rows."""
        return exchange.start_sum(gradient, self.sizes, f"dense.rows.{self.number}.gradient")


def _as_slice(rows: range) -> slice:
    return slice(rows.start, rows.stop, rows.step)


class _InTurns(torch.autograd.Function):
    """The autograd function of all turns, forward and backward.

    It is one node of the graph, so that the collectives of all turns have the same order on all
    ranks. The gradient of a turn's rows is sent while the next turn is computed. With every scheme,
    the layers keep activations of all rows for backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        own: torch.Tensor,
        dense: DenseTurns,
        needs_gradient: bool,
        *parameters: nn.Parameter,
    ) -> torch.Tensor:
        ctx.dense = dense
        ctx.parameters = parameters
        ctx.turns = []
        outputs = [own.new_zeros(0, dense.layers.outputs)]
        for turn in dense.gathered(own, dense.turns_of(len(own)), needs_gradient):
            with torch.set_grad_enabled(needs_gradient):
                output = dense.layers(turn.x)[turn.own]
            outputs.append(output.detach())
            if needs_gradient:
                ctx.turns.append((turn, output))
        return torch.cat(outputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        trained = [p for p in ctx.parameters if p.requires_grad]
        sums = [torch.zeros_like(p) for p in trained]
        waits = [ctx.dense.no_rows]
        while ctx.turns:  # frees the activations of each turn
            turn, output = ctx.turns.pop(0)
            of_rows, *of_parameters = torch.autograd.grad(
                output, [turn.x, *trained], gradient[turn.rows]
            )
            waits.append(turn.start_sum(ctx.dense.exchange, of_rows))
            if sums:
                torch._foreach_add_(sums, of_parameters)
        by_parameter = dict(zip(trained, sums, strict=True))
        return (
            torch.cat([wait() for wait in waits]),
            None,
            None,
            *(by_parameter.get(p) for p in ctx.parameters),
        )


class Hybrid(Around):
    """The strategy of parallel.dense: gradients of dense layers are complete after backward; those
    of all other parameters are reduced by ZeRO, stage 1 or 2.

    A reduction to the owners and a broadcast of their weights send as much as an allreduce. Each
    element of the training state has one owner: for dense layers the rank with that part, otherwise
    the rank to which ZeRO's buckets assign it. So norms over parameters, noise and checkpoints
    count everything once.
    """

    calls_model = False  # never without the other ranks

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        named: NamedParameters,
        model: HybridModel,
        stopwatch: Stopwatch,
        batch: int | None,
    ) -> None:
        """batch: samples of a step, for the summary, if known."""
        self._world = mesh.world
        self._cuts = model.cuts()
        updates = DenseKeys.of(config).dense_updates
        # otherwise they have no gradient after the last turn
        self._reduced = [p for _, p in named if p in self._cuts and updates == 1]
        stage: Literal[1, 2] = 2 if config.shard.stage == 2 else 1
        others = [(name, p) for name, p in named if p not in self._cuts]
        of_nccl = nccl_ranks(named[0][1].device, mesh.data)
        super().__init__(
            ZeroStrategy(
                others, mesh, stage, config.comm.bucket_bytes(of_nccl), stopwatch, on_host=False
            )
        )
        self._shards = {
            p: self.part(p) if p in self._cuts else self._within.shard(p) for _, p in named
        }
        self.waits_in_passes = any(p.device.type in KINDS for _, p in named)  # communicators.py
        often = f"; updated {updates} times a step" * (updates > 1)
        self.summary = f"{model.summary(batch)}{often}; of the others {self._within.summary}"

    def shard(self, p: torch.nn.Parameter) -> Shard:
        return self._shards[p]

    def part(self, p: torch.nn.Parameter) -> Shard:
        return Shard(p, p, 0, p.numel(), self._cuts[p]) if p in self._cuts else self._within.part(p)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return total_over(self._world, x)

    def wrap(self, forward: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
        return Wrapped(forward, of_shards(optimizer, self._shards, self.total))

    def reduce(self) -> None:
        super().reduce()
        fill_missing(self._reduced)
