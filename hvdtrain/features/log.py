"""log.noise_scale and log.samples: what a job measures, and what its model draws, while it
trains."""

from __future__ import annotations

from hvdtrain.config.exclusion import Exclusion, Values, among, other_than
from hvdtrain.core.extras import token_images
from hvdtrain.features.job_feature import Conflict, JobFeature

# log.noise_scale: each rank's own gradient is compared with the mean of all.
NOISE_SCALE = JobFeature(
    key="log.noise_scale",
    on=lambda config: config.log.noise_scale,
    examples=("log.noise_scale=true",),
    off="log.noise_scale=false",
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
            what="log.noise_scale reads each rank's own gradients, which {set} does not show",
            fix="comm.reduce=auto, or log.noise_scale=false",
            why="a reduction may be under way when a rank's own gradient is read",
        ),
        Exclusion(
            "speed.precision",
            among("fp16"),
            what="log.noise_scale reads each rank's own gradients, which {set} scales",
            fix="speed.precision=bf16, or log.noise_scale=false",
            why="a rank's own gradients are scaled",
        ),
    ),
)


DRAWN = (*token_images(), "text")  # data whose tokens can be shown

# log.samples: what a language model draws, as images or text.
SAMPLES = JobFeature(
    key="log.samples",
    on=lambda config: (
        bool(config.log.samples) and config.task.name != "segmentation"
    ),  # which shows masks of any data
    examples=("log.samples=2 task.name=language data.name=text",),
    off="log.samples=0",
    excludes=(
        Exclusion(
            "task.name",
            other_than("language", "regression"),
            what="{chosen} draws tokens; the job has {set}",
            where="log.samples",
            fix="task.name=language or segmentation, or leave it out",
            why="it draws tokens",
        ),
        Exclusion(
            "data.name",
            Values(lambda name: name not in DRAWN, "mine:tokens"),
            what="{chosen} draws images or text; what tokens of {set} show is not known",
            where="log.samples",
            fix=f"data.name={' or '.join(DRAWN)}, or leave it out",
            words="task.name=language",
            why="what its tokens show is not known",
        ),
    ),
)

# hooks: methods of the user's, called on every rank between steps.
HOOKS = JobFeature(
    key="hooks",
    on=lambda config: bool(config.hooks),
    examples=("hooks=[mine:Hook]",),
    off="hooks=[]",
)
