"""batch.micro, model.recompute and norm.kind=sync: how the passes of a step are made."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.config.exclusion import Exclusion, among, other_than
from hvdtrain.errors import UserError
from hvdtrain.features.job_feature import JobFeature, PlannedJob


def _passes_of_sync_norm(job: PlannedJob) -> Iterator[UserError]:
    """A synchronized norm is over the samples of all ranks in a pass; of a rank's share in several
    passes they depend on the ranks."""
    config = job.config
    micro = job.config.batch.micro
    if config.norm.kind != "sync":
        return
    largest = max(config.batch.size, *config.recipe.grow_to, config.recipe.batch_max or 0)
    share = -(-largest // max(1, config.readers(job.ranks)))
    if isinstance(micro, int) and share <= micro and config.data.sampling == "global":
        return
    what = (
        f"batch.micro={micro} makes the passes of a step, over each of which norm.kind=sync "
        "normalizes, depend on the number of ranks"
    )
    fix = (
        "leave batch.micro out: a batch that grows has the same passes on any number of ranks; or "
        "norm.kind=batch or ghost"
    )
    yield UserError(what, job.where("batch.micro"), fix)


MICRO = JobFeature(
    key="batch.micro",
    on=lambda config: config.batch.micro is not None,
    examples=("batch.micro=3", "batch.micro=auto"),
    off="batch.micro=null",
    excludes=(
        Exclusion(
            "framework",
            other_than("torch", "jax"),
            what="batch.micro=auto needs a prediction of the memory, which {set} does not have",
            where="batch.micro",
            fix="batch.micro=N, or framework=torch",
            when=lambda config: config.batch.micro == "auto",
            words="batch.micro=auto",
            why="it has no prediction of the memory",
        ),
    ),
    rules=(_passes_of_sync_norm,),
)


# model.recompute: forward passes of blocks are made again inside of the backward pass.
RECOMPUTE = JobFeature(
    key="model.recompute",
    on=lambda config: config.model.recompute != "none",
    examples=("model.recompute=all",),
    off="model.recompute=none",
    excludes=(
        Exclusion(
            "norm.kind",
            among("sync"),
            what="{chosen} computes norms again, and with {set} each time on all ranks",
            where="model.recompute",
            fix="norm.kind=batch or ghost, or model.recompute=none",
            why="norms would be computed again on all ranks",
        ),
        Exclusion(
            "speed.compile",
            other_than("none", "default"),
            what="{set} chooses itself what the backward pass computes again, {chosen} too",
            where="model.recompute",
            fix="model.recompute=none, or speed.compile=none",
            why="both choose what the backward pass computes again",
        ),
    ),
)


# norm.kind=sync: batch norm over the samples of all ranks, by a collective in each layer.
SYNC_NORM = JobFeature(
    key="norm.kind",
    is_value=True,
    on=lambda config: config.norm.kind == "sync",
    examples=("norm.kind=sync",),
    off="norm.kind=ghost",
    excludes=(
        Exclusion(
            "speed.compile",
            other_than("none", "default"),
            what="{set} traces into the collectives of {chosen}, which torch does not compile",
            fix="speed.compile=none, or norm.kind=batch or ghost",
            why="not made yet",  # torch.compile needs to be told to leave these layers out
        ),
    ),
)
