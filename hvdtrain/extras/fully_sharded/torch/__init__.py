"""shard.stage=3 with torch's FSDP2: each rank has its rows of every weight."""
