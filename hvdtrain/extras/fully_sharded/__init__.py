"""shard.stage=3: each rank has its part of every weight, and the whole weights of one block at a
time."""
