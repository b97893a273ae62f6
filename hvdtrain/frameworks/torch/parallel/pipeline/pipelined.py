"""Pipelined: the stages of a model that this rank of a pipeline has, its parameters, and the passes of a step through all stages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.pieces import WHOLE, Cut
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import TimedPass, UnderWay, Waited
from hvdtrain.frameworks.torch.norm.copied_buffers import copied_buffers
from hvdtrain.frameworks.torch.parallel.pipeline.cuts import balanced_cuts, given_cuts
from hvdtrain.frameworks.torch.parallel.pipeline.executor import DTYPES, MOST_AXES, Pipeline
from hvdtrain.frameworks.torch.parallel.pipeline.schedule import Schedule, Seconds, timeline
from hvdtrain.frameworks.torch.parallel.pipeline.stages import Stage, Unit, stages_of, tied_parameters, units_of
from hvdtrain.frameworks.torch.parallel.strategy import NamedParameters, Shard

Autocast = Callable[[torch.device], AbstractContextManager[Any]]  # in which layers compute
InputsOf = Callable[[Any], torch.Tensor]  # of a micro-batch, (n, ...) on the device; called on the first stage's rank
OutputsTo = Callable[[Any, Any], Any]  # takes a micro-batch and the model's outputs; called on the last stage's rank


class Pipelined:
    """Made from the whole model, which is the same on all ranks of `pipe`; free_absent() then leaves this rank's part of it."""

    def __init__(
        self, model: nn.Module, first: Sequence[int], pipe: Communicator, config: Config, autocast: Autocast, device: torch.device
    ) -> None:
        """first: the first unit of each stage. Raises UserError where a parameter is in no unit, or the engine has no messages."""
        where = config.where("parallel.pipeline")
        stages = stages_of(model, first, where)
        own: dict[int, Any] = {n: _InPrecision(stage, autocast) for n, stage in enumerate(stages) if n % pipe.size == pipe.rank}
        self._pipeline = Pipeline(own, pipe, config.parallel.schedule, device, where)
        self._pipe, self._tied, self._parameters = pipe, tied_parameters(model, stages), list(model.parameters())
        self._ranks: dict[nn.Parameter, set[int]] = {}  # of `pipe`, which have it
        for number, stage in enumerate(stages):
            for p in stage.parameters():
                self._ranks.setdefault(p, set()).add(number % pipe.size)
        self._virtual, self._waited = config.parallel.stages_of_rank, Waited(0.0, 0.0, 0.0)
        self._schedule: Schedule = config.parallel.schedule
        self._predicted: dict[int, float] = {}  # share of waiting, by the number of micro-batches
        how = "as in parallel.balance" if isinstance(config.parallel.balance, list) else f"by {config.parallel.balance}"
        self.summary = f"{config.parallel.schedule}, stages {how} {_stages(units_of(model, where), first)}"

    def updates(self, p: nn.Parameter) -> bool:
        """Whether this rank is the first that has the parameter: that one updates it, and sends it to the others that have it."""
        return self._pipe.rank == min(self._ranks[p])

    def updated(self, named: NamedParameters) -> NamedParameters:
        return [(name, p) for name, p in named if self.updates(p)]

    @torch.no_grad()
    def free_absent(self, cuts: Mapping[nn.Parameter, Cut]) -> dict[nn.Parameter, Shard]:
        """Frees the memory of the parameters that this rank has not: the 0 elements that it has of each. `cuts`: of tensor groups."""
        absent = {}
        for p in self._parameters:
            if self._pipe.rank not in self._ranks[p]:
                shape = cuts.get(p, WHOLE).whole_shape(tuple(p.shape))
                whole = nn.Parameter(torch.empty(shape, dtype=p.dtype, device="meta"), p.requires_grad)
                p.data = p.data.new_empty(0)
                absent[p] = Shard(nn.Parameter(p.data, p.requires_grad), whole, 0, 0, is_mine=False, is_everywhere=False)
        return absent

    def train(self, micro: Sequence[Sized], inputs: InputsOf, loss: OutputsTo, enter: Callable[[str], None]) -> None:
        """Adds to p.grad of this rank's parameters the gradient of the sum of loss(batch, outputs), scalars. enter: of a stopwatch."""
        self._pipeline.train(
            [len(batch) for batch in micro],
            lambda number: inputs(micro[number]),
            lambda number, outputs: loss(micro[number], outputs),
            enter,
        )
        (seconds, waiting), passes = self._pipeline.spent, sum(1 for batch in micro if len(batch))
        if passes not in self._predicted:
            self._predicted[passes] = timeline(self._schedule, self._pipe.size, passes, self._virtual).bubble
        self._waited = Waited(self._waited.seconds + seconds, self._waited.waiting + waiting, self._predicted[passes])

    def read_waited(self) -> Waited:
        """In training since it was last called."""
        found, self._waited = self._waited, self._waited._replace(seconds=0.0, waiting=0.0)
        return found

    def last_passes(self) -> list[TimedPass]:
        return self._pipeline.passes

    def under_way(self) -> UnderWay | None:
        """waits_for is a rank of the pipeline."""
        return self._pipeline.under_way()

    def evaluate(self, micro: Sequence[Sized], inputs: InputsOf, outputs_to: OutputsTo) -> None:
        self._pipeline.evaluate(
            [len(part) for part in micro],
            lambda number: inputs(micro[number]),
            lambda number, outputs: outputs_to(micro[number], outputs),
        )

    def add_tied(self) -> None:
        """Makes p.grad of each copy of a parameter that several stages use the sum over all of them."""
        self._pipeline.add_tied([each for each in self._tied if each.parameter.requires_grad])

    def send_tied(self) -> None:
        """The weights of these parameters, from the rank that updates them to the others that have a copy."""
        self._pipeline.send_tied(self._tied)


class _InPrecision(nn.Module):
    """A stage in the number type of the layers."""

    def __init__(self, stage: Stage, autocast: Autocast) -> None:
        super().__init__()
        self._stage, self._autocast = stage, autocast

    def forward(self, x: torch.Tensor) -> Any:
        with self._autocast(x.device):
            return self._stage(x)


def first_units(
    model: nn.Module, config: Config, x: torch.Tensor, seconds_of: Callable[[Sequence[Unit]], Sequence[Seconds]] | None
) -> list[int]:
    """The first unit of each stage, the same on all ranks: as parallel.balance gives them, or so that the slowest stage has the fewest
    operations, or the fewest seconds that there are.

    x: (n, ...) inputs of the model. seconds_of: called on all ranks for parallel.balance=seconds; without it operations count there too.
    Raises UserError where the model has no units or fewer than stages, or as refuse_changed_buffers() does.
    """
    where, balance = config.where("parallel.pipeline"), config.parallel.balance
    units = units_of(model, where)
    stages = config.parallel.pipeline * config.parallel.stages_of_rank
    balanced_cuts([0.0] * len(units), stages)  # refuses fewer units
    refuse_changed_buffers(model, x, where)
    operations = operations_of(units, model, x, where)
    if isinstance(balance, list):
        return given_cuts(balance, [unit.name for unit in units], config.where("parallel.balance"))
    if balance == "seconds" and seconds_of:
        return balanced_cuts([sum(each) for each in seconds_of(units)], stages)
    return balanced_cuts(operations, stages)


def refuse_changed_buffers(model: nn.Module, x: torch.Tensor, where: str) -> None:
    """Raises UserError for buffers that training changes: those of another rank's stage would not reach its checkpoint."""
    if changed := _changed_buffer(model, x):
        what = f"training changes {changed} of {type(model).__name__}, a buffer, which ranks of other stages would not have"
        raise UserError(what, where, "a model without batch norm: gpt, mlp; or parallel.pipeline=1")


def _changed_buffer(model: nn.Module, x: torch.Tensor) -> str:
    """The name of the first one that a forward pass in training mode changes, or empty; all are as before."""
    if not any(True for _ in model.buffers()):
        return ""
    before = {name: b.detach().clone() for name, b in model.named_buffers()}
    devices = [x.device] if x.device.type == "cuda" else []
    with copied_buffers(model), torch.random.fork_rng(devices=devices), torch.no_grad():
        model.train()(x)
        after = dict(model.named_buffers())
        return next((name for name, b in before.items() if not torch.equal(b, after[name])), "")


def operations_of(units: Sequence[Unit], model: nn.Module, x: torch.Tensor, where: str) -> list[float]:
    """Floating-point operations of the matrix products and convolutions of each unit's forward pass.

    Raises UserError where the units one after the other do not give what the model gives, or one of them gives no tensor (n, ...).
    """
    from torch.utils.flop_counter import FlopCounterMode  # a third of a second

    model.eval()
    found = []
    if x.is_floating_point():  # not zeros: the model's outputs are compared
        x = torch.rand(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x)
    with torch.no_grad():
        expected = tree_leaves(model(x.clone()))  # its first layer may work in place
        for number, unit in enumerate(units):
            with FlopCounterMode(display=False) as counter:
                x = unit.call(x)
            found.append(float(counter.get_total_flops()))
            if number < len(units) - 1 and not (isinstance(x, torch.Tensor) and x.dtype in DTYPES and 1 <= x.ndim <= MOST_AXES):
                what = f"unit {unit.name} of {type(model).__name__} gives {_kind(x)}, which is not sent to another stage"
                raise UserError(what, where, "units that give one tensor (n, ...) each (docs/parallel.md)")
        given = tree_leaves(x)
    if len(given) != len(expected) or not all(map(_is_close, given, expected)):
        what = f"the units of {type(model).__name__}, one after the other, do not give what its forward() gives"
        raise UserError(what, where, "pipeline_units() with all that forward() does (docs/parallel.md)")
    return found


def _kind(x: Any) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"


def _is_close(given: Any, expected: Any) -> bool:
    if not isinstance(expected, torch.Tensor):
        return isinstance(given, type(expected))
    return given.shape == expected.shape and torch.allclose(given, expected, rtol=1e-3, atol=1e-6, equal_nan=True)


def _stages(units: Sequence[Unit], first: Sequence[int]) -> str:
    """ "embeddings ... blocks.3 | blocks.4 ... head" """
    of_stages = [units[start:stop] for start, stop in itertools.pairwise([*first, len(units)])]
    return " | ".join(stage[0].name + (f" ... {stage[-1].name}" if len(stage) > 1 else "") for stage in of_stages)
