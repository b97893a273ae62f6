"""The names that hvdtrain's frameworks ask for, as "module:name"."""

ARRANGEMENT = "hvdtrain.extras.fully_sharded.torch.arrangement:ShardedRows"
BLOCK_PASSES = "hvdtrain.extras.fully_sharded.jax.block_passes:block_passes"
