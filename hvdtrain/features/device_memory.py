"""comm.device_memory: whether MPI gets tensors on GPUs as they are."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.errors import UserError
from hvdtrain.features.job_feature import JobFeature, PlannedJob

KEY = "comm.device_memory"


def _of_mpi_and_gpus(job: PlannedJob) -> Iterator[UserError]:
    wish = job.config.comm.device_memory
    if "plain_mpi" not in job.features:
        what = f"{KEY}={wish} is of the mpi engine; this is the {job.engine} engine"
        yield UserError(what, job.where(KEY), f"leave {KEY} out, or comm.engine=mpi")
    if job.config.speed.device == "cpu":
        what = f"{KEY}={wish} is of tensors on GPUs; this is speed.device=cpu"
        yield UserError(what, job.where(KEY), f"leave {KEY} out")


# Without examples: it changes nothing where no rank has a GPU, so pairs with it would show nothing in docs/combinations.md.
DEVICE_MEMORY = JobFeature(
    key=KEY,
    on=lambda config: config.comm.device_memory != "auto",
    off="comm.device_memory=auto",
    rules=(_of_mpi_and_gpus,),
)
FEATURES = (DEVICE_MEMORY,)
