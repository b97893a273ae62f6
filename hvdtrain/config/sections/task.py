"""The section task: the training task."""

from __future__ import annotations

from pydantic import Field

from hvdtrain.config.sections.extra_keys import with_keys_of_extras
from hvdtrain.config.sections.section import OpenSection


@with_keys_of_extras
class TaskConfig(OpenSection):
    """The task: its loss, its metrics, and the metric that stop.target uses."""

    section = "task"
    name: str = Field(
        default="classification",
        description="task: classification (images of classes), multilabel (several labels per "
        "sample), segmentation (a class per pixel), regression (numbers), "
        "language (the next token), or your own as package.module:build",
    )
