"""Layers: the arrangement of ranks that have one model together, in stages of its layers, parts of
each layer, or both; costs of units."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.comm.mesh import Mesh
from hvdtrain.comm.order import SameOrder
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Cut
from hvdtrain.core.metrics import Sums, add_sums, zero_sums
from hvdtrain.core.progress import Hyper, fold
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import TimedPass, UnderWay, Waited
from hvdtrain.frameworks.torch.arrangement import Arrangement, send_from_rank_0
from hvdtrain.frameworks.torch.call import only_one
from hvdtrain.frameworks.torch.device import pick_device
from hvdtrain.frameworks.torch.forward import Evaluated
from hvdtrain.frameworks.torch.inputs import DeviceBatch, split_batch
from hvdtrain.frameworks.torch.model import check_outputs, example, normed_model
from hvdtrain.frameworks.torch.parallel.divided import Divided
from hvdtrain.frameworks.torch.parallel.pipeline.cuts import (
    agreed_seconds,
    first_units,
    operations_of,
    own_seconds,
    planned_first_units,
    refuse_changed_buffers,
    samples_of_pass,
)
from hvdtrain.frameworks.torch.parallel.pipeline.executor import planned_forms
from hvdtrain.frameworks.torch.parallel.pipeline.pipelined import Pipelined
from hvdtrain.frameworks.torch.parallel.pipeline.schedule import UnitCost
from hvdtrain.frameworks.torch.parallel.pipeline.stages import units_of
from hvdtrain.frameworks.torch.parallel.strategy import NamedParameters, OnePass, Strategy
from hvdtrain.frameworks.torch.parallel.tensor.layers import give_whole_logits
from hvdtrain.frameworks.torch.parallel.tensor.plan import (
    check_cut,
    cut_model,
    not_zeros,
    order_of_layers,
    outputs_of,
    plan_of,
)
from hvdtrain.frameworks.torch.precision import pick_precision
from hvdtrain.frameworks.torch.step import Passes
from hvdtrain.tasks.task import Task


class Layers(Arrangement):
    """The arrangement of parallel.tensor and parallel.pipeline."""

    def cut(self) -> None:
        """Raises UserError where the model says not how it is cut, or its parts would compute
        something else."""
        config = self.making.config
        mesh = self.making.mesh
        self._cuts = dict[torch.nn.Parameter, Cut]()
        self.pipelined = None
        plan = (
            plan_of(self.model, config.where("parallel.tensor"))
            if config.parallel.tensor > 1
            else {}
        )
        first = self._first_units() if config.parallel.pipeline > 1 else []
        if self.making.planned is None:
            send_from_rank_0(self.model, mesh)
        if plan:
            self._cut_layers(plan)
        if first:
            self.pipelined = self._in_stages(first)

    def _cut_layers(self, plan: Any) -> None:
        making = self.making
        model = self.model
        where = self.making.config.where("parallel.tensor")
        has_numbers = making.planned is None
        x = not_zeros(only_one(making.example())) if has_numbers else None
        expected = outputs_of(model, x) if x is not None else None
        order: SameOrder = order_of_layers(making.config, making.mesh, making.device)
        self._cuts = cut_model(
            model, plan, making.mesh.tensor, where, making.config.parallel.sequence, order
        )
        model.register_forward_hook(lambda *_: order.end("end of the forward pass"))
        self.orders = [order]
        if making.given is not None:
            give_whole_logits(model)
        if x is not None:
            check_cut(model, x, expected, making.task, where)

    def _first_units(self) -> list[int]:
        """The first unit of each stage. A collective."""
        making = self.making
        config = self.making.config
        if making.planned is not None:
            return planned_first_units(self.model, config, only_one(making.example()))
        if making.given is not None:
            x = only_one(making.given.example(None, config))
        else:
            x = only_one(making.example(samples_of_pass(config, making.mesh.data.size)))
        autocast = making.precision.autocast
        world = making.mesh.world
        return first_units(
            self.model,
            config,
            only_one(making.example()),
            lambda units: agreed_seconds(units, x, autocast, world),
        )

    def _in_stages(self, first: list[int]) -> Pipelined:
        making = self.making
        if making.planned is not None:
            pipe: Any = making.mesh.pipe
            pipe.messages.update(
                planned_forms(
                    self.model, first, only_one(making.example()), making.precision.autocast
                )
            )
        return Pipelined(
            self.model,
            first,
            making.mesh.pipe,
            making.config,
            making.precision.autocast,
            making.device,
        )

    def strategy(self, named: NamedParameters, optimizer: torch.optim.Optimizer) -> Strategy:
        reduced = self.pipelined.updated(named) if self.pipelined else named
        within = super().strategy(reduced, optimizer)
        parameters = [p for _, p in named]
        return Divided(
            within,
            self.making.mesh,
            parameters,
            self._cuts,
            self.pipelined,
            self.making.config.parallel.sequence,
        )

    def passes(self, strategy: Strategy, *of_passes: Any) -> Passes:
        if self.pipelined is None:
            return super().passes(strategy, *of_passes)
        return PipelinePasses(*of_passes, pipelined=self.pipelined, mesh=self.making.mesh)


class PipelinePasses(Passes):
    """The passes of parallel.pipeline: all micro-batches of a step at once, of whose sums the last
    stage's rank has the numbers."""

    def __init__(self, config: Config, *of_passes: Any, pipelined: Pipelined, mesh: Mesh) -> None:
        """of_passes: as Passes has them."""
        super().__init__(config, *of_passes)
        self._config = config
        self._pipelined = pipelined
        self._mesh = mesh

    def of_step(self, hyper: Hyper, optimizer: torch.optim.Optimizer) -> OnePass:
        return self._all

    def _all(self, micro: Sequence[DeviceBatch], divisor: int, is_last: bool) -> Sums:
        sums = zero_sums(self._forward.task.sums)

        def loss(batch: DeviceBatch, outputs: Any) -> torch.Tensor:
            nonlocal sums
            losses = self._forward.losses(outputs, batch, training=True)
            sums = add_sums(sums, losses.sums)
            return self._scaled(losses, divisor)

        self._pipelined.train(micro, self._input_of, loss, self._stopwatch.enter)
        return sums

    def _input_of(self, batch: DeviceBatch) -> torch.Tensor:
        return only_one(self._forward.inputs_of(batch))

    def evaluate(self, batch: DeviceBatch) -> Sums:
        sums = zero_sums(self._forward.task.sums)

        def add(part: DeviceBatch, outputs: Any) -> None:
            nonlocal sums
            sums = add_sums(sums, self._forward.losses(outputs, part, training=False).sums)

        self._pipelined.evaluate(split_batch(batch, 2 * self._mesh.pipe.size), self._input_of, add)
        return sums

    def predict(self, batch: DeviceBatch) -> Evaluated:
        what = "the outputs of a pipeline are on its last rank alone, and its samples too"
        raise UserError(
            what,
            self._config.where("parallel.pipeline"),
            "predict with parallel.pipeline=1, as evaluate does",
        )

    def read_waited(self) -> Waited:
        return self._pipelined.read_waited()

    def last_passes(self) -> list[TimedPass]:
        return self._pipelined.last_passes()

    def under_way(self) -> UnderWay | None:
        found = self._pipelined.under_way()
        mesh = self._mesh
        if found is None or found.waits_for is None:
            return found
        apart = mesh.world.size // mesh.pipe.size  # of the ranks of a pipeline
        return found._replace(
            waits_for=mesh.world.rank + (found.waits_for - mesh.pipe.rank) * apart
        )


def unit_costs(config: Config, task: Task, samples: int) -> list[UnitCost]:
    """Costs of the units of the job's model, with `samples` samples, in this process. Raises
    UserError for a model that a pipeline refuses.

    Computes with as many threads as a rank has where all ranks that have the model share this
    machine.
    """
    alone = SingleProcessCommunicator()
    threads = torch.get_num_threads()
    device = pick_device(config, alone)
    precision = pick_precision(config, device, alone)
    torch.manual_seed(fold(config.seed) & (2**63 - 1))
    model = normed_model(config, task, alone).to(device=device, dtype=precision.weights)
    like = torch.empty(0, dtype=precision.weights, device=device)
    check_outputs(model, config, task, like)
    where = config.where("parallel.pipeline")
    units = units_of(model, where)
    refuse_changed_buffers(model, only_one(example(2, config, task, like)), where)
    operations = operations_of(units, model, only_one(example(samples, config, task, like)), where)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, threads // config.parallel.ranks))
    try:
        seconds = own_seconds(
            units, only_one(example(samples, config, task, like)), precision.autocast
        )
    finally:
        torch.set_num_threads(threads)
    return [
        UnitCost(unit.name, flops, each)
        for unit, flops, each in zip(units, operations, seconds, strict=True)
    ]
