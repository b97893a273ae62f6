"""The recipe: its keys that contradict each other, as recipe/conflicts.py judges them."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.errors import UserError
from hvdtrain.features.job_feature import JobFeature, PlannedJob, always
from hvdtrain.recipe.conflicts import recipe_conflicts


def _contradictions(job: PlannedJob) -> Iterator[UserError]:
    yield from recipe_conflicts(job.config)


RECIPE = JobFeature(key="recipe.schedule", on=always, rules=(_contradictions,))
FEATURES = (RECIPE,)
