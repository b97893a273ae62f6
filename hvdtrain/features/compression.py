"""comm.compression: gradients have half the bytes on their way."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.errors import UserError
from hvdtrain.features.job_feature import Exclusion, JobFeature, PlannedJob, among


def _sums_of_bfloat16(job: PlannedJob) -> Iterator[UserError]:
    if job.config.comm.compression == "bf16" and "bfloat16_sums" not in job.features:
        what = f"comm.compression=bf16 needs sums of bfloat16, which the {job.engine} engine does not have"
        yield UserError(what, job.where("comm.compression"), "comm.compression=fp16, or another comm.engine")


COMPRESSION = JobFeature(
    key="comm.compression",
    on=lambda config: config.comm.compression != "none",
    examples=("comm.compression=fp16",),
    off="comm.compression=none",
    first=(_sums_of_bfloat16,),
    excludes=(
        Exclusion(
            "speed.precision",
            among("fp64"),
            what="{chosen} would round the gradients of {set}",
            where="comm.compression",
            fix="comm.compression=none",
            why="who computes in float64 does not round what is sent",
        ),
    ),
)
FEATURES = (COMPRESSION,)
