"""log.noise_scale: each rank's own gradient is compared with the mean of all."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.errors import UserError
from hvdtrain.features.job_feature import Exclusion, JobFeature, PlannedJob, among


def _needs_ranks(job: PlannedJob) -> Iterator[UserError]:
    if job.ranks == 1:
        what = "log.noise_scale compares each rank's gradient with their mean; the job has 1 rank"
        yield UserError(what, job.where("log.noise_scale"), "two ranks or more, or log.noise_scale=false")


NOISE_SCALE = JobFeature(
    key="log.noise_scale",
    on=lambda config: config.log.noise_scale,
    examples=("log.noise_scale=true",),
    off="log.noise_scale=false",
    first=(_needs_ranks,),
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
FEATURES = (NOISE_SCALE,)
