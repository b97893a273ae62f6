"""Gradients in flat buffers, whose allreduces overlap with backward, in the weights' own number type or in that of comm.compression."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import Generic, Protocol, TypeVar

import torch

from hvdtrain.comm.communicator import Communicator, Handle, Op
from hvdtrain.core.metrics import Sums
from hvdtrain.frameworks.stopwatch import Stopwatch
from hvdtrain.frameworks.torch.parallel.strategy import (
    Held,
    NamedParameters,
    OnePass,
    Strategy,
    reduction_device,
    run_passes,
)

COMPRESSED_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}  # comm.compression -> number type of the buffers


class Buckets(Strategy):
    """Flat buffers of about `bucket_bytes`, filled from the last layer to the first, each with one named allreduce.

    In the last pass of a step a gradient is copied into its buffer as soon as backward has computed it, still in the cache. Bucket k
    starts only after bucket k - 1, so that the order is the same on every rank whatever order backward takes. In a narrow `compressed`
    type nothing overflows that a mean over the batch would not: the loss is divided by the global batch before.

    With op="adasum" every rank's gradient is the mean over its own samples (Maleki et al. 2020, arXiv:2006.02924), in one bucket for each
    tensor where bucket_bytes is 0. The phase of `stopwatch` is "communication" while buckets start inside backward: that may wait.
    """

    def __init__(
        self,
        named: NamedParameters,
        communicator: Communicator,
        bucket_bytes: int,
        stopwatch: Stopwatch,
        compressed: torch.dtype | None = None,
        op: Op = "sum",
    ) -> None:
        self._buckets = [
            _Bucket(parameters, f"gradient.{i}", communicator, compressed) for i, parameters in enumerate(group(named, bucket_bytes))
        ]
        self._order = InOrder(self._buckets, lambda bucket: bucket.start(communicator, op), stopwatch)
        self.local_mean = op == "adasum"
        self._communicator = communicator
        overlapped = "overlapped " if "asynchronous" in communicator.features else ""
        self.summary = f"gradients in {len(self._buckets)} {overlapped}bucket{'s' * (len(self._buckets) > 1)}"
        if op == "adasum":
            self.summary = "gradients by Adasum, each tensor by itself"
        if compressed:
            self.summary += f" as {str(compressed).removeprefix('torch.')}"

    @property
    def equal_ranks(self) -> int:
        return self._communicator.size

    def weights_changed(self) -> None:
        self._order.cut_off()
        for bucket in self._buckets:
            bucket.cut_off()

    def run(self, micro: Sequence[Sized], divisor: int, one_pass: OnePass) -> Sums:
        return run_passes(micro, divisor, one_pass, before_last=self._order.begin)

    def reduce(self) -> None:
        self._order.end()
        for bucket in self._buckets:
            bucket.unpack()

    def held(self) -> Held:
        in_place = [bucket.memory for bucket in self._buckets if bucket.optimizer_reads_buffer]
        return Held(in_place, [bucket.memory for bucket in self._buckets if not bucket.optimizer_reads_buffer])


class Fillable(Protocol):
    """Some parameters, whose gradients are copied into one buffer."""

    parameters: list[torch.nn.Parameter]

    def take(self, p: torch.nn.Parameter) -> None: ...


B = TypeVar("B", bound=Fillable)


class InOrder(Generic[B]):
    """Fills buckets as backward computes gradients, and starts full ones: one after the other, in the same order on every rank.

    Between begin() and end() the gradients of a pass are taken; p.grad then has the sum over the passes that were not.
    """

    def __init__(self, buckets: Sequence[B], start: Callable[[B], None], stopwatch: Stopwatch) -> None:
        self._buckets, self._start, self._stopwatch = buckets, start, stopwatch
        self._bucket_of = {p: i for i, bucket in enumerate(buckets) for p in bucket.parameters}
        self._missing = [0] * len(buckets)  # gradients that backward has not computed yet
        self._started = 0  # buckets
        self._takes = False
        for p in self._bucket_of:
            p.register_post_accumulate_grad_hook(self._gradient_is_ready)

    def begin(self) -> None:
        self._missing = [len(bucket.parameters) for bucket in self._buckets]
        self._started, self._takes = 0, True

    def end(self) -> None:
        """Starts those that backward did not complete."""
        self._start_until(len(self._buckets))
        self._takes = False

    def cut_off(self) -> None:
        """The step does not come to its end."""
        self._takes = False

    def _gradient_is_ready(self, p: torch.nn.Parameter) -> None:
        """A hook in backward."""
        if not self._takes:
            return
        index = self._bucket_of[p]
        self._buckets[index].take(p)
        self._missing[index] -= 1
        complete = self._started
        while complete < len(self._buckets) and self._missing[complete] == 0:
            complete += 1
        if complete > self._started:
            self._stopwatch.enter("communication")  # an engine may wait for the other ranks here
            self._start_until(complete)
            self._stopwatch.enter("backward")

    def _start_until(self, count: int) -> None:
        for bucket in self._buckets[self._started : count]:
            self._start(bucket)
        self._started = max(self._started, count)


class _Bucket:
    """Some parameters, and the buffer in which their gradients are reduced."""

    def __init__(self, parameters: list[torch.nn.Parameter], name: str, communicator: Communicator, compressed: torch.dtype | None) -> None:
        self.parameters, self.name = parameters, name
        first = parameters[0]
        device = reduction_device(first.device, communicator)
        self._flat = torch.zeros(sum(p.numel() for p in parameters), dtype=compressed or first.dtype, device=device)
        self.optimizer_reads_buffer = self._flat.dtype == first.dtype and device == first.device  # without a copy
        self._index = {p: i for i, p in enumerate(parameters)}
        self._views = self._split()  # of the buffer, one for each parameter
        self._taken = [False] * len(parameters)
        self._handle: Handle | None = None

    @property
    def memory(self) -> torch.Tensor:
        return self._flat

    def take(self, p: torch.nn.Parameter) -> None:
        """Copies p.grad into the buffer; p.grad becomes that memory where the optimizer can read it."""
        index = self._index[p]
        assert p.grad is not None
        self._views[index].copy_(p.grad)
        self._taken[index] = True
        if self.optimizer_reads_buffer:
            p.grad = self._views[index]

    def start(self, communicator: Communicator, op: Op) -> None:
        """Starts the allreduce."""
        for p, view, taken in zip(self.parameters, self._views, self._taken, strict=True):
            if not taken:  # no gradient in the last micro-batch: send what earlier micro-batches accumulated, else 0
                view.zero_() if p.grad is None else view.copy_(p.grad)
        self._taken = [False] * len(self.parameters)
        self._handle = communicator.start_allreduce(self._flat, self.name, op)

    def cut_off(self) -> None:
        """What was taken is void."""
        self._taken = [False] * len(self.parameters)

    def unpack(self) -> None:
        """Waits for the allreduce, and makes each p.grad its result."""
        assert self._handle is not None, self.name
        flat = self._handle.wait()
        if flat is not self._flat:
            self._flat = flat
            self._views = self._split()
        for p, view in zip(self.parameters, self._views, strict=True):
            p.grad = view if self.optimizer_reads_buffer else view.to(p.device, p.dtype)

    def _split(self) -> list[torch.Tensor]:
        views = self._flat.split([p.numel() for p in self.parameters])
        return [_shaped_like(view, p) for view, p in zip(views, self.parameters, strict=True)]


def _shaped_like(flat: torch.Tensor, p: torch.nn.Parameter) -> torch.Tensor:
    """(p.numel(),) as p's shape and memory format: what works on many tensors at once wants all in one order."""
    if p.ndim == 4 and p.is_contiguous(memory_format=torch.channels_last):
        return flat.as_strided(p.shape, p.stride(), flat.storage_offset())
    return flat.view(p.shape)


def group(named: NamedParameters, bucket_bytes: int) -> list[list[torch.nn.Parameter]]:
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
