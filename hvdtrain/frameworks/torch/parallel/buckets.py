"""Gradients in flat buffers, whose allreduces overlap with backward, in the weights' own number type or half of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.comm.communicator import Communicator, Handle, Op
from hvdtrain.frameworks.torch.parallel.strategy import Named, reduction_device

WIRES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Buckets:
    """Flat buffers of about `bucket_bytes`, filled from the last layer to the first, each with one named allreduce.

    A gradient moves into its buffer as soon as it is there, still in the cache. Bucket k starts only after bucket k - 1, so that the order
    is the same on every rank whatever order backward takes. On a narrow `wire` nothing overflows that a mean over the batch would not:
    the loss is divided by the global batch before.
    """

    wrapped = None

    def __init__(
        self, named: Named, communicator: Communicator, bucket_bytes: int, wire: torch.dtype | None = None, op: Op = "sum"
    ) -> None:
        self._engine, self._op, self.local_mean = communicator, op, op == "adasum"
        groups = group(named, bucket_bytes)
        self._buckets = [_Bucket(some, f"gradient.{i}", communicator, wire) for i, some in enumerate(groups)]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._missing: dict[_Bucket, int] = {}
        self._started = 0
        self._last = False
        self.enter: Callable[[str], None] = lambda phase: None  # of the learner's stopwatch
        overlapped = "overlapped " * ("asynchronous" in communicator.features)
        self.words = f"gradients in {len(self._buckets)} {overlapped}bucket{'s' * (len(self._buckets) > 1)}"
        self.words = "gradients by Adasum, each tensor by itself" if op == "adasum" else self.words
        self.words += f" as {str(wire).removeprefix('torch.')}" if wire else ""
        for p in self._bucket_of:
            p.register_post_accumulate_grad_hook(self._ready)

    def begin(self, passes: int) -> None:
        self._missing = {bucket: len(bucket.parameters) for bucket in self._buckets}
        self._started, self._last = 0, False

    def last_pass(self) -> None:
        self._last = True

    def finish(self) -> None:
        self._start_until(len(self._buckets))  # those that backward did not complete
        for bucket in self._buckets:
            bucket.unpack()

    def apply(self, optimizer: Any) -> None:
        optimizer.step()

    def _ready(self, p: torch.nn.Parameter) -> None:
        if self._last:
            bucket = self._bucket_of[p]
            bucket.take(p)
            self._missing[bucket] -= 1
            complete = self._started
            while complete < len(self._buckets) and self._missing[self._buckets[complete]] == 0:
                complete += 1
            if complete > self._started:
                self.enter("communication")  # an engine may wait for the other ranks here
                self._start_until(complete)
                self.enter("backward")

    def _start_until(self, count: int) -> None:
        for bucket in self._buckets[self._started : count]:
            bucket.start(self._engine, self._op)
        self._started = max(self._started, count)


class _Bucket:
    """Some parameters, and the buffer in which their gradients travel."""

    def __init__(self, parameters: list[torch.nn.Parameter], name: str, communicator: Communicator, wire: torch.dtype | None) -> None:
        self.parameters, self.name = parameters, name
        first = parameters[0]
        device = reduction_device(first.device, communicator)
        self._flat = torch.zeros(sum(p.numel() for p in parameters), dtype=wire or first.dtype, device=device)
        self._reads_buffer = self._flat.dtype == first.dtype and device == first.device  # the optimizer, without a copy
        self._place = {p: i for i, p in enumerate(parameters)}
        self._parts = self._split()
        self._taken = [False] * len(parameters)
        self._handle: Handle | None = None

    def take(self, p: torch.nn.Parameter) -> None:
        """Moves p.grad into the buffer."""
        place = self._place[p]
        assert p.grad is not None
        self._parts[place].copy_(p.grad)
        self._taken[place] = True
        if self._reads_buffer:
            p.grad = self._parts[place]

    def start(self, communicator: Communicator, op: Op) -> None:
        for p, part, taken in zip(self.parameters, self._parts, self._taken, strict=True):
            if not taken:  # backward of the last pass did not come by: what passes before it left, or nothing
                part.zero_() if p.grad is None else part.copy_(p.grad)
        self._taken = [False] * len(self.parameters)
        self._handle = communicator.start_allreduce(self._flat, self.name, op)

    def unpack(self) -> None:
        assert self._handle is not None, self.name
        flat = self._handle.wait()
        if flat is not self._flat:
            self._flat = flat
            self._parts = self._split()
        for p, part in zip(self.parameters, self._parts, strict=True):
            p.grad = part if self._reads_buffer else part.to(p.device, p.dtype)

    def _split(self) -> list[torch.Tensor]:
        parts = self._flat.split([p.numel() for p in self.parameters])
        return [_shaped(part, p) for p, part in zip(self.parameters, parts, strict=True)]


def _shaped(part: torch.Tensor, p: torch.nn.Parameter) -> torch.Tensor:
    """Numbers in p's shape, in the order in which p's own lie: what works on many tensors at once wants them alike."""
    if p.ndim == 4 and p.is_contiguous(memory_format=torch.channels_last):
        return part.as_strided(p.shape, p.stride(), part.storage_offset())
    return part.view(p.shape)


def group(named: Named, bucket_bytes: int) -> list[list[torch.nn.Parameter]]:
    """Parameters from last to first, cut where a bucket is full or the dtype changes."""
    groups: list[list[torch.nn.Parameter]] = []
    used = 0
    for _, p in reversed(named):
        size = p.numel() * p.element_size()
        if not groups or used + size > bucket_bytes or groups[-1][0].dtype != p.dtype:
            groups.append([])
            used = 0
        groups[-1].append(p)
        used += size
    return groups
