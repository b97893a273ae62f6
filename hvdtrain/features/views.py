"""evaluate.views: what the model says of an image is the mean over several views of it."""

from __future__ import annotations

from hvdtrain.features.job_feature import Exclusion, JobFeature, above, other_than

VIEWS = JobFeature(
    key="evaluate.views",
    on=lambda config: config.evaluate.views > 1,
    examples=("evaluate.views=2",),
    off="evaluate.views=1",
    excludes=(
        Exclusion(
            "task.name",
            other_than("classification", "regression"),
            what="{chosen} is of images of classes; the job has {set}",
            where="evaluate.views",
            fix="task.name=classification, or leave it out",
            why="views are of images of classes",
        ),
        Exclusion(
            "parallel.pipeline",
            above(1),
            what="{chosen} averages the outputs of several passes, which {set} does not keep",
            where="evaluate.views",
            fix="evaluate.views=1, and `evaluate RUN evaluate.views=6` afterwards",
            why="a pipeline does not keep the outputs of several passes",
        ),
    ),
)
FEATURES = (VIEWS,)
