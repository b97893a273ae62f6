"""data.readers: threads that read steps ahead."""

from __future__ import annotations

from hvdtrain.features.job_feature import Exclusion, JobFeature, among

READERS = JobFeature(
    key="data.readers",
    on=lambda config: bool(config.data.readers),
    examples=("data.readers=2",),
    off="data.readers=null",
    excludes=(
        Exclusion(
            "data.ahead",
            among(0),
            what="{chosen} threads read steps ahead, and {set} reads none ahead",
            where="data.readers",
            fix="data.ahead=2, or leave data.readers out",
            why="without steps ahead threads have nothing to read",
        ),
    ),
)
FEATURES = (READERS,)
