"""The section shard: which part of the training state each rank holds."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hvdtrain.config.sections.extra_keys import with_keys_of_extras
from hvdtrain.config.sections.section import Section


@with_keys_of_extras
class ShardConfig(Section):
    """What each rank holds of the training state."""

    section = "shard"
    stage: Literal[0, 1, 2, 3] = Field(
        default=0,
        description="ZeRO (Rajbhandari 2020, arXiv:1910.02054): 0: every rank has everything; 1: "
        "each rank has its part of the optimizer "
        "state; 2: and of the gradients, also between micro-batches; 3: and of the weights, with "
        "one block of the model's `blocks` whole "
        "at a time (framework=torch: FSDP2, not on horovod)",
    )
    group: Literal["all", "node"] = Field(
        default="all",
        description="all: parts over all ranks; node: over the ranks of each host, with copies on "
        "the others, between which only sums of "
        "parts travel (HSDP); every host has equally many ranks",
    )
    reshard: bool = Field(
        default=True,
        description="of stage 3: false keeps whole weights from forward to backward: more memory, "
        "a third less communication",
    )
    offload: Literal["none", "optimizer", "parameters"] = Field(
        default="none",
        description="none: a GPU has everything; optimizer: each rank's optimizer state and its "
        "update are in host memory; "
        "parameters (stage 3): and its parts of the weights. On a CPU nothing moves",
    )
