"""log.noise_scale and log.samples: what a job measures, and what its model generates, during
training."""

from __future__ import annotations

from hvdtrain.config.exclusion import Exclusion, Values, among, other_than
from hvdtrain.core.extras import implementing_module, token_images
from hvdtrain.features.job_feature import Conflict, JobFeature, TaskConflict

# log.noise_scale: each rank's own gradient is compared with the mean of all.
NOISE_SCALE = JobFeature(
    key="log.noise_scale",
    on=lambda config: config.log.noise_scale,
    examples=("log.noise_scale=true",),
    off="log.noise_scale=false",
    step_addition=lambda config: implementing_module("log.noise_scale").ADDITION,
    event_fields=("noise_scale",),
    is_extra=True,
    first=(
        Conflict(
            lambda job: job.ranks == 1,
            what="{key} compares each rank's gradient with their mean; the job has 1 rank",
            fix="two ranks or more, or log.noise_scale=false",
        ),
    ),
    excludes=(
        Exclusion(
            "comm.reduce",
            among("ddp"),  # a reduction may be under way when the gradient is read
            what="log.noise_scale reads each rank's own gradients, which {set} does not expose",
            fix="comm.reduce=auto, or log.noise_scale=false",
            why="a reduction may be under way when a rank's own gradient is read",
        ),
        Exclusion(
            "speed.precision",
            among("fp16"),
            what="log.noise_scale reads each rank's own gradients, which {set} scales",
            fix="speed.precision=bf16, or log.noise_scale=false",
            why="a rank's own gradients are scaled by the loss scale",
        ),
    ),
    excludes_tasks=(
        TaskConflict(
            lambda task: task.sample_weight is None,
            what="log.noise_scale compares means over samples, but with "
            "task.name={config.task.name} their weights differ",
            fix="log.noise_scale=false",
        ),
    ),
)


DRAWN = (*token_images(), "text")  # data sets whose tokens can be displayed

# log.samples: images or text that a language model generates.
SAMPLES = JobFeature(
    key="log.samples",
    on=lambda config: (
        bool(config.log.samples) and config.task.name != "segmentation"
    ),  # segmentation shows masks for any data
    examples=("log.samples=2 task.name=language data.name=text",),
    off="log.samples=0",
    is_extra=True,
    excludes=(
        Exclusion(
            "task.name",
            other_than("language", "regression"),
            what="{chosen} generates tokens, but the job has {set}",
            where="log.samples",
            fix="task.name=language or segmentation, or leave it out",
            why="only a language model generates tokens",
        ),
        Exclusion(
            "data.name",
            Values(lambda name: name not in DRAWN, "mine:tokens"),
            what="{chosen} displays images or text, but how to display tokens of {set} is unknown",
            where="log.samples",
            fix=f"data.name={' or '.join(DRAWN)}, or leave it out",
            words="task.name=language",
            why="how to display its tokens is unknown",
        ),
    ),
)

# hooks: the user's methods, called on every rank between steps.
HOOKS = JobFeature(
    key="hooks",
    on=lambda config: bool(config.hooks),
    examples=("hooks=[mine:Hook]",),
    off="hooks=[]",
)
