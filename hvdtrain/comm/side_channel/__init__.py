"""Texts of all ranks brought to rank 0 while their main threads hang in collectives: over MPI, or over a store."""
