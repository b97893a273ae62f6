"""Pipeline parallelism: the layers of a model on several ranks, through which micro-batches pass
one after the other."""
