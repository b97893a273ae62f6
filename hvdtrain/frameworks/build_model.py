"""What model.name means, whatever the framework: a plugin of a models folder, or the user's own class or function."""

from __future__ import annotations

import inspect
from typing import Any

from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.tasks.task import Task


def build_model(config: Config, task: Task, folder: str) -> Any:
    """What build() of a plugin in `folder` returns, or the user's own package.module:name with the options of `model`.

    Both get those of Task.sizes that their parameters have the names of. Raises UserError where a plugin needs another one, or options
    do not fit.
    """
    name, where = config.model.name, config.where("model.name")
    if not plugins.is_dotted(name):
        build = plugins.load(folder, name, where).build
        signature = inspect.signature(build)
        needed = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "name"]
        if missing := [size for size in needed if size not in task.sizes]:
            has = f"task.name={task.name} has {', '.join(task.sizes)}"
            what = f"model.name={name} is built from {' and '.join(missing)}, and {has}"
            raise UserError(what, where, "another model.name, or another task.name")
        _check_images(config, task, signature)
        return build(name, *(task.sizes[size] for size in needed), **plugins.convert_options(config.model, folder))
    return plugins.call_own(config.model, dict(task.sizes))


def _check_images(config: Config, task: Task, signature: inspect.Signature) -> None:
    """Raises UserError where a plugin whose shape is (H, W, C) gets other data than images."""
    shape = signature.parameters.get("shape")
    if shape is not None and shape.annotation == "tuple[int, int, int]" and len(task.sizes["shape"]) != 3:
        what = f"model.name={config.model.name} takes images (H, W, C); the inputs of this job are {tuple(task.sizes['shape'])}"
        raise UserError(what, config.where("model.name"), "model.name=mlp or linear, or a class of your own")
