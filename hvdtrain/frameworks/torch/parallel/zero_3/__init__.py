"""shard.stage=3: each rank has its rows of every weight, and the whole weights of one block at a
time, by torch's FSDP2."""
