"""optim.name=package.module:Class: an optimizer of torch.optim or of the user's."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.config.plugins import is_dotted
from hvdtrain.errors import UserError
from hvdtrain.features.job_feature import JobFeature, PlannedJob


def _rate_is_of_the_recipe(job: PlannedJob) -> Iterator[UserError]:
    """Such a class has an option lr."""
    if "lr" in job.config.optim.options:
        yield UserError("optim.lr is not an option: the recipe sets the rate of each step", job.where("optim.lr"), "optim.base_lr=...")


USER_OPTIMIZER = JobFeature(
    key="optim.name",
    on=lambda config: is_dotted(config.optim.name),
    examples=("optim.name=torch.optim.SGD",),
    off="optim.name=sgd",
    rules=(_rate_is_of_the_recipe,),
)
FEATURES = (USER_OPTIMIZER,)
