"""batch.micro, model.recompute and norm.kind=sync: how a step is divided into micro-batches, and
what they compute."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.config.exclusion import Exclusion, among, other_than
from hvdtrain.errors import UserError
from hvdtrain.features.job_feature import JobFeature, PlannedJob


def _passes_of_sync_norm(job: PlannedJob) -> Iterator[UserError]:
    """A synchronized norm covers the samples of all ranks in a micro-batch. If a rank's share is
    several micro-batches, their contents depend on the number of ranks."""
    config = job.config
    micro = job.config.batch.micro
    if config.norm.kind != "sync":
        return
    largest = max(config.batch.size, *config.recipe.grow_to, config.recipe.batch_max or 0)
    share = -(-largest // max(1, config.readers(job.ranks)))
    if isinstance(micro, int) and share <= micro and config.data.sampling == "global":
        return
    what = (
        f"batch.micro={micro} divides a step into micro-batches that depend on the number of "
        "ranks, and norm.kind=sync normalizes over each of them"
    )
    fix = (
        "leave batch.micro out: a growing batch then has the same micro-batches on any number of "
        "ranks; or norm.kind=batch or ghost"
    )
    yield UserError(what, job.where("batch.micro"), fix)


MICRO = JobFeature(
    key="batch.micro",
    on=lambda config: config.batch.micro is not None,
    extra_values=("batch.micro=auto",),
    examples=("batch.micro=3", "batch.micro=auto"),
    off="batch.micro=null",
    excludes=(
        Exclusion(
            "framework",
            other_than("torch", "jax"),
            what="batch.micro=auto needs a memory prediction, which {set} does not have",
            where="batch.micro",
            fix="batch.micro=N, or framework=torch",
            when=lambda config: config.batch.micro == "auto",
            words="batch.micro=auto",
            why="it cannot predict its memory",
        ),
    ),
    rules=(_passes_of_sync_norm,),
)


# model.recompute: the backward pass repeats the forward pass of blocks.
RECOMPUTE = JobFeature(
    key="model.recompute",
    on=lambda config: config.model.recompute != "none",
    examples=("model.recompute=all",),
    off="model.recompute=none",
    excludes=(
        Exclusion(
            "norm.kind",
            among("sync"),
            what="{chosen} would repeat the collectives of {set} in the backward pass",
            where="model.recompute",
            fix="norm.kind=batch or ghost, or model.recompute=none",
            why="the backward pass would repeat the collectives of norms",
        ),
        Exclusion(
            "speed.compile",
            other_than("none", "default"),
            what="{set} and {chosen} both choose what the backward pass recomputes",
            where="model.recompute",
            fix="model.recompute=none, or speed.compile=none",
            why="both choose what the backward pass recomputes",
        ),
    ),
)


# norm.kind=sync: batch norm over the samples of all ranks, with a collective in each layer.
SYNC_NORM = JobFeature(
    key="norm.kind",
    is_value=True,
    on=lambda config: config.norm.kind == "sync",
    extra_values=("norm.kind=sync",),
    examples=("norm.kind=sync",),
    off="norm.kind=ghost",
    excludes=(
        Exclusion(
            "speed.compile",
            other_than("none", "default"),
            what="{chosen} does not support {set}: torch cannot compile its collectives",
            fix="speed.compile=none, or norm.kind=batch or ghost",
            why="not implemented yet",  # torch.compile would have to exclude these layers
        ),
    ),
)
