"""guard.lost: what the living ranks do without one that is lost; shrink needs its state, and a step
that is the same on fewer ranks."""

from __future__ import annotations

from hvdtrain.config.exclusion import Exclusion, Values, above, among
from hvdtrain.features.comm import SETTINGS
from hvdtrain.features.job_feature import JobFeature

ONLY_ON_HOROVOD = {
    "comm.op": among("adasum"),
    "comm.reduce": among("distributed_optimizer"),
    **SETTINGS,
}


def fewer_ranks(
    key: str, values: Values, instead: str = "without {key}", why: str = "", words: str = ""
) -> Exclusion:
    """A row of guard.lost=shrink."""
    return Exclusion(
        key,
        values,
        where="guard.lost",
        fix=f"guard.lost=restart, or {instead}",
        why=why,
        words=words,
    )


LOST = JobFeature(
    key="guard.lost",
    on=lambda config: config.guard.lost != "stop",
    examples=("guard.lost=restart",),
    off="guard.lost=stop",
)
SHRINK = JobFeature(
    key="guard.lost",
    is_value=True,
    on=lambda config: config.guard.lost == "shrink",
    examples=("guard.lost=shrink",),
    off="guard.lost=stop",
    why="the parts of a rank that is lost cannot be divided anew",
    what="{chosen} does not go on with {set} on fewer ranks",
    excludes=(
        fewer_ranks("parallel.tensor", above(1)),
        fewer_ranks("parallel.pipeline", above(1)),
        fewer_ranks("shard.stage", among(3), "shard.stage=2"),
        fewer_ranks("shard.group", among("node"), "shard.group=all", words="shard.stage=1"),
        fewer_ranks(
            "comm.reduce", among("ddp"), why="DDP keeps the process group that it began with"
        ),
        fewer_ranks("comm.local_steps", above(1), why="each rank has weights of its own"),
        *(
            Exclusion(
                key,
                values,
                what="{chosen} does not go on without a rank on the horovod engine, which {set} "
                "needs",
                where="guard.lost",
                fix="guard.lost=stop, or without {key}",
                why="the horovod engine does not go on without a rank",
            )
            for key, values in ONLY_ON_HOROVOD.items()
        ),
        Exclusion(
            "framework",
            among("jax"),
            what="guard.lost=shrink does not go on with {set}, whose step is compiled for a "
            "number of ranks",
            where="guard.lost",
            fix="guard.lost=restart, or framework=torch",
            why="its step is compiled for a number of ranks",
        ),
    ),
)
