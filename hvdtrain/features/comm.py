"""comm.engine, the ranks that it connects, and what one engine alone has: settings of Horovod,
MPI's way with tensors on GPUs."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from hvdtrain.config.exclusion import Exclusion, Values, When, among, other_than
from hvdtrain.errors import UserError
from hvdtrain.features.job_feature import JobFeature, PlannedJob, needs_engine


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


# what depends on the number of ranks in every job
RANKS = JobFeature(
    key="comm.engine",
    on=lambda config: True,
    no_examples="it is of every job",
    rules=(
        needs_engine(
            "several_ranks",
            what="comm.engine={engine} is for one process; the job has {ranks} ranks",
            fix="comm.engine=auto",
            when=lambda job: job.ranks > 1,
        ),
        _batch_size,
    ),
)

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


IS_OF_HOROVOD = needs_engine(
    "horovod_api",
    what="{key} is a setting of Horovod; this is the {engine} engine",
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


MEMORY_KEY = "comm.device_memory"  # whether MPI gets tensors on GPUs as they are


DEVICE_MEMORY = JobFeature(
    key=MEMORY_KEY,
    on=lambda config: config.comm.device_memory != "auto",
    no_examples="it changes nothing where no rank has a GPU",
    off="comm.device_memory=auto",
    rules=(
        needs_engine(
            "plain_mpi",
            what="{set} is of the mpi engine; this is the {engine} engine",
            fix="leave {key} out, or comm.engine=mpi",
        ),
        Exclusion(
            "speed.device",
            among("cpu"),
            what="{chosen} is of tensors on GPUs; this is {set}",
            fix=f"leave {MEMORY_KEY} out",
            where=MEMORY_KEY,
        ),
    ),
)
