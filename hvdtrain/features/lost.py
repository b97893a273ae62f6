"""guard.lost: what the remaining ranks do when a rank dies. shrink needs that rank's state, and a
step that works on fewer ranks."""

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
    """Returns a row of guard.lost=shrink."""
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
    is_extra=True,
    own_loop="hvdtrain.run(train, {...}) has guard.lost=shrink: train(ctx) is the loop; launch "
    "--elastic starts scripts again",
)
IN_RUN = "shrink"  # the only value that a custom loop supports, called by hvdtrain.run()
SHRINK = JobFeature(
    key="guard.lost",
    is_value=True,
    on=lambda config: config.guard.lost == "shrink",
    examples=("guard.lost=shrink",),
    off="guard.lost=stop",
    is_extra=True,
    why="the partition of a dead rank cannot be recovered",
    what="{chosen} cannot continue on fewer ranks with {set}",
    excludes=(
        fewer_ranks("shard.stage", among(3), "shard.stage=2"),
        fewer_ranks("shard.group", among("node"), "shard.group=all", words="shard.stage=1"),
        fewer_ranks("comm.reduce", among("ddp"), why="DDP keeps its initial process group"),
        fewer_ranks("comm.local_steps", above(1), why="each rank has its own weights"),
        *(
            Exclusion(
                key,
                values,
                what="{chosen} does not support {set}, which needs the horovod engine: it cannot "
                "continue without a rank",
                where="guard.lost",
                fix="guard.lost=stop, or without {key}",
                why="the horovod engine cannot continue without a rank",
            )
            for key, values in ONLY_ON_HOROVOD.items()
        ),
        Exclusion(
            "framework",
            among("jax"),
            what="guard.lost=shrink does not support {set}, whose step is compiled for a fixed "
            "number of ranks",
            where="guard.lost",
            fix="guard.lost=restart, or framework=torch",
            why="its step is compiled for a fixed number of ranks",
        ),
    ),
)
