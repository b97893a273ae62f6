"""The configuration: its sections, the keys outside of sections, and every key by its full name."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from hvdtrain.config.sections.augment import AugmentConfig
from hvdtrain.config.sections.batch import BatchConfig
from hvdtrain.config.sections.checkpoint import CheckpointConfig
from hvdtrain.config.sections.comm import CommConfig
from hvdtrain.config.sections.data import DataConfig
from hvdtrain.config.sections.evaluate import EvaluateConfig
from hvdtrain.config.sections.extra_keys import with_sections_of_extras
from hvdtrain.config.sections.guard import GuardConfig
from hvdtrain.config.sections.log import LogConfig
from hvdtrain.config.sections.model import ModelConfig
from hvdtrain.config.sections.norm import NormConfig
from hvdtrain.config.sections.optim import OptimConfig
from hvdtrain.config.sections.parallel import ParallelConfig
from hvdtrain.config.sections.profile import ProfileConfig
from hvdtrain.config.sections.recipe import RecipeConfig
from hvdtrain.config.sections.section import Provenance, Section
from hvdtrain.config.sections.shard import ShardConfig
from hvdtrain.config.sections.speed import SpeedConfig
from hvdtrain.config.sections.stop import StopConfig
from hvdtrain.config.sections.task import TaskConfig
from hvdtrain.core.lengths import as_given

# Sections whose name selects a file of a folder. Keys that are not fields here are options of that
# file's build().
OPEN_SECTIONS = {
    "data": "data/datasets",
    "task": "tasks",
    "model": "frameworks/torch/models",
    "optim": "optim",
}

# an argument -> the argument that it stands for; the other keys of speed are already automatic
SHORTHANDS = {"speed=auto": "speed.precision=auto"}

DEFAULT_EPOCHS = 10
# other names of a key: read everywhere, never written
OTHER_NAMES = {
    "stop.epochs": "epochs",
    "max_steps": "stop.steps",
}


@with_sections_of_extras
class Config(Section):
    """The configuration of a job."""

    framework: str = Field(
        default="torch",
        description="framework that runs on each rank: torch, jax, keras (your keras.Model, "
        "on the backend of KERAS_BACKEND), or numpy (the reference for linear "
        "models)",
    )
    run: str | None = Field(default=None, description="run folder; default: runs/DATA-MODEL-TIME")
    resume: str = Field(
        default="auto",
        description="auto: resume from the newest intact checkpoint in run=, if it contains "
        "one of this job; no: start a new job; RUN: resume that run folder with "
        "its configuration and the keys on the command line",
    )
    epochs: float | None = Field(
        default=DEFAULT_EPOCHS,
        gt=0,
        le=10**9,
        description="passes over the training set; fractions such as 0.5 or 2.25 work; "
        "without a limit if stop.steps or stop.time ends the job",
    )
    seed: int = Field(
        default=1,
        ge=0,
        le=2**63 - 1,
        description="seed of shuffling, initial weights, augmentation and dropout",
    )
    hooks: list[str] = Field(
        default_factory=list,
        description="your callbacks in the training loop, subclasses of hvdtrain.Hook: "
        "[package.module:Class]",
    )
    data: DataConfig = Field(default_factory=DataConfig)
    task: TaskConfig = Field(default_factory=TaskConfig)
    augment: AugmentConfig = Field(default_factory=AugmentConfig)
    batch: BatchConfig = Field(default_factory=BatchConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    recipe: RecipeConfig = Field(default_factory=RecipeConfig)
    norm: NormConfig = Field(default_factory=NormConfig)
    comm: CommConfig = Field(default_factory=CommConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    shard: ShardConfig = Field(default_factory=ShardConfig)
    speed: SpeedConfig = Field(default_factory=SpeedConfig)
    stop: StopConfig = Field(default_factory=StopConfig)
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    guard: GuardConfig = Field(default_factory=GuardConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    profile: ProfileConfig = Field(default_factory=ProfileConfig)

    @property
    def given_hooks(self) -> list[Any]:
        """Hooks that a script gives as objects."""
        return [] if self.given is None else list(self.given.make())

    @property
    def keeps_copies(self) -> bool:
        """Whether a job on several ranks keeps copies of its state to continue after a rank dies,
        if its engine supports that."""
        can_divide = (
            self.framework == "torch" and self.shard.stage in (1, 2) and self.shard.group == "all"
        )
        return (
            self.guard.lost != "stop"
            and (not self.shard.stage or can_divide)
            and not self.parallel.cuts
        )

    @property
    def sections(self) -> list[Section]:
        """Every section, in the order of the keys."""
        return [getattr(self, name) for name in SECTIONS]

    def readers(self, ranks: int) -> int:
        """Returns how many of the ranks read different samples of a step."""
        for section in self.sections:
            ranks = section.readers_of(ranks)
        return ranks

    def first_reader(self, ranks: int) -> int:
        """Returns the first of the ranks that reads training samples."""
        return max(section.first_reader_of(ranks) for section in self.sections)

    @property
    def is_asynchronous(self) -> bool:
        """Whether a single rank takes each step, and it is not known in advance which one."""
        return any(section.is_asynchronous for section in self.sections)

    @model_validator(mode="before")
    @classmethod
    def _default_epochs(cls, tree: Any) -> Any:
        """Returns the limit in epochs; None if another limit ends the job."""
        if not isinstance(tree, dict) or tree.get("epochs") is not None:
            return tree
        stop = tree.get("stop") or {}
        others = [
            stop.get(key) if isinstance(stop, dict) else getattr(stop, key, None)
            for key in ("steps", "time")
        ]
        return tree | {"epochs": DEFAULT_EPOCHS if others == [None, None] else None}

    @field_validator("epochs")
    @classmethod
    def _as_people_write_it(cls, epochs: float | None) -> float | None:
        return None if epochs is None else as_given(epochs)

    def with_provenance(self, provenance: Mapping[str, str]) -> Config:
        """Returns a copy that records where these keys were set: {"batch.size":
        "configs/x.yaml:14"}; other keys keep their origin."""
        known = Provenance({**self._provenance, **provenance})
        copy = self.model_copy(update={name: getattr(self, name).model_copy() for name in SECTIONS})
        for section in (copy, *(getattr(copy, name) for name in SECTIONS)):
            section._provenance = known
        return copy


# The sections of Config, by key.
SECTIONS: dict[str, type[Section]] = {
    name: info.annotation
    for name, info in Config.model_fields.items()
    if isinstance(info.annotation, type) and issubclass(info.annotation, Section)
}


def of_sections(name: str) -> list[Any]:
    """Returns a class variable of every section, also of the classes with which extras add keys."""
    kinds = dict.fromkeys(kind for section in SECTIONS.values() for kind in section.__mro__)
    return [vars(kind)[name] for kind in kinds if name in vars(kind)]


@functools.cache
def known_keys() -> dict[str, FieldInfo]:
    """Returns every key of the schema: {"epochs": ..., "batch.size": ...}."""
    keys = {name: info for name, info in Config.model_fields.items() if name not in SECTIONS}
    for section, kind in SECTIONS.items():
        keys |= {f"{section}.{name}": info for name, info in kind.model_fields.items()}
    return keys


def takes_text(key: str) -> bool:
    """Whether the value of a key is a string, so that 'no', '007' and '1e3' are not numbers or
    booleans."""
    return key in known_keys() and known_keys()[key].annotation in (str, str | None)
