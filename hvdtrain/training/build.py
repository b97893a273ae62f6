"""Config -> live objects: the communicator, the learner, the recipe."""

from __future__ import annotations

import os
from typing import Any

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.placement import Placement
from hvdtrain.comm.rendezvous import allow_open_files
from hvdtrain.comm.select_engine import EngineChoice, installed_here, needed_features, select_engine
from hvdtrain.comm.visible_devices import take_part_of_gpu
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.frameworks.build_rule import momentum
from hvdtrain.frameworks.learner import Learner
from hvdtrain.recipe.from_config import recipe_from_config
from hvdtrain.recipe.recipe import Recipe
from hvdtrain.tasks.task import Task


def engine_of(config: Config, place: Placement) -> EngineChoice:
    """The engine that connect() starts."""
    if config.comm.engine != "auto":
        return EngineChoice(config.comm.engine, f"comm.engine={config.comm.engine}")
    return select_engine(place, os.environ, installed_here(config), needed_features(config))


def connect(config: Config, place: Placement) -> tuple[Communicator, str]:
    """Connects this rank with the others: the communicator, and why its engine was chosen. Raises UserError where it cannot."""
    if place.size > 1 and config.comm.engine in ("auto", "torchdist"):
        # torch.distributed warns of each connection from an address without a host name; read when torch is imported
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    allow_open_files(place.size)
    take_part_of_gpu(place, os.environ)
    name, reason = engine_of(config, place)
    may_need_groups = config.resume not in ("auto", "no")  # by the configuration of that run, which is read later
    if may_need_groups or config.parallel.ranks > 1 or (config.shard.stage and config.shard.group == "node"):
        os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")  # without it Horovod makes no groups of ranks
    communicator: Communicator = plugins.load("comm", name, config.where("comm.engine")).connect(place, config.comm)
    return communicator, reason


def build_learner(config: Config, task: Task, communicator: Communicator) -> Learner:
    """The model and optimizer of config.framework on this rank."""
    learner: Learner = plugins.load("frameworks", config.framework, config.where("framework")).build(config, task, communicator)
    return learner


def load_libraries(config: Config) -> None:
    """What the framework would import later, so that memory measured from now on is the job's own."""
    framework: Any = plugins.load("frameworks", config.framework, config.where("framework"))
    if hasattr(framework, "load_libraries"):
        framework.load_libraries(config)


def build_recipe(config: Config, dataset: int, context: int | None) -> Recipe:
    """Every number of every step of a job on `dataset` training samples, of `context` tokens where they have tokens."""
    return recipe_from_config(config, dataset, momentum(config), context)
