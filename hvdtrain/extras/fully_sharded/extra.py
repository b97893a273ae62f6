"""The registration of shard.stage=3 as an extra."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Divides all weights among ranks (ZeRO 3): FSDP2 in torch, and the same in JAX.",
    implements={"shard.stage=3": "hvdtrain.extras.fully_sharded.by_framework"},
)
