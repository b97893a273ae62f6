"""The engine that is Horovod itself: each request is one call of horovod.torch."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.horovod import GROUPS, connect
from hvdtrain.comm.launcher_variables import Placement
from hvdtrain.config.sections.comm import CommConfig
from hvdtrain.horovod.engine.errors import BadCall, HorovodInternalError
from hvdtrain.horovod.engine.requests import GLOBAL, Request, Signature

# Unsupported dtype -> the dtype passed to Horovod: bytes for copies, a wider type for sums.
_MOVED_AS = {
    torch.bool: torch.uint8,
    torch.bfloat16: torch.int16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
_REDUCED_AS = {
    torch.bfloat16: torch.float32,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
}


class HorovodEngine:
    """The engine that passes requests to Horovod, with Horovod's messages and stall check."""

    def __init__(self, place: Placement) -> None:
        os.environ.setdefault(GROUPS, "1")
        self._communicator: Communicator = connect(place, CommConfig())
        import horovod.torch as hvd

        self._hvd = hvd
        self.name = f"horovod on {'MPI' if hvd.mpi_enabled() else 'Gloo'}"
        self.secret = self._communicator.secret
        self.rank = hvd.rank()
        self.size = hvd.size()
        self.local_rank = hvd.local_rank()
        self.local_size = hvd.local_size()
        self.cross_rank = hvd.cross_rank()
        self.cross_size = hvd.cross_size()
        self.is_homogeneous = (
            len(set(hvd.allgather(torch.tensor([self.local_size], device="cpu")).tolist())) == 1
        )
        self._ops = {
            "average": hvd.Average,
            "sum": hvd.Sum,
            "adasum": hvd.Adasum,
            "min": hvd.Min,
            "max": hvd.Max,
            "product": hvd.Product,
        }
        self._sets = {GLOBAL: hvd.global_process_set}
        self._handles: dict[int, tuple[Request, Any]] = {}
        self._numbers = itertools.count(1)

    def submit(self, set_id: int, request: Request) -> int:
        if self.rank not in self.ranks_of(set_id):
            what = (
                f"rank {self.rank} is not a member of the process set of ranks "
                f"{self.ranks_of(set_id)}"
            )
            raise BadCall(
                what,
                request.signature.where,
                "call it only on these ranks: process_set.included()",
            )
        handle = next(self._numbers)
        self._handles[handle] = request, _Under(self._hvd, self._sets[set_id], self._ops, request)
        return handle

    def poll(self, handle: int) -> bool:
        return bool(self._handles[handle][1].is_done())

    def wait(self, handle: int) -> Any:
        request, under_way = self._handles.pop(handle)
        try:
            return under_way.results()
        except RuntimeError as error:
            raise HorovodInternalError(f"{request.signature.where}: {error}") from error

    def join(self) -> int:
        return int(self._hvd.join())

    def add_set(self, ranks: Sequence[int]) -> int:
        if any(members.ranks == list(ranks) for members in self._sets.values()):
            raise BadCall(
                f"a process set of ranks {list(ranks)} already exists",
                "hvd.add_process_set()",
                "use that one",
            )
        added = self._hvd.add_process_set(list(ranks))
        self._sets[added.process_set_id] = added
        return int(added.process_set_id)

    def remove_set(self, set_id: int) -> bool:
        return (
            set_id != GLOBAL
            and set_id in self._sets
            and bool(self._hvd.remove_process_set(self._sets.pop(set_id)))
        )

    def ranks_of(self, set_id: int) -> list[int]:
        if set_id not in self._sets:
            raise BadCall(
                "this process set was not added, or was removed",
                f"process set {set_id}",
                "hvd.add_process_set()",
            )
        return list(self._sets[set_id].ranks)

    def be_ready_to_shrink(self) -> None:
        """Does nothing, because Horovod's elastic jobs need its launcher and state."""

    def confirm(self) -> None:
        """Does nothing."""

    def recover(self, error: BaseException) -> None:
        raise error

    def start_timeline(self, path: str, *, mark_cycles: bool) -> None:
        self._hvd.start_timeline(path, mark_cycles)  # a ValueError without HOROVOD_TIMELINE=DYNAMIC

    def stop_timeline(self) -> None:
        self._hvd.stop_timeline()

    def leave(self) -> None:
        """Does nothing: Horovod shuts down at exit, and cannot start again after a shutdown."""

    def abort(self, code: int) -> NoReturn:
        self._communicator.abort(code)


class _Under:
    """A pending request."""

    def __init__(self, hvd: Any, process_set: Any, ops: dict[str, Any], request: Request) -> None:
        self._hvd = hvd
        self._request = request
        self._set = process_set
        self._op = ops.get(request.signature.op)
        self._index = process_set.ranks.index(hvd.rank())
        signature = request.signature
        kind = request.signature.kind
        reduces = kind in ("allreduce", "reducescatter")
        self._wires = [
            _as_reduced(x, signature) if reduces else _as_moved(x) for x in request.inputs
        ]
        one = len(self._wires) == 1
        self._handles = [
            self._start(wire, signature.name if one else f"{signature.name}.{i}")
            for i, wire in enumerate(self._wires)
        ]

    def _start(self, wire: torch.Tensor, name: str) -> Any:
        hvd = self._hvd
        signature = self._request.signature
        group = self._set
        match signature.kind:
            case "allreduce":
                factors = signature.prescale, signature.postscale
                return hvd.allreduce_async(wire, None, name, self._op, *factors, process_set=group)
            case "reducescatter":
                factors = signature.prescale, signature.postscale
                return hvd.reducescatter_async(wire, name, self._op, group, *factors)
            case "allgather":
                return hvd.allgather_async(wire, name, group)
            case "broadcast":
                return hvd.broadcast_async(wire, signature.root, name, group)
            case "alltoall":
                return hvd.alltoall_async(
                    wire,
                    torch.tensor(self._request.splits, dtype=torch.int32, device="cpu"),
                    name,
                    group,
                )
        raise AssertionError(signature.kind)

    def is_done(self) -> bool:
        return all(self._hvd.poll(handle) for handle in self._handles)

    def results(self) -> list[Any]:
        if self._request.signature.kind == "barrier":
            self._hvd.barrier(self._set)
            return []
        found = [self._hvd.synchronize(handle) for handle in self._handles]
        return [self._result(index, wire) for index, wire in enumerate(found)]

    def _result(self, index: int, wire: Any) -> Any:
        source = self._request.inputs[index]
        if self._request.signature.kind == "alltoall":
            rows, received = wire
            return _restored(rows, source.dtype), received.tolist()
        found = _restored(wire, source.dtype)
        return self._request.outputs[index].copy_(found) if self._request.outputs else found


def _as_moved(x: torch.Tensor) -> torch.Tensor:
    if x.dtype.is_complex:
        return torch.view_as_real(x)
    return x.view(_MOVED_AS[x.dtype]) if x.dtype in _MOVED_AS else x


def _as_reduced(x: torch.Tensor, signature: Signature) -> torch.Tensor:
    if x.dtype.is_complex and signature.op in ("sum", "average"):
        return torch.view_as_real(x)
    if x.dtype == torch.bool or x.dtype.is_complex:
        what = f"Horovod does not support {signature.op} of {x.dtype}"
        raise BadCall(what, signature.where, "HVDTRAIN_ENGINE=mpi or torchdist")
    return x.to(_REDUCED_AS[x.dtype]) if x.dtype in _REDUCED_AS else x


def _restored(wire: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if wire.dtype == dtype:
        return wire
    if dtype.is_complex:
        return torch.view_as_complex(wire.contiguous())
    return wire.view(dtype) if _MOVED_AS.get(dtype) == wire.dtype else wire.to(dtype)
