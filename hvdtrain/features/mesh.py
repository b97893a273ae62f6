"""parallel.tensor and parallel.pipeline: several ranks have parts of one model, and read the same samples."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.features.job_feature import Exclusion, JobFeature, PlannedJob, above, among, other_than, value_of


def _divides_ranks(job: PlannedJob) -> Iterator[UserError]:
    parallel = job.config.parallel
    if job.ranks % parallel.ranks:
        key = "parallel.tensor" if parallel.tensor > 1 else "parallel.pipeline"
        what = f"{parallel.summary()} does not divide the {job.ranks} ranks of the job"
        yield UserError(what, job.where(key), f"a multiple of {parallel.ranks} ranks, or another {key}")


def _whole(config: Config) -> str:
    return " ".join(f"{key}=1" for key in ("parallel.tensor", "parallel.pipeline") if value_of(config, key) > 1)


MESH = JobFeature(
    key="parallel.tensor",
    on=lambda config: config.parallel.ranks > 1,
    examples=("parallel.tensor=2",),
    chosen=lambda config: config.parallel.summary(),
    off=_whole,
    why="no rank has the whole model",
    first=(_divides_ranks,),
    excludes=(
        Exclusion("comm.op", among("adasum"), why="a rank has gradients of its part alone"),
        Exclusion("comm.local_steps", above(1), why="not made yet"),
        Exclusion("comm.reduce", among("ddp", "distributed_optimizer"), why="these reduce over all ranks"),
        Exclusion("comm.tune", among(True), why="not made yet"),
        Exclusion("comm.hierarchical", among(True), why="it is of all ranks"),
        Exclusion("shard.group", other_than("all", "node"), words="shard.stage=1", why="a mesh has groups of its own"),
        Exclusion("shard.offload", other_than("none", "optimizer"), words="shard.stage=1", why="not made yet"),
        Exclusion("norm.kind", among("sync"), why="not made yet"),
        Exclusion("log.noise_scale", among(True), why="a rank has gradients of its part alone"),
        Exclusion("speed.compile", other_than("none", "default"), why="not made yet"),
        Exclusion("batch.micro", among("auto"), why="not made yet"),
    ),
)
FEATURES = (MESH,)
