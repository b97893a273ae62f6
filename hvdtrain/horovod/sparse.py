"""Sparse tensors: reduced as gathers of their indices and values."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hvdtrain.horovod.gathers import allgather_async
from hvdtrain.horovod.handles import synchronize
from hvdtrain.horovod.ops import Average
from hvdtrain.horovod.process_sets import ProcessSet, global_process_set


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Begins a sum or an average of sparse tensors, as gathers of their indices and values; what it returns waits for the result."""
    sparse = tensor if tensor.is_coalesced() else tensor.coalesce()
    names = (None, None, None) if name is None else (f"{name}.indices", f"{name}.values", f"{name}.ranks")
    indices = allgather_async(sparse.indices().t().contiguous(), names[0], process_set)
    values = allgather_async(sparse.values(), names[1], process_set)
    givers = allgather_async(torch.ones(1, dtype=torch.int64, device=tensor.device), names[2], process_set)  # ranks that have not joined
    shape = tensor.shape

    def wait() -> torch.Tensor:
        found_values, found_indices, ranks = synchronize(values), synchronize(indices), len(synchronize(givers))
        if op == Average:
            found_values = found_values / ranks
        return torch.sparse_coo_tensor(found_indices.t(), found_values, shape, device=found_values.device, check_invariants=False)

    return wait
