"""comm.engine, the ranks it connects, and the keys that only one engine supports: Horovod's
settings, and how MPI handles tensors on GPUs."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from hvdtrain.config.exclusion import Exclusion, Values, When, among, other_than
from hvdtrain.errors import UserError
from hvdtrain.features.job_feature import JobFeature, PlannedJob, needs_engine


def _batch_size(job: PlannedJob) -> Iterator[UserError]:
    """Yields the error of a batch that is too small: every rank needs a sample in every step, and
    ranks that share a model read the same samples."""
    readers = max(1, job.config.readers(job.ranks))
    smallest = {
        "batch.size": job.config.batch.size,
        "recipe.grow_to": min(job.config.recipe.grow_to, default=readers),
    }
    for key, samples in smallest.items():
        if samples < readers:
            what = f"batch {samples} does not split over {readers} ranks: some would have no sample"
            yield UserError(what, job.where(key), f"{readers} or more, or fewer ranks")


# conflicts with the number of ranks, checked in every job
RANKS = JobFeature(
    key="comm.engine",
    on=lambda config: True,
    rules=(
        needs_engine(
            "several_ranks",
            what="comm.engine={engine} runs one process, but the job has {ranks} ranks",
            fix="comm.engine=auto",
            when=lambda job: job.ranks > 1,
        ),
        _batch_size,
    ),
)

SETTINGS: dict[str, Values] = {  # settings of Horovod
    "comm.hierarchical": among(True),
    "comm.cycle_ms": other_than(None, 1.0),
    "comm.fusion_mb": other_than(None, 1.0),
}


def not_on_horovod(
    when: When | None = None, words: str = "", keys: Collection[str] = SETTINGS.keys()
) -> tuple[Exclusion, ...]:
    """Returns rows of a feature that does not run on the horovod engine: they exclude Horovod's
    settings."""
    return tuple(
        Exclusion(
            key,
            values,
            what="{set} is a Horovod setting, but {chosen} does not run on Horovod",
            when=when,
            words=words,
            why="the feature does not run on the horovod engine",
        )
        for key, values in SETTINGS.items()
        if key in keys
    )


IS_OF_HOROVOD = needs_engine(
    "horovod_api",
    what="{key} is a Horovod setting, but the engine is {engine}",
    fix="leave {key} out, or comm.engine=horovod",
)
HIERARCHICAL = JobFeature(
    key="comm.hierarchical",
    on=lambda config: config.comm.hierarchical,
    examples=("comm.hierarchical=true",),
    off="comm.hierarchical=false",
    rules=(IS_OF_HOROVOD,),
)
CYCLE = JobFeature(
    key="comm.cycle_ms",
    on=lambda config: config.comm.cycle_ms is not None,
    examples=("comm.cycle_ms=1",),
    off="comm.cycle_ms=null",
    rules=(IS_OF_HOROVOD,),
)
FUSION = JobFeature(
    key="comm.fusion_mb",
    on=lambda config: config.comm.fusion_mb is not None,
    examples=("comm.fusion_mb=1",),
    off="comm.fusion_mb=null",
    rules=(IS_OF_HOROVOD,),
)


MEMORY_KEY = "comm.device_memory"  # whether tensors on GPUs are passed to MPI directly


DEVICE_MEMORY = JobFeature(
    key=MEMORY_KEY,
    on=lambda config: config.comm.device_memory != "auto",
    examples=(f"{MEMORY_KEY}=host",),  # no effect in a job without GPUs
    off="comm.device_memory=auto",
    why="only the mpi engine reads it",
    excludes=(
        *not_on_horovod(),
        Exclusion("comm.reduce", among("ddp", "distributed_optimizer")),
        Exclusion("comm.op", among("adasum")),
        Exclusion(
            "speed.device",
            among("cpu"),
            what="{chosen} is for tensors on GPUs, but the job has {set}",
            fix=f"leave {MEMORY_KEY} out",
            where=MEMORY_KEY,
            why="it is about the memory of GPUs",
        ),
    ),
    rules=(
        needs_engine(
            "plain_mpi",
            what="{set} is an mpi setting, but the engine is {engine}",
            fix="leave {key} out, or comm.engine=mpi",
        ),
    ),
)
