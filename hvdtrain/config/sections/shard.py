"""The section shard: which part of the training state each rank holds."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hvdtrain.config.sections.extra_keys import with_keys_of_extras
from hvdtrain.config.sections.section import Section


@with_keys_of_extras
class ShardConfig(Section):
    """The part of the training state that each rank holds."""

    section = "shard"
    stage: Literal[0, 1, 2, 3] = Field(
        default=0,
        description="ZeRO stage (Rajbhandari 2020, arXiv:1910.02054); 0: every rank has "
        "everything; 1: optimizer state is sharded; 2: gradients too, also "
        "between micro-batches; 3: weights too, and one block of the model's "
        "`blocks` is gathered at a time (framework=torch: FSDP2, not on horovod)",
    )
    group: Literal["all", "node"] = Field(
        default="all",
        description="all: shard over all ranks; node: shard over the ranks of each host and "
        "replicate across hosts, between which only reduced shards are sent "
        "(HSDP); every host must have the same number of ranks",
    )
    reshard: bool = Field(
        default=True,
        description="with shard.stage=3; false: keep gathered weights from the forward to the "
        "backward pass, which needs more memory and a third less communication",
    )
    offload: Literal["none", "optimizer", "parameters"] = Field(
        default="none",
        description="what is kept in host memory; none: nothing; optimizer: each rank's "
        "optimizer state, which is updated there; parameters: its shard of the "
        "weights too (shard.stage=3). Has no effect on a CPU",
    )
