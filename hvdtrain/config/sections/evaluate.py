"""The section evaluate: when the validation set is evaluated, and how much of it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hvdtrain.config.sections.extra_keys import with_keys_of_extras
from hvdtrain.config.sections.section import Section


@with_keys_of_extras
class EvaluateConfig(Section):
    """Evaluations on the validation set, besides the evaluations at the end of each epoch and of
    the job."""

    section = "evaluate"
    every_steps: int | None = Field(
        default=None, ge=1, le=10**15, description="steps between evaluations within an epoch"
    )
    samples: int | None = Field(
        default=None,
        ge=1,
        le=10**12,
        description="evaluate only this many samples of the validation set; the seed selects "
        "them, the same ones each time and on any number of ranks",
    )
    views: Literal[1, 2, 6] = Field(
        default=1,
        description="test-time augmentation: average the model's outputs over this many views "
        "of an image; 2: the image and its mirror image; 6: these two with weight "
        "1/4 each, and both shifted by one pixel up and left, and down and right, "
        "with weight 1/8 each (Jordan 2024, arXiv:2404.00498). An evaluation "
        "takes that many forward passes. For classification of images",
    )
