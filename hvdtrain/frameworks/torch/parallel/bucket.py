"""Flat buffers that gradients are copied into as backward computes them, and the order in which full ones are sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import torch

from hvdtrain.frameworks.stopwatch import Stopwatch
from hvdtrain.frameworks.torch.parallel.strategy import NamedParameters


class Bucket(ABC):
    """Some parameters, and one buffer for their gradients. Others say where that is, and what is sent of it to whom."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], begins: Mapping[torch.nn.Parameter, int] | None = None) -> None:
        """begins: of each parameter in the buffer; one behind the other, where it is not given."""
        self.parameters = list(parameters)
        self._begins = dict(begins) if begins is not None else places(self.parameters)
        self._taken: set[torch.nn.Parameter] = set()

    @abstractmethod
    def empty(self) -> torch.Tensor:
        """(n,), the buffer, which nothing that is under way reads any more."""

    def view(self, flat: torch.Tensor, p: torch.nn.Parameter) -> torch.Tensor:
        """The part of a buffer that belongs to a parameter, in its shape."""
        return flat[self._begins[p] : self._begins[p] + p.numel()].view(p.shape)

    def take(self, p: torch.nn.Parameter) -> None:
        """Copies p.grad into the buffer, and frees it; zeros where there is none."""
        view = self.view(self.empty(), p)
        view.zero_() if p.grad is None else view.copy_(p.grad)
        p.grad = None
        self._taken.add(p)

    def fill(self) -> None:
        """Takes what the last pass has not computed: what the passes before it have added up, or zeros. The bucket is full then."""
        for p in self.parameters:
            if p not in self._taken:
                self.take(p)
        self.forget()

    def forget(self) -> None:
        """What was taken is void, as of a step that was cut off."""
        self._taken = set()


B = TypeVar("B", bound=Bucket)


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


def places(parameters: Sequence[torch.nn.Parameter]) -> dict[torch.nn.Parameter, int]:
    """Where each begins, with one behind the other."""
    begins, begin = {}, 0
    for p in parameters:
        begins[p] = begin
        begin += p.numel()
    return begins


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
