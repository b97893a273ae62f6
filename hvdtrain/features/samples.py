"""log.samples: what a language model draws, as images or text."""

from __future__ import annotations

from hvdtrain.features.job_feature import Exclusion, JobFeature, Values, other_than

DRAWN = ("image_tokens", "text")  # data whose tokens can be shown

SAMPLES = JobFeature(
    key="log.samples",
    on=lambda config: config.log.samples > 0,
    examples=("log.samples=2 task.name=language data.name=image_tokens",),
    off="log.samples=0",
    excludes=(
        Exclusion(
            "task.name",
            other_than("language", "regression"),
            what="{chosen} draws tokens; the job has {set}",
            where="log.samples",
            fix="task.name=language, or leave it out",
            why="it draws tokens",
        ),
        Exclusion(
            "data.name",
            Values(lambda name: name not in DRAWN, "mine:tokens"),
            what="{chosen} draws images or text; what tokens of {set} show is not known",
            where="log.samples",
            fix="data.name=image_tokens or text, or leave it out",
            words="task.name=language",
            why="what its tokens show is not known",
        ),
    ),
)
FEATURES = (SAMPLES,)
