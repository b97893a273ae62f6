"""Where horovod.common.process_sets has the process sets."""

from hvdtrain.horovod.basics import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
