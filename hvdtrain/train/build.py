"""Config -> live objects."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.placement import Placement
from hvdtrain.comm.select_engine import installed_here, select_engine
from hvdtrain.config import plugins
from hvdtrain.config.read import Provenance
from hvdtrain.config.schema import Config
from hvdtrain.data.files.staging import stage_data
from hvdtrain.data.source import Source, Split
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import Learner, Task, momentum
from hvdtrain.recipe.from_config import recipe_from_config
from hvdtrain.recipe.recipe import Recipe


def build_source(config: Config, provenance: Provenance, split: Split) -> Source:
    """One part of the data set; needs no engine, so that missing data is told before any rank waits for another."""
    make = plugins.load("data/datasets", config.data.name, provenance.where("data.name")).build
    options = plugins.convert_options(config.data, "data/datasets")
    root = Path(config.data.root).expanduser() if config.data.root else None
    if config.data.stage is not None:
        root, options = stage_data(config.data.name, root, options, config.data.stage, provenance.where("data.stage"))
    source: Source = make(config.data.name, root, split, **options)
    return source


def unstaged(config: Config) -> Config:
    """For commands that train nothing: data are read where they are, nothing is copied."""
    return config.replace(data=config.data.replace(stage=None))


def engine_of(config: Config, place: Placement) -> tuple[str, str]:
    """(the engine that connect() starts, why it is this one)"""
    if config.comm.engine != "auto":
        return config.comm.engine, "as asked"
    return select_engine(place, os.environ, installed_here(config))


def connect(config: Config, provenance: Provenance, place: Placement) -> tuple[Communicator, str]:
    """The engine, and why it is this one."""
    name, why = engine_of(config, place)
    communicator: Communicator = plugins.load("comm", name, provenance.where("comm.engine")).connect(place, config.comm)
    return communicator, why


def parse_profile_steps(steps: str | None, where: str) -> tuple[int, int] | None:
    """(A, B) of profile.steps=A:B, None of None. Raises UserError for anything else; `where` says where it was set."""
    if steps is None:
        return None
    found = re.fullmatch(r"(\d{1,15}):(\d{1,15})", steps)
    if not found or int(found[1]) >= int(found[2]):
        raise UserError(
            f"profile.steps={steps} is no range of steps", where, "profile.steps=10:15 traces the five steps that follow step 10"
        )
    return int(found[1]), int(found[2])


def build_task(train: Source, val: Source, provenance: Provenance) -> Task:
    """What both parts of the data set ask of a model; channels are normalized by the training set's statistics."""
    if (train.shape, train.classes) != (val.shape, val.classes):
        what = f"training images are {train.shape} with {train.classes} classes, validation images {val.shape} with {val.classes}"
        raise UserError(what, provenance.where("data.root"), "both parts need the same shape (H, W, C) and the same classes")
    mean, std = train.stats()
    return Task(train.shape, train.classes, mean, std)


def build_learner(config: Config, provenance: Provenance, task: Task, communicator: Communicator) -> Learner:
    """The model and optimizer of config.framework on this rank."""
    learner: Learner = plugins.load("frameworks", config.framework, provenance.where("framework")).build(
        config, provenance, task, communicator
    )
    return learner


def build_recipe(config: Config, provenance: Provenance, dataset: int) -> Recipe:
    """Every number of every step of a job on `dataset` training samples."""
    return recipe_from_config(config, dataset, momentum(config, provenance))


def make_run_folder(config: Config, provenance: Provenance, resumed: Path | None = None) -> Path:
    """Where rank 0 writes: made anew, or the resumed run's own. A folder that holds another run is refused, never overwritten."""
    try:
        if config.run is not None:
            run = Path(config.run).expanduser()
            if config.resume != "auto" and _holds_a_run(run) and (resumed is None or resumed.resolve() != run.resolve()):
                fix = f"resume=auto or resume={run} goes on with it; or give another run="
                raise UserError(f"{run} holds another run", provenance.where("run"), fix)
            run.mkdir(parents=True, exist_ok=True)
            return run
        return resumed or _new_folder(config)
    except OSError as error:
        raise UserError(
            f"cannot write the run folder: {error}", provenance.where("run"), "give run= a folder that can be written"
        ) from None


def _holds_a_run(run: Path) -> bool:
    return any((run / name).exists() for name in ("config.yaml", "events.jsonl", "checkpoints"))


def _new_folder(config: Config) -> Path:
    """runs/DATA-MODEL-TIME, or with a number behind it where another job began in the same second."""
    name = f"{config.data.name}-{config.model.name.split(':')[-1]}-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
        with contextlib.suppress(FileExistsError):
            run = Path("runs") / f"{name}{suffix}"
            run.mkdir(parents=True)
            return run
    raise FileExistsError(f"runs/{name} and 998 more")
