"""The section evaluate: when the validation set is evaluated, and how much of it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hvdtrain.config.sections.extra_keys import with_keys_of_extras
from hvdtrain.config.sections.section import Section


@with_keys_of_extras
class EvaluateConfig(Section):
    """Evaluations on the validation set, besides those at the end of each epoch and of the job."""

    section = "evaluate"
    every_steps: int | None = Field(
        default=None, ge=1, le=10**15, description="steps between two evaluations within an epoch"
    )
    samples: int | None = Field(
        default=None,
        ge=1,
        le=10**12,
        description="evaluate only so many samples of the validation set: the same ones each time "
        "and on any number of ranks, drawn by "
        "the seed",
    )
    views: Literal[1, 2, 6] = Field(
        default=1,
        description="test-time augmentation: what the model says of an image is the mean of its "
        "outputs for so many views: 2: the image "
        "and its mirror image; 6: these two with weight 1/4 each, and both shifted by a pixel up "
        "and left, and down and right, 1/8 each "
        "(Jordan 2024, arXiv:2404.00498). An evaluation takes so many forward passes. For "
        "task.name=classification of images",
    )
