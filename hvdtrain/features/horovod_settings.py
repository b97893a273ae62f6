"""comm.hierarchical, comm.cycle_ms and comm.fusion_mb: settings of Horovod."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from hvdtrain.errors import UserError
from hvdtrain.features.job_feature import Exclusion, JobFeature, PlannedJob, Rule, Values, When, among, other_than

SETTINGS: dict[str, Values] = {
    "comm.hierarchical": among(True),
    "comm.cycle_ms": other_than(None, 1.0),
    "comm.fusion_mb": other_than(None, 1.0),
}


def not_on_horovod(when: When | None = None, words: str = "", keys: Collection[str] = SETTINGS.keys()) -> tuple[Exclusion, ...]:
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
FEATURES = (HIERARCHICAL, CYCLE, FUSION)
