"""Objects of one rank, or of each, on all."""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.errors import first_line
from hvdtrain.horovod.collectives import allgather
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.job import JOB
from hvdtrain.horovod.object_forms import packed, unpacked
from hvdtrain.horovod.process_sets import ProcessSet, global_process_set


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """The object of rank `root_rank`, on that rank itself. It is sent as data (JSON, tensors as bytes), never as pickled code.

    Raises ValueError on every rank where the object is no data: an instance of a class of one's own.
    """
    where = f"broadcast_object {name!r}"
    ranks = process_set.ranks or []
    if root_rank not in ranks:
        raise BadCall(f"invalid root rank {root_rank} for the process set of ranks {ranks[:16]}", where, "one of these ranks")
    is_root = JOB.engine.rank == root_rank
    content = _as_bytes(_content(obj, where) if is_root else b"")
    of_root = f"{JOB.name('broadcast_object', name, process_set.process_set_id)} of rank {root_rank}"  # roots that differ are told
    found = allgather(content, of_root, process_set)
    sent = _received(found, where)
    return obj if is_root else sent


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The objects of all ranks, in their order, as broadcast_object() sends them."""
    name = JOB.name("allgather_object", name, process_set.process_set_id)
    where = f"allgather_object {name!r}"
    content = _as_bytes(_content(obj, where))
    lengths = allgather(torch.tensor([len(content)], device="cpu"), f"{name}.lengths", process_set).tolist()
    parts = allgather(content, name, process_set).split(lengths)
    return [_received(part, where) for part in parts]


def _content(obj: Any, where: str) -> bytes:
    """The bytes to send; of an object that cannot be sent the error, which every rank raises: the others wait for something."""
    try:
        return b"+" + packed(obj, where)
    except BadCall as error:
        return b"-" + packed((f"rank {JOB.engine.rank}: {error.what}", error.fix), where)
    except Exception as error:  # as the RecursionError of a list that contains itself
        what = f"rank {JOB.engine.rank}: {type(obj).__name__} cannot be sent: {type(error).__name__}: {first_line(error)}"
        return b"-" + packed((what, "plain values, arrays and tensors in containers"), where)


def _received(content: torch.Tensor, where: str) -> Any:
    found = content.numpy().tobytes()
    if found[:1] == b"-":
        what, fix = unpacked(found[1:])
        raise BadCall(what, where, fix)
    return unpacked(found[1:])


def _as_bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8, device="cpu")
