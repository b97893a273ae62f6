"""parallel.sequence: each rank of a tensor group has its part of the positions between the layers that are cut."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.errors import UserError
from hvdtrain.features.job_feature import JobFeature, PlannedJob


def _needs_tensor(job: PlannedJob) -> Iterator[UserError]:
    if job.config.parallel.tensor == 1:
        what = "parallel.sequence=true divides positions over the ranks of a tensor group; this is parallel.tensor=1"
        yield UserError(what, job.where("parallel.sequence"), "parallel.tensor=2, or parallel.sequence=false")


SEQUENCE = JobFeature(
    key="parallel.sequence",
    on=lambda config: config.parallel.sequence,
    examples=("parallel.sequence=true parallel.tensor=2",),
    off="parallel.sequence=false",
    rules=(_needs_tensor,),
)
FEATURES = (SEQUENCE,)
