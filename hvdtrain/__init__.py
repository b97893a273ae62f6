"""hvdtrain: trains deep networks on many workers, with Horovod or MPI between them and any framework inside one."""

__version__ = "0.1.0"
