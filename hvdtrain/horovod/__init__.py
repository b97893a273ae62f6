"""Horovod's API for PyTorch on the engines of hvdtrain: `import hvdtrain.horovod as hvd`.
docs/horovod-api.md lists the differences."""

from __future__ import annotations

import importlib
from typing import Any

from hvdtrain.horovod import elastic as elastic
from hvdtrain.horovod.basics import ProcessSet as ProcessSet
from hvdtrain.horovod.basics import add_process_set as add_process_set
from hvdtrain.horovod.basics import ccl_built as ccl_built
from hvdtrain.horovod.basics import check_extension as check_extension
from hvdtrain.horovod.basics import cross_rank as cross_rank
from hvdtrain.horovod.basics import cross_size as cross_size
from hvdtrain.horovod.basics import cuda_built as cuda_built
from hvdtrain.horovod.basics import ddl_built as ddl_built
from hvdtrain.horovod.basics import global_process_set as global_process_set
from hvdtrain.horovod.basics import gloo_built as gloo_built
from hvdtrain.horovod.basics import gloo_enabled as gloo_enabled
from hvdtrain.horovod.basics import init as init
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
from hvdtrain.horovod.call import poll as poll
from hvdtrain.horovod.call import synchronize as synchronize
from hvdtrain.horovod.collectives import allgather as allgather
from hvdtrain.horovod.collectives import allgather_async as allgather_async
from hvdtrain.horovod.collectives import alltoall as alltoall
from hvdtrain.horovod.collectives import alltoall_async as alltoall_async
from hvdtrain.horovod.collectives import broadcast as broadcast
from hvdtrain.horovod.collectives import broadcast_ as broadcast_
from hvdtrain.horovod.collectives import broadcast_async as broadcast_async
from hvdtrain.horovod.collectives import broadcast_async_ as broadcast_async_
from hvdtrain.horovod.collectives import grouped_allgather as grouped_allgather
from hvdtrain.horovod.collectives import grouped_allgather_async as grouped_allgather_async
from hvdtrain.horovod.collectives import grouped_reducescatter as grouped_reducescatter
from hvdtrain.horovod.collectives import grouped_reducescatter_async as grouped_reducescatter_async
from hvdtrain.horovod.collectives import reducescatter as reducescatter
from hvdtrain.horovod.collectives import reducescatter_async as reducescatter_async
from hvdtrain.horovod.collectives import sparse_allreduce_async as sparse_allreduce_async
from hvdtrain.horovod.engine.errors import HorovodInternalError as HorovodInternalError
from hvdtrain.horovod.engine.errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from hvdtrain.horovod.not_built import not_built
from hvdtrain.horovod.objects import allgather_object as allgather_object
from hvdtrain.horovod.objects import broadcast_object as broadcast_object
from hvdtrain.horovod.optimizer import DistributedOptimizer as DistributedOptimizer
from hvdtrain.horovod.parameters import broadcast_optimizer_state as broadcast_optimizer_state
from hvdtrain.horovod.parameters import broadcast_parameters as broadcast_parameters
from hvdtrain.horovod.reductions import allreduce as allreduce
from hvdtrain.horovod.reductions import allreduce_ as allreduce_
from hvdtrain.horovod.reductions import allreduce_async as allreduce_async
from hvdtrain.horovod.reductions import allreduce_async_ as allreduce_async_
from hvdtrain.horovod.reductions import grouped_allreduce as grouped_allreduce
from hvdtrain.horovod.reductions import grouped_allreduce_ as grouped_allreduce_
from hvdtrain.horovod.reductions import grouped_allreduce_async as grouped_allreduce_async
from hvdtrain.horovod.reductions import grouped_allreduce_async_ as grouped_allreduce_async_
from hvdtrain.horovod.sync_batch_norm import SyncBatchNorm as SyncBatchNorm


def __getattr__(name: str) -> Any:
    """Imports Horovod's modules that have no file here. Raises AttributeError for a Horovod name
    that is not implemented."""
    if name in ("compression", "functions", "mpi_ops"):
        # the module imports its names from here
        return importlib.import_module(f"hvdtrain.horovod.torch.{name}")
    if message := not_built(name):
        raise AttributeError(message)
    raise AttributeError(
        f"hvdtrain.horovod has no {name!r}: docs/horovod-api.md lists what it has, and what to "
        "use instead"
    )
