"""Several labels of a sample: the task and its part in torch."""
