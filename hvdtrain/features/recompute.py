"""model.recompute: forward passes of blocks are made again inside of the backward pass."""

from __future__ import annotations

from hvdtrain.features.job_feature import Exclusion, JobFeature, among, other_than

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
FEATURES = (RECOMPUTE,)
