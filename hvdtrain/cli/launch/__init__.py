"""`launch`: the command line that starts ranks with the MPI or SLURM that is here."""
