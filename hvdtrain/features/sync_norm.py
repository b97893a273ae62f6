"""norm.kind=sync: batch norm over the samples of all ranks, by a collective in each layer."""

from __future__ import annotations

from hvdtrain.features.job_feature import Exclusion, JobFeature, other_than

SYNC_NORM = JobFeature(
    key="norm.kind",
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
FEATURES = (SYNC_NORM,)
