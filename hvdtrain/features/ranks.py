"""The number of ranks: an engine that connects them, and samples for each of them."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.errors import UserError
from hvdtrain.features.job_feature import JobFeature, PlannedJob, always


def _single_process(job: PlannedJob) -> Iterator[UserError]:
    if job.ranks > 1 and "several_ranks" not in job.features:
        what = f"comm.engine={job.engine} is for one process; the job has {job.ranks} ranks"
        yield UserError(what, job.where("comm.engine"), "comm.engine=auto")


def _batch_size(job: PlannedJob) -> Iterator[UserError]:
    """Every rank needs a sample of every step; those that have a model together read the same ones."""
    readers = max(1, job.config.readers(job.ranks))
    smallest = {"batch.size": job.config.batch.size, "recipe.grow_to": min(job.config.recipe.grow_to, default=readers)}
    for key, samples in smallest.items():
        if samples < readers:
            what = f"batch {samples} does not split over {readers} ranks: some would have no sample"
            yield UserError(what, job.where(key), f"{readers} or more, or fewer ranks")


RANKS = JobFeature(key="comm.engine", on=always, rules=(_single_process, _batch_size))
FEATURES = (RANKS,)
