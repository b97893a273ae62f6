"""Horovod's API for Keras 3 on the engines of hvdtrain, whatever its backend: `import
hvdtrain.horovod.keras as hvd`."""

from __future__ import annotations

import importlib.util
from typing import Any

if importlib.util.find_spec("keras") is None:
    raise ImportError("hvdtrain.horovod.keras needs Keras 3\n  fix: pip install 'hvdtrain[keras]'")

from hvdtrain.horovod.basics import ProcessSet as ProcessSet
from hvdtrain.horovod.basics import add_process_set as add_process_set
from hvdtrain.horovod.basics import ccl_built as ccl_built
from hvdtrain.horovod.basics import cross_rank as cross_rank
from hvdtrain.horovod.basics import cross_size as cross_size
from hvdtrain.horovod.basics import cuda_built as cuda_built
from hvdtrain.horovod.basics import ddl_built as ddl_built
from hvdtrain.horovod.basics import global_process_set as global_process_set
from hvdtrain.horovod.basics import gloo_built as gloo_built
from hvdtrain.horovod.basics import gloo_enabled as gloo_enabled
from hvdtrain.horovod.basics import is_homogeneous as is_homogeneous
from hvdtrain.horovod.basics import is_initialized as is_initialized
from hvdtrain.horovod.basics import local_rank as local_rank
from hvdtrain.horovod.basics import local_size as local_size
from hvdtrain.horovod.basics import mpi_built as mpi_built
from hvdtrain.horovod.basics import mpi_enabled as mpi_enabled
from hvdtrain.horovod.basics import mpi_threads_supported as mpi_threads_supported
from hvdtrain.horovod.basics import nccl_built as nccl_built
from hvdtrain.horovod.basics import rank as rank
from hvdtrain.horovod.basics import remove_process_set as remove_process_set
from hvdtrain.horovod.basics import rocm_built as rocm_built
from hvdtrain.horovod.basics import shutdown as shutdown
from hvdtrain.horovod.basics import size as size
from hvdtrain.horovod.basics import start_timeline as start_timeline
from hvdtrain.horovod.basics import stop_timeline as stop_timeline
from hvdtrain.horovod.basics import sycl_built as sycl_built
from hvdtrain.horovod.call import Adasum as Adasum
from hvdtrain.horovod.call import Average as Average
from hvdtrain.horovod.call import Compression as Compression
from hvdtrain.horovod.call import Max as Max
from hvdtrain.horovod.call import Min as Min
from hvdtrain.horovod.call import Product as Product
from hvdtrain.horovod.call import Sum as Sum
from hvdtrain.horovod.call import barrier as barrier
from hvdtrain.horovod.call import join as join
from hvdtrain.horovod.engine.errors import HorovodInternalError as HorovodInternalError
from hvdtrain.horovod.engine.errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from hvdtrain.horovod.keras import callbacks as callbacks
from hvdtrain.horovod.keras import elastic as elastic

# courses and older scripts call it hvd.BroadcastGlobalVariablesCallback
from hvdtrain.horovod.keras.callbacks import (
    BroadcastGlobalVariablesCallback as BroadcastGlobalVariablesCallback,
)
from hvdtrain.horovod.keras.calls import allgather as allgather
from hvdtrain.horovod.keras.calls import allreduce as allreduce
from hvdtrain.horovod.keras.calls import alltoall as alltoall
from hvdtrain.horovod.keras.calls import broadcast as broadcast
from hvdtrain.horovod.keras.calls import init as init
from hvdtrain.horovod.keras.calls import reducescatter as reducescatter
from hvdtrain.horovod.keras.optimizer import DistributedOptimizer as DistributedOptimizer
from hvdtrain.horovod.keras.optimizer import (
    PartialDistributedOptimizer as PartialDistributedOptimizer,
)
from hvdtrain.horovod.keras.optimizer import load_model as load_model
from hvdtrain.horovod.keras.sync_batch_norm import SyncBatchNormalization as SyncBatchNormalization
from hvdtrain.horovod.not_built import not_built
from hvdtrain.horovod.objects import allgather_object as allgather_object
from hvdtrain.horovod.objects import broadcast_object as broadcast_object
from hvdtrain.horovod.traced.variables import (
    broadcast_global_variables as broadcast_global_variables,
)
from hvdtrain.horovod.traced.variables import broadcast_variables as broadcast_variables


def __getattr__(name: str) -> Any:
    """Raises AttributeError for a Horovod name that is not implemented."""
    if message := not_built(name):
        raise AttributeError(message)
    raise AttributeError(f"hvdtrain.horovod.keras has no {name!r}: docs/keras.md lists what it has")
