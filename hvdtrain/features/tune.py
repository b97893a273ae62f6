"""comm.tune: sizes of gradient buckets are measured at the start."""

from __future__ import annotations

from hvdtrain.features.job_feature import Exclusion, JobFeature, above, among

TUNE = JobFeature(
    key="comm.tune",
    on=lambda config: config.comm.tune,
    examples=("comm.tune=true",),
    off="comm.tune=false",
    why="there are no buckets to tune",
    excludes=tuple(
        Exclusion(
            key,
            values,
            what="comm.tune measures bucket sizes; {set} has no buckets to tune",
            where="comm.tune",
            fix="comm.tune=false",
        )
        for key, values in {"comm.local_steps": above(1), "comm.op": among("adasum"), "comm.reduce": among("ddp")}.items()
    ),
)
FEATURES = (TUNE,)
