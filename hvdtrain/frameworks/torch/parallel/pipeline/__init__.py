"""Pipeline parallelism: the layers of a model on several ranks, through which micro-batches go one
behind the other."""
