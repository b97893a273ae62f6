"""How collectives of Horovod's kind are queued, agreed on by the ranks, fused, and made by a
communicator."""
