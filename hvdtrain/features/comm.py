"""comm.engine, the ranks that it connects, and what one engine alone has: settings of Horovod,
MPI's way with tensors on GPUs."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from hvdtrain.errors import UserError
from hvdtrain.features.job_feature import (
    Exclusion,
    JobFeature,
    PlannedJob,
    Rule,
    Values,
    When,
    among,
    other_than,
)


def _single_process(job: PlannedJob) -> Iterator[UserError]:
    if job.ranks > 1 and "several_ranks" not in job.features:
        what = f"comm.engine={job.engine} is for one process; the job has {job.ranks} ranks"
        yield UserError(what, job.where("comm.engine"), "comm.engine=auto")


def _batch_size(job: PlannedJob) -> Iterator[UserError]:
    """Every rank needs a sample of every step; those that have a model together read the same
    ones."""
    readers = max(1, job.config.readers(job.ranks))
    smallest = {
        "batch.size": job.config.batch.size,
        "recipe.grow_to": min(job.config.recipe.grow_to, default=readers),
    }
    for key, samples in smallest.items():
        if samples < readers:
            what = f"batch {samples} does not split over {readers} ranks: some would have no sample"
            yield UserError(what, job.where(key), f"{readers} or more, or fewer ranks")


RULES_OF_RANKS: tuple[Rule, ...] = (_single_process, _batch_size)

SETTINGS: dict[str, Values] = {  # of Horovod
    "comm.hierarchical": among(True),
    "comm.cycle_ms": other_than(None, 1.0),
    "comm.fusion_mb": other_than(None, 1.0),
}


def not_on_horovod(
    when: When | None = None, words: str = "", keys: Collection[str] = SETTINGS.keys()
) -> tuple[Exclusion, ...]:
    """Rows of a feature that the horovod engine does not have: its settings cannot go with it."""
    return tuple(
        Exclusion(
            key,
            values,
            what="{set} is a setting of Horovod, and {chosen} does not run on that engine",
            when=when,
            words=words,
            why="the feature does not run on the horovod engine",
        )
        for key, values in SETTINGS.items()
        if key in keys
    )


def _needs_horovod(key: str) -> Rule:
    def rule(job: PlannedJob) -> Iterator[UserError]:
        if "horovod_api" not in job.features:
            what = f"{key} is a setting of Horovod; this is the {job.engine} engine"
            yield UserError(what, job.where(key), f"leave {key} out, or comm.engine=horovod")

    return rule


HIERARCHICAL = JobFeature(
    key="comm.hierarchical",
    on=lambda config: config.comm.hierarchical,
    examples=("comm.hierarchical=true",),
    off="comm.hierarchical=false",
    rules=(_needs_horovod("comm.hierarchical"),),
)
CYCLE = JobFeature(
    key="comm.cycle_ms",
    on=lambda config: config.comm.cycle_ms is not None,
    examples=("comm.cycle_ms=1",),
    off="comm.cycle_ms=null",
    rules=(_needs_horovod("comm.cycle_ms"),),
)
FUSION = JobFeature(
    key="comm.fusion_mb",
    on=lambda config: config.comm.fusion_mb is not None,
    examples=("comm.fusion_mb=1",),
    off="comm.fusion_mb=null",
    rules=(_needs_horovod("comm.fusion_mb"),),
)


MEMORY_KEY = "comm.device_memory"  # whether MPI gets tensors on GPUs as they are


def _of_mpi_and_gpus(job: PlannedJob) -> Iterator[UserError]:
    wish = job.config.comm.device_memory
    if "plain_mpi" not in job.features:
        what = f"{MEMORY_KEY}={wish} is of the mpi engine; this is the {job.engine} engine"
        yield UserError(what, job.where(MEMORY_KEY), f"leave {MEMORY_KEY} out, or comm.engine=mpi")
    if job.config.speed.device == "cpu":
        what = f"{MEMORY_KEY}={wish} is of tensors on GPUs; this is speed.device=cpu"
        yield UserError(what, job.where(MEMORY_KEY), f"leave {MEMORY_KEY} out")


DEVICE_MEMORY = JobFeature(
    key=MEMORY_KEY,
    on=lambda config: config.comm.device_memory != "auto",
    no_examples="it changes nothing where no rank has a GPU",
    off="comm.device_memory=auto",
    rules=(_of_mpi_and_gpus,),
)
