"""comm.op=adasum: Horovod's Adasum in the place of the mean of gradients."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.errors import UserError
from hvdtrain.features.job_feature import JobFeature, PlannedJob


def _needs_horovod(job: PlannedJob) -> Iterator[UserError]:
    if "adasum" not in job.features:
        what = f"comm.op=adasum needs the horovod engine; this is {job.engine}"
        yield UserError(what, job.where("comm.op"), "comm.engine=horovod, or comm.op=mean")


def _power_of_two(job: PlannedJob) -> Iterator[UserError]:
    if job.ranks & (job.ranks - 1):
        what = f"comm.op=adasum needs 2, 4, 8, ... ranks; the job has {job.ranks}"
        yield UserError(what, job.where("comm.op"), "another number of ranks, or comm.op=mean")


ADASUM = JobFeature(
    key="comm.op",
    on=lambda config: config.comm.op == "adasum",
    examples=("comm.op=adasum",),
    off="comm.op=mean",
    rules=(_needs_horovod, _power_of_two),
)
FEATURES = (ADASUM,)
