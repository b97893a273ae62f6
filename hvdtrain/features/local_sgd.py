"""comm.local_steps: ranks update their own weights for some steps, without a gradient in common."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.config.lengths import read_length
from hvdtrain.errors import UserError
from hvdtrain.features.job_feature import Exclusion, JobFeature, PlannedJob, Values, among
from hvdtrain.recipe.summary import averages_lines


def _divides_sync_points(job: PlannedJob) -> Iterator[UserError]:
    config, steps = job.config, job.config.comm.local_steps
    for section in (config.log, config.checkpoint, config.evaluate):
        key, every = f"{section.section}.every_steps", section.every_steps
        if every is not None and every % steps:
            what = f"comm.local_steps={steps} does not divide {key}={every}; ranks synchronize at both"
            next_multiple = -(-every // steps) * steps
            yield UserError(what, job.where("comm.local_steps"), f"{key}={next_multiple}, or another multiple of {steps}")


LOCAL_SGD = JobFeature(
    key="comm.local_steps",
    on=lambda config: config.comm.local_steps > 1,
    examples=("comm.local_steps=2",),
    off="comm.local_steps=1",
    without=(
        Exclusion(
            "comm.local_from",
            Values(lambda length: bool(read_length(length).amount), 3),
            what="{set} is where comm.local_steps begins, and comm.local_steps=1 reduces every gradient",
            fix="comm.local_steps=4, say, or leave comm.local_from out",
        ),
    ),
    first=(_divides_sync_points,),
    excludes=(
        Exclusion(
            "speed.precision",
            among("fp16"),
            what="{chosen} with {set} gives each rank a loss scale of its own",
            where="comm.local_steps",
            fix="speed.precision=bf16, or comm.local_steps=1",
            why="each rank would have a loss scale of its own",
        ),
        Exclusion(
            "guard.nonfinite",
            among("skip"),
            what="{chosen} with {set} lets one rank skip a step that the others make",
            where="comm.local_steps",
            fix="guard.nonfinite=stop, or comm.local_steps=1",
            why="one rank would skip a step that the others make",
        ),
        Exclusion(
            "log.noise_scale",
            among(True),
            what="log.noise_scale compares each rank's gradient with their mean, which {chosen} does not compute",
            where="comm.local_steps",
            fix="comm.local_steps=1, or log.noise_scale=false",
            why="the mean of gradients is not computed",
        ),
        Exclusion(
            "norm.kind",
            among("sync"),
            what="{set} synchronizes the ranks in every step, {chosen} does not",
            where="comm.local_steps",
            fix="comm.local_steps=1, or norm.kind=ghost",
            why="the norm synchronizes ranks in every step, local SGD does not",
        ),
    ),
    lines_of_recipe=lambda config, recipe, samples: averages_lines(config.comm.local_steps, recipe, samples),
)
FEATURES = (LOCAL_SGD,)
