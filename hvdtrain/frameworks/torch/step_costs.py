"""Measurements of a step on a device: the time of each phase, a trace, and floating-point
operations."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from hvdtrain.comm.staging import KINDS
from hvdtrain.frameworks.stopwatch import (
    HostStopwatch,
    PhaseTimes,
    ReplaceableStopwatch,
    Stopwatch,
    phase_times,
)
from hvdtrain.frameworks.torch.private_api import TorchDispatchMode, tree_leaves


class GpuStopwatch:
    """A phase is the GPU's time between two events, so "data" is the time in which the GPU was idle
    between two steps.

    The host waits only when the times are read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._torch = torch.get_device_module(device)  # torch.cuda, torch.xpu
        self._stamps: list[tuple[str, Any]] = []

    def enter(self, phase: str) -> None:
        if not self._stamps and phase != "data":
            return
        event = self._torch.Event(enable_timing=True)
        event.record(self._torch.current_stream(self._device))
        self._stamps.append((phase, event))

    def read(self) -> list[PhaseTimes]:
        stamps = self._stamps
        self._stamps = []
        for _, event in stamps:  # a hook may have recorded on another stream than the last one
            if not event.query():
                event.synchronize()
        return phase_times(
            [(phase, a.elapsed_time(b) / 1e3) for (phase, a), (_, b) in itertools.pairwise(stamps)]
        )


def stopwatch_for(device: torch.device) -> Stopwatch:
    """Returns the stopwatch for steps on a device."""
    return GpuStopwatch(device) if device.type in KINDS else HostStopwatch()


class TracingStopwatch:
    """A stopwatch that also records each phase as a range of the trace."""

    def __init__(self, inner: Stopwatch) -> None:
        self.inner = inner
        self._thread = threading.get_ident()
        self._range: Any = None

    def enter(self, phase: str) -> None:
        self.inner.enter(phase)
        if (
            threading.get_ident() != self._thread
        ):  # a hook in backward's thread: a range must end on the thread on which it began
            return
        if self._range is not None:
            self._range.__exit__(None, None, None)
        self._range = record_function(f"hvdtrain: {phase}") if phase else None
        if self._range is not None:
            self._range.__enter__()

    def read(self) -> list[PhaseTimes]:
        return self.inner.read()


@contextmanager
def profile(stopwatch: ReplaceableStopwatch, device: torch.device, path: Path) -> Iterator[None]:
    """Traces the work inside, with the phases of `stopwatch`, into PATH/trace.json.gz.

    The file is for https://ui.perfetto.dev or chrome://tracing. Starting a trace takes a second or
    two.
    """
    activities = [ProfilerActivity.CPU]
    if device.type in KINDS:
        activities.append(getattr(ProfilerActivity, device.type.upper()))  # CUDA, XPU
    trace = torch.profiler.profile(activities=activities, record_shapes=True)
    with trace, stopwatch.replaced_by(TracingStopwatch(stopwatch.current)):
        try:
            yield
        finally:
            stopwatch.enter("")
    trace.export_chrome_trace(str(path / "trace.json.gz"))


class FlopCounter(TorchDispatchMode):
    """Adds up the operations of matrix products, convolutions and attention, and the bytes that all
    other operations read and write.

    Uses torch's formulas, but not its FlopCounterMode, whose module hooks fail with a backward pass
    in two parts.
    """

    def __init__(self, *, of_model: bool = False) -> None:
        """of_model: exclude the scores that the backward pass of a fused attention recomputes."""
        super().__init__()
        self._formulas = _FORMULAS | _OF_MODEL if of_model else _FORMULAS
        self.flops = 0  # a multiply-add counts as two
        self.touched_bytes = 0  # bytes of arguments and results, each counted once

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.count(func, args, kwargs or {})

    def count(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls an operation, and counts it; returns its result."""
        result = func(*args, **kwargs)
        formula = self._formulas.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        elif not func.is_view and func.overloadpacket not in _WITHOUT_WORK:
            tensors = {
                id(x): x.nbytes
                for x in tree_leaves((args, kwargs, result))
                if isinstance(x, torch.Tensor) and not x.is_meta
            }
            self.touched_bytes += sum(tensors.values())
        return result


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    **__: Any,
) -> int:
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))


def _attention_gradients(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    **__: Any,
) -> int:
    """Counts the two gradients of each of the two products of the forward pass."""
    return 2 * _attention(query, key, value)


_aten: Any = torch.ops.aten
_WITHOUT_WORK = {
    *(
        _aten.empty,
        _aten.empty_like,
        _aten.new_empty,
        _aten.empty_strided,
        _aten._unsafe_view,
        _aten._local_scalar_dense,
    ),
    torch.ops.prim.device,  # fake tensors call it
}
_FORMULAS: dict[Any, Any] = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,  # missing from torch's table
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
_OF_MODEL: dict[Any, Any] = {
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_gradients,
}
