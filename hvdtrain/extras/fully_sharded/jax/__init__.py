"""shard.stage=3 in JAX: passes that have the whole weights of one block at a time."""
