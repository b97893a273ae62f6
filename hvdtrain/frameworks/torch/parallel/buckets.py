"""Gradients in flat buffers: backward fills buckets, and the strategy reduces each full one by an
allreduce."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from hvdtrain.comm.communicator import Communicator, Handle, Op
from hvdtrain.core.metrics import Sums
from hvdtrain.frameworks.stopwatch import Stopwatch
from hvdtrain.frameworks.torch.strategy import (
    NamedParameters,
    OnePass,
    Strategy,
    StrategyMemory,
    reduction_device,
    run_passes,
)


class Bucket(ABC):
    """Some parameters with one buffer for their gradients. Subclasses define the buffer and its
    communication."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        begins: Mapping[torch.nn.Parameter, int] | None = None,
    ) -> None:
        """begins: the offset of each parameter in the buffer; by default they are contiguous."""
        self.parameters = list(parameters)
        self._begins = dict(begins) if begins is not None else offsets_of(self.parameters)
        self._taken: set[torch.nn.Parameter] = set()

    @abstractmethod
    def empty(self) -> torch.Tensor:
        """Returns the buffer (n,), after pending operations have finished reading it."""

    def view(self, flat: torch.Tensor, p: torch.nn.Parameter) -> torch.Tensor:
        """Returns the part of a buffer that belongs to a parameter, in its shape."""
        return flat[self._begins[p] : self._begins[p] + p.numel()].view(p.shape)

    def take(self, p: torch.nn.Parameter) -> None:
        """Copies p.grad into the buffer and frees it; writes zeros if there is no gradient."""
        view = self.view(self.empty(), p)
        view.zero_() if p.grad is None else view.copy_(p.grad)
        p.grad = None
        self._taken.add(p)

    def fill(self) -> None:
        """Takes the gradients that the last backward did not produce (accumulated ones, or zeros),
        which completes the bucket."""
        for p in self.parameters:
            if p not in self._taken:
                self.take(p)
        self.forget()

    def forget(self) -> None:
        """Discards the gradients taken so far, after an interrupted step."""
        self._taken = set()


B = TypeVar("B", bound=Bucket)


class InOrder(Generic[B]):
    """Fills buckets as backward computes gradients, and starts to reduce full ones, in the same
    order on every rank.

    Takes the gradients of a pass between begin() and end(). p.grad then holds the sum over earlier
    passes, which were not taken.
    """

    def __init__(
        self, buckets: Sequence[B], start: Callable[[B], None], stopwatch: Stopwatch
    ) -> None:
        self._buckets = buckets
        self._start = start
        self._stopwatch = stopwatch
        self._bucket_of = {p: i for i, bucket in enumerate(buckets) for p in bucket.parameters}
        self._missing = [0] * len(buckets)  # gradients that backward is still to compute
        self._started = 0  # buckets
        self._takes = False
        for p in self._bucket_of:
            p.register_post_accumulate_grad_hook(self._gradient_is_ready)

    def begin(self) -> None:
        self._missing = [len(bucket.parameters) for bucket in self._buckets]
        self._started = 0
        self._takes = True

    def end(self) -> None:
        """Starts the buckets that backward did not complete."""
        self._start_until(len(self._buckets))
        self._takes = False

    def cut_off(self) -> None:
        """Ends an interrupted step."""
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
            self._stopwatch.enter("communication")  # an engine may wait for other ranks here
            self._start_until(complete)
            self._stopwatch.enter("backward")

    def _start_until(self, count: int) -> None:
        for bucket in self._buckets[self._started : count]:
            self._start(bucket)
        self._started = max(self._started, count)


def offsets_of(parameters: Sequence[torch.nn.Parameter]) -> dict[torch.nn.Parameter, int]:
    """Returns the offsets of the parameters in the buffer."""
    begins = {}
    begin = 0
    for p in parameters:
        begins[p] = begin
        begin += p.numel()
    return begins


def group(named: NamedParameters, bucket_bytes: int) -> list[list[torch.nn.Parameter]]:
    """Groups parameters from last to first into buckets; a bucket ends when it is full or the dtype
    changes."""
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


# comm.compression -> number type of the buffers
COMPRESSED_TYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


class Buckets(Strategy):
    """Flat buffers of about `bucket_bytes`, filled from the last layer to the first, each with one
    named allreduce.

    In the last pass of a step, a gradient is copied into its buffer as soon as backward has
    computed it, while it is in the cache. Bucket k starts only after bucket k - 1, so that the
    order is the same on every rank, whatever the order of backward. A narrow `compressed` dtype
    overflows only if a mean over the batch would, because the loss is divided by the global batch
    first.

    With op="adasum", every rank's gradient is the mean over its samples (Maleki et al. 2020,
    arXiv:2006.02924), with one bucket for each tensor if bucket_bytes is 0. The phase of
    `stopwatch` is "communication" while buckets are started in backward, because that may wait.
    """

    def __init__(
        self,
        named: NamedParameters,
        communicator: Communicator,
        bucket_bytes: int,
        stopwatch: Stopwatch,
        compressed: torch.dtype | None = None,
        op: Op = "sum",
        prefix: str = "",
    ) -> None:
        """prefix: begins the names of the allreduces."""
        self._buckets = [
            _ReducedBucket(parameters, f"{prefix}gradient.{i}", communicator, compressed)
            for i, parameters in enumerate(group(named, bucket_bytes))
        ]
        self._order = InOrder(
            self._buckets, lambda bucket: bucket.start(communicator, op), stopwatch
        )
        self.local_mean = op == "adasum"
        self._communicator = communicator
        overlapped = "overlapped " if "asynchronous" in communicator.features else ""
        self.summary = (
            f"gradients in {len(self._buckets)} "
            f"{overlapped}bucket{'s' if len(self._buckets) > 1 else ''}"
        )
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
            bucket.forget()

    def run(self, micro: Sequence[Sized], divisor: float, one_pass: OnePass) -> Sums:
        return run_passes(micro, divisor, one_pass, before_last=self._order.begin)

    def reduce(self) -> None:
        self._order.end()
        for bucket in self._buckets:
            bucket.unpack()

    def held(self) -> StrategyMemory:
        in_place = [bucket.memory for bucket in self._buckets if bucket.optimizer_reads_buffer]
        return StrategyMemory(
            in_place,
            [bucket.memory for bucket in self._buckets if not bucket.optimizer_reads_buffer],
        )


class _ReducedBucket(Bucket):
    """A bucket whose buffer is all-reduced."""

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        name: str,
        communicator: Communicator,
        compressed: torch.dtype | None,
    ) -> None:
        super().__init__(parameters)
        self.name = name
        first = parameters[0]
        device = reduction_device(first.device, communicator)
        self._flat = torch.zeros(
            sum(p.numel() for p in parameters), dtype=compressed or first.dtype, device=device
        )
        # without a copy
        self.optimizer_reads_buffer = self._flat.dtype == first.dtype and device == first.device
        self._handle: Handle | None = None

    @property
    def memory(self) -> torch.Tensor:
        return self._flat

    def empty(self) -> torch.Tensor:
        return self._flat

    def view(self, flat: torch.Tensor, p: torch.nn.Parameter) -> torch.Tensor:
        """Returns the part of a buffer for p in p's memory format, because operations on many
        tensors need the same order in all of them."""
        if p.ndim == 4 and p.is_contiguous(memory_format=torch.channels_last):
            return flat.as_strided(p.shape, p.stride(), flat.storage_offset() + self._begins[p])
        return super().view(flat, p)

    def start(self, communicator: Communicator, op: Op) -> None:
        """Starts the allreduce."""
        self.fill()
        self._handle = communicator.start_allreduce(self._flat, self.name, op)

    def unpack(self) -> None:
        """Waits for the allreduce and copies the result into each p.grad."""
        assert self._handle is not None, self.name
        flat = self._handle.wait()
        self._flat = flat
        for p in self.parameters:
            view = self.view(flat, p)
            p.grad = view if self.optimizer_reads_buffer else view.to(p.device, p.dtype)


SIZES_MB = (0.5, 1, 2, 4, 8, 16, 32, 64)
ROUNDS = 5
# among sizes that are this near to the fastest the smallest wins: its first bucket starts earliest
# in backward
CLOSE = 1.1


class Tuned(NamedTuple):
    bucket_bytes: int
    seconds: float  # time to reduce all buckets of this size


def fastest_bucket_bytes(
    named: NamedParameters, communicator: Communicator, compressed: torch.dtype | None
) -> Tuned:
    """Measures bucket sizes and returns the smallest of the fast ones, by the time of the slowest
    rank.

    Every rank calls it and gets the same result.
    """
    counts_of = {
        mb: [sum(p.numel() for p in bucket) for bucket in group(named, int(mb * 2**20))]
        for mb in SIZES_MB
    }
    sizes = [
        mb
        for i, mb in enumerate(SIZES_MB)
        if counts_of[mb] not in [counts_of[less] for less in SIZES_MB[:i]]
    ]
    first = named[0][1]
    device = reduction_device(first.device, communicator)
    dtype = compressed or first.dtype
    times = np.full((len(sizes), ROUNDS), np.inf)
    for turn in range(-1, ROUNDS):  # the first turn warms up
        for i, mb in enumerate(sizes):
            buffers = [torch.zeros(n, dtype=dtype, device=device) for n in counts_of[mb]]
            communicator.allreduce(np.zeros(1), "tune.begin")
            began = time.perf_counter()
            for handle in [
                communicator.start_allreduce(flat, f"tune.{i}.{j}")
                for j, flat in enumerate(buffers)
            ]:
                handle.wait()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            if turn >= 0:
                times[i, turn] = time.perf_counter() - began
    seconds = np.median(communicator.allreduce(times, "tune.times", "max"), axis=1)
    best = int(np.flatnonzero(seconds <= CLOSE * seconds.min())[0])
    return Tuned(int(sizes[best] * 2**20), float(seconds[best]))
