"""The bytes of the storages that exist at any moment of a step, by their kind."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from hvdtrain.frameworks.footprint import KINDS
from hvdtrain.frameworks.stopwatch import PhaseTimes
from hvdtrain.frameworks.torch.private_api import TorchDispatchMode, tree_leaves
from hvdtrain.frameworks.torch.step_costs import FlopCounter
from hvdtrain.frameworks.torch.without_numbers import ASKS_FOR_NUMBER, answer

KIND_OF_PHASE = {
    "forward": "activations",
    "backward": "activations",
    "communication": "communication",
    "update": "workspace",
}


class LiveStorages(TorchDispatchMode):
    """Counts each storage once, from the operation that returns it until it is freed. It is also
    the stopwatch, so it knows the phase.

    It does not see memory that a torch operation allocates and frees internally. Nothing is
    allocated inside a FakeTensorMode.

    FSDP2 frees whole weights by resizing their storages to 0, and later resizes them back; neither
    is an operation. reset_peak() finds the freed storages. From then on, such a storage counts from
    the operation that fills it until its size is 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = dict.fromkeys(KINDS, 0)  # bytes
        self.peak = dict(self.now)  # bytes of each kind when their sum was largest
        self.peak_bytes = 0  # that sum
        self._bytes = 0
        self._live: dict[
            int, tuple[str, int, Any]
        ] = {}  # by number: kind, bytes, a weak reference that reports the end
        self._number_of: dict[
            int, int
        ] = {}  # a storage's number by its address, which a later storage may reuse
        self._numbers = 0
        self._whole = set[int]()  # numbers of the storages that were resized, and have memory
        self._kind = "workspace"

    def reset_peak(self) -> None:
        self._read_sizes(list(self._live))
        self.peak = dict(self.now)
        self.peak_bytes = self._bytes

    def mark(self, tensors: Iterable[torch.Tensor | None], kind: str) -> None:
        """Assigns tensors to a kind, also those created before."""
        for tensor in tensors:
            if tensor is not None:
                self._count(_storage(tensor), kind, remark=True)

    def enter(self, phase: str) -> None:
        self._kind = KIND_OF_PHASE.get(phase, "workspace")

    def read(self) -> list[PhaseTimes]:
        return []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._read_sizes(list(self._whole))
        if func.namespace == "fsdp":
            self.mark(_in_transit(func, args, kwargs or {}), "communication")
        for leaf in tree_leaves((result, (kwargs or {}).get("out"))):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_meta:
                self._count(_storage(leaf), self._kind, remark=False)
        return result

    def _read_sizes(self, numbers: list[int]) -> None:
        for number in numbers:
            known = self._live.get(number)
            alive = known and known[2].peek()
            if alive:
                self._has_size(number, alive[0].nbytes())

    def _has_size(self, number: int, size: int) -> None:
        """Records the size of a storage: one whose size has changed has whole weights of FSDP2."""
        kind, before, reference = self._live[number]
        if size != before:
            self._add(kind, -before)
            self._live[number] = "weights", size, reference
            self._add("weights", size)
            (self._whole.add if size else self._whole.discard)(number)

    def _count(self, storage: torch.UntypedStorage, kind: str, *, remark: bool) -> None:
        key = storage._cdata
        known = self._live.get(self._number_of.get(key, -1))
        if known is not None and (not remark or known[0] == kind):
            self._has_size(self._number_of[key], storage.nbytes())
            return
        if known is not None:
            number, (before, size, reference) = self._number_of[key], known
            self._add(before, -size)
        else:
            number = self._numbers
            size = storage.nbytes()
            self._numbers += 1
            self._number_of[key] = number
            reference = weakref.finalize(storage, self._end, key, number)
            reference.atexit = False
        self._live[number] = kind, size, reference
        self._add(kind, size)

    def _add(self, kind: str, size: int) -> None:
        self.now[kind] += size
        self._bytes += size
        if self._bytes > self.peak_bytes:
            self.peak = dict(self.now)
            self.peak_bytes = self._bytes

    def _end(self, key: int, number: int) -> None:
        kind, size, _ = self._live.pop(number)
        self._add(kind, -size)
        self._whole.discard(number)
        if self._number_of.get(key) == number:
            del self._number_of[key]


def _in_transit(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Returns the buffer that an operation of FSDP2 fills before a collective: of an all-gather, of
    a reduce-scatter."""
    if func is torch.ops.fsdp.all_gather_copy_in.default:
        return [args[1]]
    return [kwargs["out"]] if func is torch.ops.fsdp.chunk_cat.default else []


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Returns the storage of a tensor; for a DTensor the storage of this rank's part."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


class FakeStorages(LiveStorages):
    """Storages of fake tensors; the host gets the answers of answer()."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = FlopCounter()  # of the current step
        self.touched_bytes = 0  # by its passes
        self._in_passes = False

    def enter(self, phase: str) -> None:
        if phase in ("forward", "backward"):
            self._in_passes = True
        elif phase == "update" and self._in_passes:
            self.touched_bytes = self.counter.touched_bytes
            self._in_passes = False
        super().enter(phase)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_FOR_NUMBER:
            return answer(args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)
