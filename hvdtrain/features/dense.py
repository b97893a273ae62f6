"""parallel.dense: each rank has a part of the dense layers, and the owner's part of all other training state (ZeRO stage 1 or 2)."""

from __future__ import annotations

from hvdtrain.features.job_feature import Exclusion, JobFeature, above, among, other_than

DENSE = JobFeature(
    key="parallel.dense",
    on=lambda config: config.parallel.dense != "none",
    examples=("parallel.dense=a", "parallel.dense=b", "parallel.dense=c"),
    off="parallel.dense=none",
    why="a rank has gradients of its part of the dense layers for all samples",
    without=(
        Exclusion(
            "parallel.dense_updates",
            above(1),
            what="{set} is of a dense part; this is parallel.dense=none",
            fix="parallel.dense=c, also on one rank; or leave it out",
        ),
    ),
    excludes=(
        *(
            Exclusion(
                key,
                above(1),
                what="{chosen} and {mesh} both divide layers: parallel.dense over all ranks",
                where="parallel.dense",
                fix="keep one of them",
                why="both divide layers over all ranks",
            )
            for key in ("parallel.tensor", "parallel.pipeline")
        ),
        Exclusion(
            "shard.stage",
            among(3),
            what="{chosen} keeps whole convolutions on every rank, which {set} cuts",
            fix="shard.stage=2, or parallel.dense=none",
            why="every rank keeps whole convolutions",
        ),
        Exclusion("comm.op", among("adasum")),
        Exclusion("comm.local_steps", above(1)),
        Exclusion("comm.compression", other_than("none", "fp16")),
        Exclusion("comm.reduce", among("ddp", "distributed_optimizer", "bucket")),
        Exclusion("comm.tune", among(True), why="not made yet"),
        Exclusion("shard.group", other_than("all", "node"), words="shard.stage=1"),
        Exclusion("shard.offload", other_than("none", "optimizer"), words="shard.stage=1", why="not made yet"),
        Exclusion("norm.kind", among("sync")),
        Exclusion("model.recompute", other_than("none", "all"), why="not made yet"),
        Exclusion("log.noise_scale", among(True)),
        Exclusion("speed.compile", other_than("none", "default"), why="not made yet"),
    ),
)
FEATURES = (DENSE,)
