"""Config -> live objects: the communicator, the learner, the recipe."""

from __future__ import annotations

import os

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.placement import Placement
from hvdtrain.comm.select_engine import EngineChoice, installed_here, select_engine
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.frameworks.build_rule import momentum
from hvdtrain.frameworks.learner import Learner, Task
from hvdtrain.recipe.from_config import recipe_from_config
from hvdtrain.recipe.recipe import Recipe


def engine_of(config: Config, place: Placement) -> EngineChoice:
    """The engine that connect() starts."""
    if config.comm.engine != "auto":
        return EngineChoice(config.comm.engine, f"comm.engine={config.comm.engine}")
    return select_engine(place, os.environ, installed_here(config))


def connect(config: Config, place: Placement) -> tuple[Communicator, str]:
    """Connects this rank with the others: the communicator, and why its engine was chosen. Raises UserError where it cannot."""
    name, reason = engine_of(config, place)
    communicator: Communicator = plugins.load("comm", name, config.where("comm.engine")).connect(place, config.comm)
    return communicator, reason


def build_learner(config: Config, task: Task, communicator: Communicator) -> Learner:
    """The model and optimizer of config.framework on this rank."""
    learner: Learner = plugins.load("frameworks", config.framework, config.where("framework")).build(config, task, communicator)
    return learner


def build_recipe(config: Config, dataset: int) -> Recipe:
    """Every number of every step of a job on `dataset` training samples."""
    return recipe_from_config(config, dataset, momentum(config))
