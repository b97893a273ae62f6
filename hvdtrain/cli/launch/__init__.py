"""`launch`: the command line that starts ranks with the MPI or SLURM of this machine."""
