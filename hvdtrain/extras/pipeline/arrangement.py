"""PipelineStages: the arrangement of parallel.pipeline. Each rank has stages of the model's layers,
with parallel.tensor parts of each layer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hvdtrain.config.schema import Config
from hvdtrain.extras.divided.divided import Divided
from hvdtrain.extras.divided.divided_model import DividedModel
from hvdtrain.extras.pipeline.costs import agreed_seconds, samples_of_pass
from hvdtrain.extras.pipeline.cuts import first_units, planned_first_units
from hvdtrain.extras.pipeline.executor import planned_forms
from hvdtrain.extras.pipeline.keys import PipelineKeys
from hvdtrain.extras.pipeline.layout import stages_of_layers
from hvdtrain.extras.pipeline.passes import PipelinePasses
from hvdtrain.extras.pipeline.pipelined import Pipelined
from hvdtrain.extras.pipeline.schedule import Seconds, timeline
from hvdtrain.extras.pipeline.stages import stages_of, units_of
from hvdtrain.frameworks.torch.call import only_one
from hvdtrain.frameworks.torch.loop_passes import LoopPasses
from hvdtrain.frameworks.torch.parallel.whole_model import WholeModel
from hvdtrain.frameworks.torch.pipeline_unit import Unit
from hvdtrain.frameworks.torch.step import Passes
from hvdtrain.frameworks.torch.strategy import NamedParameters, Strategy
from hvdtrain.tasks.task import Task


class PipelineStages(DividedModel):
    """The arrangement of parallel.pipeline."""

    def cut(self) -> None:
        """Divides the model into stages. Raises UserError if it does not define its units, or they
        compute something else."""
        division = self._division()
        self._first = self._first_units()
        self._divide(division)
        self.pipelined = self._in_stages(self._first)

    @torch.no_grad()
    def _run(self, model: torch.nn.Module) -> None:
        x = only_one(self.making.example())
        super()._run(model)
        for unit in units_of(model, self.making.config.where("parallel.pipeline")):
            x = unit.call(x)

    def _parameters_here(self) -> Collection[torch.nn.Parameter]:
        pipe = self.making.mesh.pipe
        where = self.making.config.where("parallel.pipeline")
        stages = stages_of(self.model, self._first, where)[pipe.rank :: pipe.size]
        return {p for stage in stages for p in stage.parameters()}

    def _first_units(self) -> list[int]:
        """Returns the first unit of each stage. A collective."""
        making = self.making
        config = self.making.config
        if making.planned is not None:
            return planned_first_units(self.model, config, only_one(making.example()))
        if making.user_model is not None:
            x = only_one(making.user_model.example(None, config))
        else:
            x = only_one(making.example(samples_of_pass(config, making.mesh.evaluators.size)))
        autocast = making.precision.autocast
        world = making.mesh.world
        return first_units(
            self.model,
            config,
            only_one(making.example()),
            lambda units: agreed_seconds(units, x, autocast, world, self._in_memory),
        )

    def _in_memory(self, unit: Unit) -> AbstractContextManager[None]:
        return nullcontext() if self._blocks is None else self._blocks.in_memory(unit.modules)

    def _in_stages(self, first: list[int]) -> Pipelined:
        making = self.making
        x = only_one(making.example())
        if self.samples is not None:  # stages after the first one get no inputs of the model
            x = self.samples.own_part(x)
        if making.planned is not None:
            pipe: Any = making.mesh.pipe
            pipe.messages.update(planned_forms(self.model, first, x, making.precision.autocast))
        return Pipelined(
            self.model,
            first,
            making.mesh.pipe,
            making.config,
            making.precision.autocast,
            making.device,
            self.orders,
            self.samples,
        )

    def strategy(self, named: NamedParameters, optimizer: torch.optim.Optimizer) -> Strategy:
        within = WholeModel.strategy(self, self.pipelined.updated(named), optimizer)
        return Divided(
            within,
            self.making.mesh,
            [p for _, p in named],
            self._cuts,
            self.pipelined,
            self.making.config.parallel.divides_positions,
        )

    def passes(self, strategy: Strategy, *of_passes: Any) -> Passes:
        return PipelinePasses(*of_passes, pipelined=self.pipelined, mesh=self.making.mesh)

    def loop_passes(self, forward: torch.nn.Module) -> LoopPasses:
        from hvdtrain.extras.pipeline.loop_passes import StagePasses

        making = self.making
        dtype = making.precision.weights
        return StagePasses(self.model, self.pipelined, making.mesh, dtype, making.device)

    @classmethod
    def layout_stages(
        cls, model: torch.nn.Module, config: Config, task: Task
    ) -> tuple[dict[str, int], str]:
        return stages_of_layers(model, config, task)

    @classmethod
    def layout_notes(cls, config: Config) -> list[str]:
        keys = PipelineKeys.of(config)
        notes = list[str]()
        if keys.stages_of_rank > 1:
            notes.append(f"stage s is on rank s % {keys.pipeline} of its pipeline")
        if keys.balance == "seconds":
            notes.append("stages are cut by operations; a job measures seconds at its start")
        return notes

    @classmethod
    def time_of_passes(
        cls,
        config: Config,
        micro: int,
        seconds: Sequence[tuple[float, float]],
        transfers: Sequence[float],
    ) -> tuple[float, float]:
        keys = PipelineKeys.of(config)
        passes = timeline(
            keys.schedule,
            keys.pipeline,
            micro,
            keys.stages_of_rank,
            [Seconds(*each) for each in seconds],
            transfers=transfers,
        )
        return passes.seconds, passes.bubble
