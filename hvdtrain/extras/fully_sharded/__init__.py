"""shard.stage=3: each rank has its part of every weight, and the whole weights of one block at a
time."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Divides all weights among ranks (ZeRO 3): FSDP2 in torch, and the same in JAX.",
    needs=("divided",),
    implements={"shard.stage=3": "hvdtrain.extras.fully_sharded.by_framework"},
)
