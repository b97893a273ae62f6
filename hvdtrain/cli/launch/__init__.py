"""`launch`: the command line that starts ranks with the MPI or SLURM of this machine; `--elastic`:
a supervisor that starts them again."""
