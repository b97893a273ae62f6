"""`launch`: starts ranks with the MPI or SLURM of this machine, again and again with --elastic."""
