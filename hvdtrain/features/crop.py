"""augment.crop: a random crop of the padded image."""

from __future__ import annotations

from hvdtrain.features.job_feature import Exclusion, JobFeature, Values, other_than

CROP = JobFeature(
    key="augment.crop",
    on=lambda config: config.augment.crop > 0,
    examples=("augment.crop=1",),
    off="augment.crop=0",
    without=(
        Exclusion(
            "augment.pad",
            other_than("zeros", "reflect"),
            what="{set} is what augment.crop pads with, and there is no augment.crop",
            fix="augment.crop=2, or leave augment.pad out",
        ),
    ),
    excludes=(
        Exclusion(
            "augment.resized_crop",
            Values(bool, 0.5),
            what="{chosen} and augment.resized_crop={config.augment.resized_crop:g} both crop the image",
            where="augment.crop",
            fix="keep one of them",
            why="both crop the image",
        ),
    ),
)
FEATURES = (CROP,)
