"""comm.compression_rank: gradients are reduced as matrices of low rank."""

from __future__ import annotations

from hvdtrain.config.exclusion import Exclusion, above, among, other_than
from hvdtrain.config.schema import Config
from hvdtrain.extras.powersgd.keys import PowerSgdKeys
from hvdtrain.features import frameworks, lost, optim, reduce
from hvdtrain.features.job_feature import JobFeature
from hvdtrain.features.of_extras import Added, AddedRows

_KEY = "comm.compression_rank"
_PARTS = "a rank does not have all gradients of a matrix"


def _is_on(config: Config) -> bool:
    return PowerSgdKeys.of(config).compression_rank > 0


POWERSGD = JobFeature(
    key=_KEY,
    on=_is_on,
    arrangement="hvdtrain.extras.powersgd.arrangement:PowerSgd",
    examples=("comm.compression_rank=2",),
    off="comm.compression_rank=0",
    why="both define how gradients are reduced",
    excludes=(
        Exclusion("comm.compression", other_than("none", "fp16")),
        Exclusion("comm.op", among("adasum")),
        Exclusion("comm.local_steps", above(1), why="local SGD reduces weights, not gradients"),
        Exclusion("comm.reduce", among("ddp", "distributed_optimizer", "bucket")),
        Exclusion("comm.tune", among(True), why="there are no buckets to tune"),
        Exclusion("shard.stage", above(0), why=_PARTS),
        Exclusion("parallel.tensor", above(1), why=_PARTS),
        Exclusion("parallel.pipeline", above(1), why=_PARTS),
        Exclusion("parallel.context", above(1), why="not implemented yet"),
        Exclusion("parallel.dense", other_than("none", "a"), why=_PARTS),
        Exclusion("servers.count", above(0), why="gradients are not reduced over ranks"),
        Exclusion(
            "speed.precision",
            among("fp16"),
            what="{chosen} keeps part of a gradient for the next step, but {set} may change the "
            "scale of the loss in between",
            where=_KEY,
            fix="speed.precision=bf16, or comm.compression_rank=0",
            why="the scale of the loss may change between two steps",
        ),
        Exclusion(
            "guard.nonfinite",
            among("skip"),
            what="{chosen} keeps part of a gradient for the next step, so {set} could not skip it",
            where=_KEY,
            fix="guard.nonfinite=stop or rollback, or comm.compression_rank=0",
            why="part of the skipped gradient would be in the next one",
        ),
        Exclusion(
            "log.noise_scale",
            among(True),
            what="log.noise_scale compares each rank's gradient with their mean, which {chosen} "
            "does not compute",
            where=_KEY,
            fix="comm.compression_rank=0, or log.noise_scale=false",
            why="the mean of gradients is not computed",
        ),
    ),
)

FEATURES = (Added((POWERSGD,), behind=reduce.COMPRESSION),)

ROWS = (
    AddedRows(
        (frameworks.JAX, frameworks.NUMPY, frameworks.KERAS),
        frameworks.excluded({_KEY: frameworks.Supported((0,), 2)}),
        behind="comm.compression",
    ),
    AddedRows(
        (optim.THAW,),
        (Exclusion(_KEY, above(0), where="model.thaw"),),
        behind="comm.local_steps",
    ),
    AddedRows(
        (lost.SHRINK,),
        (lost.fewer_ranks(_KEY, above(0), why="each rank keeps a part of its gradients"),),
        behind="comm.local_steps",
    ),
)
