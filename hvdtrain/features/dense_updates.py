"""parallel.dense_updates: several updates of the dense part in a step, so that each sample is in one turn, which its place says."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.config.plugins import is_dotted
from hvdtrain.errors import UserError
from hvdtrain.features.job_feature import Exclusion, JobFeature, PlannedJob, Values, other_than


def _has_turns(job: PlannedJob) -> Iterator[UserError]:
    config, chosen, key = job.config, f"parallel.dense_updates={job.config.parallel.dense_updates}", "parallel.dense_updates"
    if config.parallel.dense == "a":
        yield UserError(f"{chosen} needs turns; parallel.dense=a has all samples in one", job.where(key), "parallel.dense=c or b")
    if config.batch.size < config.parallel.dense_updates:
        what = f"batch {config.batch.size} does not split into the turns of {chosen}: some would have no sample"
        yield UserError(what, job.where(key), f"parallel.dense_updates={config.batch.size} or fewer")


DENSE_UPDATES = JobFeature(
    key="parallel.dense_updates",
    on=lambda config: config.parallel.dense != "none" and config.parallel.dense_updates > 1,
    examples=("parallel.dense_updates=2 parallel.dense=c",),
    off="parallel.dense_updates=1",
    why="the dense part is updated several times in a step, the convolutions once",
    first=(_has_turns,),
    excludes=(
        Exclusion(
            "optim.name",
            Values(is_dotted, "torch.optim.SGD"),
            what="{chosen} updates some of the parameters by themselves; whether {config.optim.name} counts its steps right is not known",
            fix="an optimizer of hvdtrain's own: sgd, adam, lars ...; or parallel.dense_updates=1",
            why="whether a class counts its steps right is not known",
        ),
        Exclusion("batch.micro", other_than(None, 8)),
        Exclusion("recipe.growth", other_than("none", "milestones"), words="recipe.grow_at=[1] recipe.grow_to=[512]"),  # by micro-batches
        Exclusion("recipe.gradient_noise", Values(lambda eta: eta > 0, 0.01)),
        Exclusion("data.sampling", other_than("global", "partition")),
    ),
)
FEATURES = (DENSE_UPDATES,)
