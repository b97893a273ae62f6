"""What a job takes of a rank's memory, by its configuration, its task and its number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hvdtrain.comm.features import Feature
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.data.sampler import largest_share
from hvdtrain.errors import UserError
from hvdtrain.frameworks.footprint import Footprint, PlannedStep
from hvdtrain.recipe.recipe import Recipe
from hvdtrain.tasks.task import Task
from hvdtrain.training.input.micro_batches import passes_of_step

MARGIN = 1.1  # times the prediction: what the allocator and the libraries take beside it (docs/memory.md)


@dataclass(frozen=True)
class MemoryForecast:
    """Predicts footprints of the rank that takes most, as the job is configured and with some keys changed."""

    config: Config
    task: Task
    ranks: int
    features: frozenset[Feature]  # of the engine
    share: int  # most samples of a rank in a step
    passes: int  # of that step, where batch.micro does not say
    evaluated: int  # samples in one pass of an evaluation
    ahead: int  # steps that are read ahead
    _known: dict[tuple[PlannedStep, int, int | str], Footprint] = field(default_factory=dict)  # by step, stage, recompute

    def footprint(self, *, micro: int | None = None, stage: int | None = None, recompute: str | None = None) -> Footprint:
        """With these values of batch.micro, shard.stage and model.recompute. Takes about a second, the first time.

        Raises UserError where the framework or the model cannot be predicted, or the model has no blocks to recompute.
        """
        config, step = self.config, self.step(micro)
        key = (step, config.shard.stage if stage is None else stage, config.model.recompute if recompute is None else recompute)
        if key not in self._known:
            self._known[key] = self._predict(
                config.replace(shard=config.shard.replace(stage=key[1]), model=config.model.replace(recompute=key[2])), step
            )
        return self._known[key]

    def _predict(self, config: Config, step: PlannedStep) -> Footprint:
        framework: Any = plugins.load("frameworks", config.framework, config.where("framework"))
        if not hasattr(framework, "footprint"):
            what = f"the memory of framework={config.framework} is not predicted"
            raise UserError(what, config.where("framework"), "framework=torch")
        found: Footprint = framework.footprint(config, self.task, step, self.ranks, self.features)
        return found

    def step(self, micro: int | None = None) -> PlannedStep:
        """With at most so many samples in a pass; None: as configured."""
        micro = micro or (self.config.batch.micro if isinstance(self.config.batch.micro, int) else None)
        passes = -(-self.share // micro) if micro else self.passes
        return PlannedStep(self.share, passes, self.evaluated, self.ahead, writes_checkpoints=True)


def forecast_memory(
    config: Config, task: Task, recipe: Recipe, ranks: int, features: frozenset[Feature], samples: int, evaluated: int, ahead: int
) -> MemoryForecast:
    """The forecast of the step with the largest batch of the recipe, over `samples` training samples."""
    batch = max(recipe.batch.first, *recipe.batch.to, 1)
    share = largest_share(0, batch, max(1, ranks // config.parallel.ranks), samples, config.data.sampling)
    micro = config.batch.replace(micro=None) if config.batch.micro == "auto" else config.batch
    passes = passes_of_step(config.replace(batch=micro), share, batch, recipe.batch.first)
    return MemoryForecast(config, task, ranks, features, share, passes, max(1, min(evaluated, config.batch.evaluate)), ahead)


def gib(size: float) -> str:
    """6.1 GiB, 0.35 GiB, 12 MiB"""
    if size >= 2**30 / 10:
        return f"{size / 2**30:.{1 if size >= 2**30 else 2}f} GiB"
    return f"{size / 2**20:,.0f} MiB"
