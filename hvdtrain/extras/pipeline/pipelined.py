"""Pipelined: this rank's stages of a model, their parameters, and the passes of a step through all
stages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import nn

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.order import SameOrder
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import WHOLE, Cut
from hvdtrain.extras.pipeline.executor import Pipeline
from hvdtrain.extras.pipeline.keys import PipelineKeys
from hvdtrain.extras.pipeline.schedule import Schedule, timeline
from hvdtrain.extras.pipeline.stages import (
    Autocast,
    Stage,
    stages_of,
    tied_parameters,
    units_of,
)
from hvdtrain.extras.pipeline.times import MarkedRun
from hvdtrain.frameworks.learner import CurrentPass, TimedPass, Waited
from hvdtrain.frameworks.torch.arrangement import SampleDivision
from hvdtrain.frameworks.torch.pipeline_unit import Unit
from hvdtrain.frameworks.torch.strategy import NamedParameters, Shard

MOST_RUNS = 16  # whose times a GPU may not have reached yet

# returns the inputs of a micro-batch, (n, ...) on the device; called on the first stage's rank
InputsOf = Callable[[Any], torch.Tensor]
# takes a micro-batch and the model's outputs; called on the last stage's rank
OutputsTo = Callable[[Any, Any], Any]


class Pipelined:
    """The stages of this rank. Created from the whole model, equal on all ranks of `pipe`;
    free_absent() then keeps only this rank's part."""

    def __init__(
        self,
        model: nn.Module,
        first: Sequence[int],
        pipe: Communicator,
        config: Config,
        autocast: Autocast,
        device: torch.device,
        orders: Sequence[SameOrder] = (),
        samples: SampleDivision | None = None,
    ) -> None:
        """first: the first unit of each stage. orders: checks that ranks compute the layers of a
        stage in the same order. samples: how ranks with the same stage divide samples. Raises
        UserError if a parameter is in no unit, or if the engine has no messages."""
        where = config.where("parallel.pipeline")
        keys = PipelineKeys.of(config)
        stages = stages_of(model, first, where)
        own: dict[int, Any] = {
            n: _InPrecision(stage, autocast)
            for n, stage in enumerate(stages)
            if n % pipe.size == pipe.rank
        }
        if samples is not None:
            last = len(stages) - 1
            own = {
                n: _OfParts(stage, samples, is_first=n == 0, is_last=n == last)
                for n, stage in own.items()
            }
        self._pipeline = Pipeline(own, pipe, keys.schedule, device, where)
        self._pipe = pipe
        self._orders = orders
        self._tied = tied_parameters(model, stages)
        self._parameters = list(model.parameters())
        self._ranks: dict[nn.Parameter, set[int]] = {}  # the ranks of `pipe` that have a parameter
        for number, stage in enumerate(stages):
            for p in stage.parameters():
                self._ranks.setdefault(p, set()).add(number % pipe.size)
        self._virtual = keys.stages_of_rank
        self._waited = Waited(0.0, 0.0, 0.0)
        self._runs: list[MarkedRun] = []  # whose times are not in `waited` yet
        self._schedule: Schedule = keys.schedule
        self._predicted: dict[int, float] = {}  # share of waiting, by the number of micro-batches
        how = "as in parallel.balance" if isinstance(keys.balance, list) else f"by {keys.balance}"
        self.summary = f"{keys.schedule}, stages {how} {_stages(units_of(model, where), first)}"

    def updates(self, p: nn.Parameter) -> bool:
        """Whether this rank is the first that has the parameter. That rank updates it and sends it
        to the others."""
        return self._pipe.rank == min(self._ranks[p])

    def updated(self, named: NamedParameters) -> NamedParameters:
        return [(name, p) for name, p in named if self.updates(p)]

    @torch.no_grad()
    def free_absent(self, cuts: Mapping[nn.Parameter, Cut]) -> dict[nn.Parameter, Shard]:
        """Frees the memory of the parameters that this rank does not have, and keeps 0 elements of
        each. `cuts`: of tensor groups."""
        absent = {}
        for p in self._parameters:
            if self._pipe.rank not in self._ranks[p]:
                shape = cuts.get(p, WHOLE).whole_shape(tuple(p.shape))
                whole = nn.Parameter(
                    torch.empty(shape, dtype=p.dtype, device="meta"), p.requires_grad
                )
                p.data = p.data.new_empty(0)
                absent[p] = Shard(
                    nn.Parameter(p.data, p.requires_grad),
                    whole,
                    0,
                    0,
                    is_mine=False,
                    is_everywhere=False,
                )
        return absent

    def train(
        self,
        micro: Sequence[Sized],
        inputs: InputsOf,
        loss: OutputsTo,
        enter: Callable[[str], None],
    ) -> None:
        """Adds the gradient of the sum of the scalars loss(batch, outputs) to p.grad of this rank's
        parameters. enter: a stopwatch's."""
        self._pipeline.train(
            [len(batch) for batch in micro],
            lambda number: inputs(micro[number]),
            lambda number, outputs: loss(micro[number], outputs),
            enter,
        )
        passes = sum(1 for batch in micro if len(batch))
        if passes not in self._predicted:
            self._predicted[passes] = timeline(
                self._schedule, self._pipe.size, passes, self._virtual
            ).bubble
        self._waited = self._waited._replace(predicted=self._predicted[passes])
        assert self._pipeline.last is not None, "train() leaves its run"
        self._runs.append(self._pipeline.last)
        if len(self._runs) > MOST_RUNS:
            self._add_up(1)

    def _add_up(self, count: int) -> None:
        """Adds the times of the oldest runs."""
        spent = [run.spent() for run in self._runs[:count]]
        del self._runs[:count]
        self._waited = self._waited._replace(
            seconds=self._waited.seconds + sum(each.seconds for each in spent),
            waiting=self._waited.waiting + sum(each.waiting for each in spent),
        )

    def read_waited(self) -> Waited:
        """Returns the waiting times of training since the last call, and waits for the GPU to end
        its passes."""
        self._add_up(len(self._runs))
        waited = self._waited
        self._waited = self._waited._replace(seconds=0.0, waiting=0.0)
        return waited

    def last_passes(self) -> list[TimedPass]:
        return self._pipeline.passes

    def under_way(self) -> CurrentPass | None:
        """Returns the current pass; waits_for is a rank of the pipeline."""
        return self._pipeline.under_way()

    def evaluate(self, micro: Sequence[Sized], inputs: InputsOf, outputs_to: OutputsTo) -> None:
        """Raises UserError if ranks of a stage computed different layers."""
        self._pipeline.evaluate(
            [len(part) for part in micro],
            lambda number: inputs(micro[number]),
            lambda number, outputs: outputs_to(micro[number], outputs),
        )
        for order in self._orders:  # stages have no forward hook of the model, which would ask
            order.end("end of the evaluation")

    def add_tied(self) -> None:
        """Sums p.grad over all copies of a parameter that several stages use."""
        self._pipeline.add_tied([each for each in self._tied if each.parameter.requires_grad])

    def send_tied(self) -> None:
        """Sends the weights of these parameters from the rank that updates them to the copies."""
        self._pipeline.send_tied(self._tied)


class _InPrecision(nn.Module):
    """A stage that computes in the dtype of the layers."""

    def __init__(self, stage: Stage, autocast: Autocast) -> None:
        super().__init__()
        self._stage = stage
        self._autocast = autocast

    def forward(self, x: torch.Tensor) -> Any:
        with self._autocast(x.device):
            return self._stage(x)


class _OfParts(nn.Module):
    """A stage that computes a rank's part of each sample."""

    def __init__(
        self, stage: nn.Module, samples: SampleDivision, *, is_first: bool, is_last: bool
    ) -> None:
        super().__init__()
        self._stage = stage
        self._samples = samples
        self._is_first = is_first
        self._is_last = is_last

    def forward(self, x: torch.Tensor) -> Any:
        outputs = self._stage(self._samples.own_part(x) if self._is_first else x)
        return self._samples.outputs_of_part(outputs) if self._is_last else outputs


def _stages(units: Sequence[Unit], first: Sequence[int]) -> str:
    """Describes the stages: "embeddings ... blocks.3 | blocks.4 ... head"."""
    of_stages = [units[start:stop] for start, stop in itertools.pairwise([*first, len(units)])]
    return " | ".join(
        stage[0].name + (f" ... {stage[-1].name}" if len(stage) > 1 else "") for stage in of_stages
    )
