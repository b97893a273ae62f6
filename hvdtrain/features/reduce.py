"""comm.reduce, and the ways to reduce gradients that each need a strategy of their own: compression, Adasum and local SGD."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.config.lengths import read_length
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.features.horovod_settings import not_on_horovod
from hvdtrain.features.job_feature import Exclusion, JobFeature, PlannedJob, Values, above, always, among, as_set, other_than, value_of

ONE_OF: dict[str, Values] = {  # at most one of these
    "comm.compression": other_than("none", "fp16"),
    "comm.op": among("adasum"),
    "comm.local_steps": above(1),
}

FIRST_BUCKET_MB = 1  # DDP's own, whatever the others are


def _one_of(job: PlannedJob) -> Iterator[UserError]:
    chosen = [as_set(job.config, key) for key, values in ONE_OF.items() if values.hold(value_of(job.config, key))]
    if len(chosen) > 1:
        yield UserError(f"{' and '.join(chosen)} exclude each other", job.where("comm.op"), "keep one of them")


def _needs_horovod(job: PlannedJob) -> Iterator[UserError]:
    if "horovod_api" not in job.features:
        what = f"comm.reduce=distributed_optimizer needs the horovod engine; this is {job.engine}"
        yield UserError(what, job.where("comm.reduce"), "comm.engine=horovod, or comm.reduce=auto")


def _needs_torchdist(job: PlannedJob) -> Iterator[UserError]:
    if "ddp" not in job.features:
        what = f"comm.reduce=ddp needs the torchdist engine; this is {job.engine}"
        yield UserError(what, job.where("comm.reduce"), "comm.engine=torchdist, or comm.reduce=auto")


def _in_each_step(config: Config) -> bool:
    return config.comm.reduce == "bucket" and not read_length(config.comm.local_from).amount


ANOTHER = tuple(Exclusion(key, values, where="comm.reduce", fix="comm.reduce=auto") for key, values in ONE_OF.items())
ANOTHER_WHY = "both say how gradients are reduced"

ONE_STRATEGY = JobFeature(key="comm.reduce", on=always, rules=(_one_of,))
DISTRIBUTED_OPTIMIZER = JobFeature(
    key="comm.reduce",
    on=lambda config: config.comm.reduce == "distributed_optimizer",
    examples=("comm.reduce=distributed_optimizer",),
    off="comm.reduce=auto",
    why=ANOTHER_WHY,
    excludes=ANOTHER,
    rules=(_needs_horovod,),
)
DDP = JobFeature(
    key="comm.reduce",
    on=lambda config: config.comm.reduce == "ddp",
    examples=("comm.reduce=ddp",),
    off="comm.reduce=auto",
    why=ANOTHER_WHY,
    excludes=(
        *ANOTHER,
        *not_on_horovod(),
        Exclusion(
            "comm.bucket_mb",
            Values(lambda size: size < FIRST_BUCKET_MB, 0.5),
            what="{chosen} with speed.compile={config.speed.compile} takes buckets of 1 MiB or more; this is {set}",
            fix="comm.bucket_mb=1, or speed.compile=none",
            when=lambda config: config.speed.compile != "none",
            words="speed.compile=default",
            why="torch wants the first bucket, of 1 MiB, to be the smallest",
        ),
    ),
    rules=(_needs_torchdist,),
)
BUCKET = JobFeature(
    key="comm.reduce",
    on=_in_each_step,
    examples=("comm.reduce=bucket",),
    off="comm.reduce=auto",
    excludes=(
        Exclusion(
            "comm.local_steps",
            above(1),
            what="{set} reduces weights, not gradients: comm.reduce=bucket has nothing to do",
            where="comm.reduce",
            fix="comm.reduce=auto",
            why="local SGD reduces weights, not gradients",
        ),
    ),
)
FEATURES = (ONE_STRATEGY, DISTRIBUTED_OPTIMIZER, DDP, BUCKET)
