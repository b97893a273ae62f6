"""Pipeline parallelism: the layers of a model are on several ranks, and micro-batches pass through
them one after the other."""
