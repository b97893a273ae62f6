"""Queues, negotiates and fuses Horovod-style collectives, and runs them on a communicator."""
