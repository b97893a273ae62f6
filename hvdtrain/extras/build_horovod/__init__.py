"""hvdtrain horovod: builds Horovod for the installed torch and MPI, installs and
verifies it."""
