"""hvdtrain replay: the updates of an asynchronous job again, in one process."""
