"""`python -m hvdtrain.cli.horovod`: builds Horovod against the torch and MPI that are here, and proves it."""
