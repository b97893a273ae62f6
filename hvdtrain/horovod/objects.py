"""Objects of one rank, or of each, on all."""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.gathers import allgather
from hvdtrain.horovod.job import JOB
from hvdtrain.horovod.object_forms import packed, unpacked
from hvdtrain.horovod.process_sets import ProcessSet, global_process_set


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """The object of rank `root_rank`, on that rank itself. It is sent as data (JSON, tensors as bytes), never as pickled code.

    Raises ValueError on the root where the object is no data: an instance of a class of one's own.
    """
    where = f"broadcast_object {name!r}"
    ranks = process_set.ranks or []
    if root_rank not in ranks:
        raise BadCall(f"invalid root rank {root_rank} for the process set of ranks {ranks[:16]}", where, "one of these ranks")
    is_root = JOB.engine.rank == root_rank
    content = _as_bytes(packed(obj, where) if is_root else b"")
    found = allgather(content, JOB.name("broadcast_object", name, process_set.process_set_id), process_set)
    return obj if is_root else unpacked(found.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The objects of all ranks, in their order, as broadcast_object() sends them."""
    name = JOB.name("allgather_object", name, process_set.process_set_id)
    content = _as_bytes(packed(obj, f"allgather_object {name!r}"))
    lengths = allgather(torch.tensor([len(content)]), f"{name}.lengths", process_set).tolist()
    parts = allgather(content, name, process_set).split(lengths)
    return [unpacked(part.numpy().tobytes()) for part in parts]


def _as_bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
