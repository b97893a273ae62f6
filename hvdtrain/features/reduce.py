"""comm.reduce, and the features with their own strategy: compression, Adasum and local SGD;
comm.tune, which measures bucket sizes."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.config.exclusion import Exclusion, Values, above, among, no_effect, other_than
from hvdtrain.config.schema import Config
from hvdtrain.core.lengths import read_length
from hvdtrain.errors import UserError
from hvdtrain.features.comm import not_on_horovod
from hvdtrain.features.job_feature import Conflict, JobFeature, PlannedJob, needs_engine
from hvdtrain.recipe.summary import averages_lines

ONE_OF: dict[str, Values] = {  # at most one of these
    "comm.compression": other_than("none", "fp16"),
    "comm.op": among("adasum"),
    "comm.local_steps": above(1),
}

FIRST_BUCKET_MB = 1  # DDP's first bucket, whatever the size of other buckets


def _in_each_step(config: Config) -> bool:
    return config.comm.reduce == "bucket" and not read_length(config.comm.local_from).amount


def _instead(key: str) -> Exclusion:
    """Excludes another key of ONE_OF."""
    what = "{chosen} and {set} exclude each other"
    return Exclusion(
        key, ONE_OF[key], what=what, fix="keep one of them", why="both define what ranks exchange"
    )


ANOTHER = tuple(
    Exclusion(key, values, where="comm.reduce", fix="comm.reduce=auto")
    for key, values in ONE_OF.items()
)
ANOTHER_WHY = "both define how gradients are reduced"

DISTRIBUTED_OPTIMIZER = JobFeature(
    key="comm.reduce",
    is_value=True,
    on=lambda config: config.comm.reduce == "distributed_optimizer",
    examples=("comm.reduce=distributed_optimizer",),
    off="comm.reduce=auto",
    why=ANOTHER_WHY,
    excludes=ANOTHER,
    rules=(
        needs_engine(
            "horovod_api",
            what="{chosen} needs the horovod engine, but the engine is {engine}",
            fix="comm.engine=horovod, or comm.reduce=auto",
        ),
    ),
)
DDP = JobFeature(
    key="comm.reduce",
    is_value=True,
    on=lambda config: config.comm.reduce == "ddp",
    examples=("comm.reduce=ddp",),
    off="comm.reduce=auto",
    why=ANOTHER_WHY,
    excludes=(
        *ANOTHER,
        *not_on_horovod(),
        Exclusion(
            "comm.bucket_mb",
            Values(lambda size: size is not None and size < FIRST_BUCKET_MB, 0.5),
            what="{chosen} with speed.compile={config.speed.compile} needs buckets of at least "
            "1 MiB, but the job has {set}",
            fix="comm.bucket_mb=1, or speed.compile=none",
            when=lambda config: config.speed.compile != "none",
            words="speed.compile=default",
            why="torch needs the first bucket, of 1 MiB, to be the smallest",
        ),
    ),
    rules=(
        needs_engine(
            "ddp",
            what="{chosen} needs the torchdist engine, but the engine is {engine}",
            fix="comm.engine=torchdist, or comm.reduce=auto",
        ),
    ),
)
BUCKET = JobFeature(
    key="comm.reduce",
    is_value=True,
    on=_in_each_step,
    examples=("comm.reduce=bucket",),
    off="comm.reduce=auto",
    excludes=(
        Exclusion(
            "comm.local_steps",
            above(1),
            what="{chosen} has no effect with {set}, which reduces weights, not gradients",
            where="comm.reduce",
            fix="comm.reduce=auto",
            why="local SGD reduces weights, not gradients",
        ),
    ),
)


# comm.compression: gradients are sent with half the bytes.
COMPRESSION = JobFeature(
    key="comm.compression",
    on=lambda config: config.comm.compression != "none",
    examples=("comm.compression=fp16",),
    off="comm.compression=none",
    first=(
        needs_engine(
            "bfloat16_sums",
            what="{chosen} needs sums of bfloat16, which the {engine} engine does not have",
            fix="comm.compression=fp16, or another comm.engine",
            when=lambda job: job.config.comm.compression == "bf16",
        ),
    ),
    excludes=(
        _instead("comm.op"),
        _instead("comm.local_steps"),
        Exclusion(
            "speed.precision",
            among("fp64"),
            what="{chosen} would round the gradients of {set}",
            where="comm.compression",
            fix="comm.compression=none",
            why="it would round float64 gradients",
        ),
    ),
)


# comm.op=adasum: Horovod's Adasum instead of the mean of gradients.
ADASUM = JobFeature(
    key="comm.op",
    on=lambda config: config.comm.op == "adasum",
    examples=("comm.op=adasum",),
    off="comm.op=mean",
    excludes=(_instead("comm.local_steps"),),
    rules=(
        needs_engine(
            "adasum",
            what="{chosen} needs the horovod engine, but the engine is {engine}",
            fix="comm.engine=horovod, or comm.op=mean",
        ),
        Conflict(
            lambda job: bool(job.ranks & (job.ranks - 1)),
            what="{chosen} needs 2, 4, 8, ... ranks, but the job has {ranks}",
            fix="another number of ranks, or comm.op=mean",
        ),
    ),
)


def _divides_sync_points(job: PlannedJob) -> Iterator[UserError]:
    config = job.config
    steps = job.config.comm.local_steps
    for section in (config.log, config.checkpoint, config.evaluate):
        key = f"{section.section}.every_steps"
        every = section.every_steps
        if every is not None and every % steps:
            what = (
                f"comm.local_steps={steps} does not divide {key}={every}; ranks synchronize at both"
            )
            next_multiple = -(-every // steps) * steps
            yield UserError(
                what,
                job.where("comm.local_steps"),
                f"{key}={next_multiple}, or another multiple of {steps}",
            )


# comm.local_steps: ranks update their own weights for some steps, without a common gradient.
LOCAL_SGD = JobFeature(
    key="comm.local_steps",
    on=lambda config: config.comm.local_steps > 1,
    updates_whole_weights=False,
    has_common_steps=False,
    examples=("comm.local_steps=2",),
    off="comm.local_steps=1",
    without=(
        no_effect(
            "comm.local_from",
            Values(lambda length: bool(read_length(length).amount), 3),
            without="comm.local_steps",
            fix="comm.local_steps=4",
        ),
    ),
    first=(_divides_sync_points,),
    excludes=(
        Exclusion(
            "speed.precision",
            among("fp16"),
            what="{chosen} with {set} would give each rank its own loss scale",
            where="comm.local_steps",
            fix="speed.precision=bf16, or comm.local_steps=1",
            why="each rank would have its own loss scale",
        ),
        Exclusion(
            "guard.nonfinite",
            among("skip"),
            what="{chosen} with {set} would let one rank skip a step that the others take",
            where="comm.local_steps",
            fix="guard.nonfinite=stop, or comm.local_steps=1",
            why="one rank would skip a step that the others take",
        ),
        Exclusion(
            "log.noise_scale",
            among(True),
            what="log.noise_scale compares each rank's gradient with their mean, which {chosen} "
            "does not compute",
            where="comm.local_steps",
            fix="comm.local_steps=1, or log.noise_scale=false",
            why="the mean of gradients is not computed",
        ),
        Exclusion(
            "norm.kind",
            among("sync"),
            what="{set} synchronizes the ranks in every step, but {chosen} does not",
            where="comm.local_steps",
            fix="comm.local_steps=1, or norm.kind=ghost",
            why="the norm synchronizes ranks in every step, but local SGD does not",
        ),
    ),
    lines_of_recipe=lambda config, recipe, samples: averages_lines(
        config.comm.local_steps, recipe, samples
    ),
)


TUNE = JobFeature(
    key="comm.tune",
    on=lambda config: config.comm.tune,
    examples=("comm.tune=true",),
    off="comm.tune=false",
    why="there are no buckets to tune",
    excludes=tuple(
        Exclusion(
            key,
            values,
            what="comm.tune measures bucket sizes; {set} has no buckets to tune",
            where="comm.tune",
            fix="comm.tune=false",
        )
        for key, values in {
            "comm.local_steps": above(1),
            "comm.op": among("adasum"),
            "comm.reduce": among("ddp"),
        }.items()
    ),
)
