"""Side channels gather a message of each rank on rank 0 while main threads hang in collectives: over MPI, or over a store."""
