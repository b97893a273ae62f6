"""plan --parallel-picture: which rank has which part of the model in the configuration's mesh, as a picture."""

from __future__ import annotations

from pathlib import Path

from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.report.figures import layout
from hvdtrain.tasks.task import Task

_OPTION = "--parallel-picture"


def draw_parallel(path: str, config: Config, task: Task, ranks: int) -> str:
    """Writes a PNG; returns a line for people. Raises UserError where the framework has no such picture, or the file cannot be written."""
    framework = plugins.load("frameworks", config.framework, config.where("framework"))
    if not hasattr(framework, "layout"):
        raise UserError(f"framework={config.framework} has every model whole on each rank", _OPTION, "framework=torch")
    return layout.draw(Path(path), framework.layout(config, task, ranks), _OPTION)
