"""Begins the request of a call: its signature from the caller's tensors, and what becomes of its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.engine.reduce import check_moved, check_op
from hvdtrain.horovod.engine.requests import ANY, Request, Signature, name_of
from hvdtrain.horovod.job import JOB
from hvdtrain.horovod.ops import op_name
from hvdtrain.horovod.process_sets import ProcessSet
from hvdtrain.horovod.tensors import Back, as_torch, is_target, put


class Call:
    """One call of one or several tensors."""

    def __init__(
        self, kind: str, given: Any, name: str | None, process_set: ProcessSet, *, grouped: bool = False, in_place: bool = False
    ) -> None:
        """given: a tensor; a list of them where it is grouped."""
        given = list(given) if grouped else [given]
        self._grouped = grouped
        self.set_id, self._kind, self._given, self._in_place = process_set.process_set_id, kind, given, in_place
        self.name = JOB.name(kind, name, self.set_id)
        self.where = f"{kind} {self.name!r}"
        converted = [as_torch(x, self.where, in_place=in_place) for x in given]
        self.tensors = [tensor for tensor, _ in converted]
        self.backs: list[Back] = [back for _, back in converted]
        for tensor in self.tensors:
            check_moved(tensor.dtype, self.where)
        if in_place and any(
            stride == 0 and n > 1 for tensor in self.tensors for stride, n in zip(tensor.stride(), tensor.shape, strict=True)
        ):
            raise BadCall("numbers of this tensor share their memory", self.where, "tensor.contiguous(), or the call without _")
        self._gets_copies = in_place and not all(map(is_target, given, self.tensors))
        if not given:
            raise BadCall("no tensors", self.where, "a list of at least one tensor")

    def needs_rows(self) -> None:
        """Raises BadCall where a tensor has no axis 0."""
        if any(tensor.ndim == 0 for tensor in self.tensors):
            raise BadCall(f"{self._kind} does not support scalar inputs: there is no axis 0", self.where, "tensor.reshape(1)")

    def start(
        self,
        *,
        op: str = "",
        root: int = ANY,
        prescale: float = 1.0,
        postscale: float = 1.0,
        any_rows: bool = False,
        splits: Sequence[int] = (),
        finish: Callable[[Any], Any] | None = None,
    ) -> int:
        """A handle. any_rows: the lengths of axis 0 may differ. finish: of the result, or the list of them where the call is grouped."""
        shapes = tuple((ANY, *tensor.shape[1:]) if any_rows else tuple(tensor.shape) for tensor in self.tensors)
        dtypes = tuple(name_of(tensor.dtype) for tensor in self.tensors)
        devices = tuple([tensor.device.type for tensor in self.tensors])
        signature = Signature(self.name, self._kind, op, dtypes, shapes, root, float(prescale), float(postscale), (), devices)
        inputs = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in self.tensors]
        request = Request(signature, inputs, self.tensors if self._in_place and not self._gets_copies else (), splits)
        return JOB.submit(self.set_id, request, finish or self._finish)

    def start_reduction(self, op: int, prescale: float, postscale: float) -> int:
        """A handle. op: hvd.Average and so on. Raises BadCall for a reduction that the dtypes do not have."""
        reduction = op_name(op, self.where)
        for tensor in self.tensors:
            check_op(reduction, tensor.dtype, not prescale == postscale == 1, self.where)
        return self.start(op=reduction, prescale=prescale, postscale=postscale)

    def _finish(self, results: list[torch.Tensor]) -> Any:
        """Results as tensors of the caller's libraries; in place, what was given."""
        if self._gets_copies:
            for given, result in zip(self._given, results, strict=True):
                put(result, given)
        found = self._given if self._in_place else [back(result) for back, result in zip(self.backs, results, strict=True)]
        return tuple(found) if self._grouped else found[0]
