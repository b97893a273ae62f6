"""torch.cuda of the simulated GPU: what torch's extension module lacks in a CPU build."""

from __future__ import annotations

import os
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch

from simulated_gpu.load import Gpu
from simulated_gpu.record import Wait

ERROR = 2  # of set_sync_debug_mode()
CUDA = 1  # of torch's device types
FREE_BYTES = 60 << 30


def install(gpu: Gpu) -> None:
    """Makes torch.cuda use `gpu`. Once in a process."""
    count = gpu.device_count()
    _Handles.gpu = gpu
    generators = [torch.Generator() for _ in range(count)]
    for index, generator in enumerate(generators):
        torch.ops.simulated_gpu.set_generator(index, generator)
    for name, function in _functions(gpu).items():
        # torch's compiler needs functions that can be keys: ctypes' cannot
        setattr(torch._C, name, lambda *args, f=function, **named: f(*args, **named))
    cuda: Any = torch.cuda
    cuda._cached_device_count = count
    cuda._initialized = True
    cuda.default_generators = tuple(generators)
    cuda._cudart = SimpleNamespace(
        cudaMemGetInfo=lambda device: (FREE_BYTES - gpu.memory(device), gpu.memory_limit(device))
    )
    cuda._exchange_device = cuda._maybe_exchange_device = lambda index: _exchange(gpu, index)
    cuda._get_device_properties = _properties
    cuda.is_bf16_supported = lambda *_, **__: True
    cuda.Stream = cuda.streams.Stream = Stream
    cuda.Event = cuda.streams.Event = Event
    untyped: Any = torch.UntypedStorage
    resize = untyped.resize_

    def resize_(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return resize(storage, size)
        gpu.resize(storage._cdata, size)
        return storage

    clone = untyped.clone

    def cloned(storage: Any) -> Any:
        if storage.device.type != "cuda":
            return clone(storage)
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return whole.clone().untyped_storage()

    untyped.resize_ = resize_
    untyped.clone = cloned


class _Handles:
    """Base of the classes that do not have their own gpu."""

    gpu: Gpu


def _functions(gpu: Gpu) -> dict[str, Any]:
    """The functions of torch._C that torch.cuda calls."""

    def set_device(device: int) -> None:
        assert 0 <= device < gpu.device_count(), "CUDA error: invalid device ordinal"
        gpu.set_device(device)
        gpu.touch(device)  # cudaSetDevice() opens a context, from CUDA 12 on

    def set_stream(*, stream_id: int, device_index: int, device_type: int) -> None:
        set_device(device_index)
        gpu.set_stream(device_index, stream_id)

    def synchronize() -> None:
        gpu.finish_device(gpu.current_device())

    def stats(device: int) -> dict[str, Any]:
        both = {"current": gpu.memory(device), "peak": gpu.peak_memory(device)}
        every = {"all": {**both, "allocated": both["peak"], "freed": 0}}
        return {"allocated_bytes": every, "reserved_bytes": every, "active_bytes": every}

    def current_stream(device: int) -> tuple[int, int, int]:
        return gpu.current_stream(device), device, CUDA

    debug = SyncDebug(gpu)
    return {
        "_cuda_set_sync_debug_mode": debug.set,
        "_cuda_get_sync_debug_mode": lambda: debug.mode,
        "_cuda_getDeviceCount": gpu.device_count,
        "_cuda_init": lambda: None,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_setDevice": set_device,
        "_cuda_getDevice": gpu.current_device,
        "_cuda_setStream": set_stream,
        "_cuda_getCurrentStream": current_stream,
        "_cuda_getCurrentRawStream": gpu.current_stream,
        "_cuda_getDefaultStream": lambda device: (0, device, CUDA),
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_synchronize": synchronize,
        "_cuda_emptyCache": lambda: None,
        "_cuda_memoryStats": stats,
        "_cuda_resetPeakMemoryStats": gpu.reset_peak,
        "_cuda_resetAccumulatedMemoryStats": lambda device: None,
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_sleep": lambda cycles: None,
        "_nccl_version": lambda: (2, 27, 3),
    }


class SyncDebug:
    """torch.cuda.set_sync_debug_mode(), which raises at its end what CUDA raises at the wait."""

    def __init__(self, gpu: Gpu) -> None:
        self.mode = 0
        self._recorder = gpu.recorder
        self._before: Counter[Wait] = Counter()
        self._was_watching = False

    def set(self, mode: int) -> None:
        recorder = self._recorder
        if mode and not self.mode:
            self._was_watching = recorder.is_watching
            self._before = recorder.waits.copy()
            recorder.is_watching = True
        ended = self.mode if not mode else 0
        self.mode = mode
        if ended:
            recorder.is_watching = self._was_watching
            this = threading.current_thread().name
            found = [wait for wait in recorder.waits - self._before if wait.thread == this]
            if found and ended == ERROR:
                where = ", ".join(f"{wait.what} at {wait.place}" for wait in found)
                raise RuntimeError(f"called a synchronizing CUDA operation: {where}")


def _exchange(gpu: Gpu, index: int) -> int:
    """Like torch.cuda.device: sets the device and returns the previous one; -1 changes nothing."""
    if index < 0:
        return -1
    before = gpu.current_device()
    gpu.set_device(index)
    return int(before)


def _properties(device: int) -> Any:
    return SimpleNamespace(
        name="Simulated GPU",
        major=9,
        minor=0,
        total_memory=_Handles.gpu.memory_limit(device),
        multi_processor_count=132,
        gcnArchName="",
        uuid=f"{os.environ.get('SIMULATED_HOST', '0'):0>8}-0000-0000-0000-{device:012d}",
    )


def _index(device: Any) -> int:
    if device is None:
        return int(_Handles.gpu.current_device())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(_Handles.gpu.current_device()) if index is None else index


class Stream(torch.Stream):
    """torch.cuda.Stream."""

    def __new__(
        cls,
        device: Any = None,
        priority: int = 0,
        *,
        stream_id: int | None = None,
        device_index: int | None = None,
        **_: Any,
    ) -> Stream:
        if stream_id is None or device_index is None:
            device_index = _index(device)
            stream_id = _Handles.gpu.new_stream(device_index)
        new: Any = torch.Stream.__new__
        return new(cls, stream_id=stream_id, device_index=device_index, device_type=CUDA)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return bool(_Handles.gpu.is_idle(self.device_index, self.stream_id))

    def synchronize(self) -> None:
        _Handles.gpu.recorder.add("wait", "stream.synchronize()")
        _Handles.gpu.finish_stream(self.device_index, self.stream_id)


class Event:
    """torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self._mark: int | None = None
        self._has_time = enable_timing
        self.device: torch.device | None = None  # None before record()

    def record(self, stream: Any = None) -> None:
        stream = stream or torch.cuda.current_stream()
        self.device = torch.device("cuda", stream.device_index)
        self._mark = _Handles.gpu.record(self._mark, stream.device_index, stream.stream_id)

    def wait(self, stream: Any = None) -> None:
        if self._mark is not None:
            stream = stream or torch.cuda.current_stream()
            _Handles.gpu.wait_on_stream(self._mark, stream.device_index, stream.stream_id)

    def query(self) -> bool:
        """True, after the work: a program that asks again and again would wait for ever."""
        if self._mark is not None:
            _Handles.gpu.wait_on_host(self._mark)
        return True

    def synchronize(self) -> None:
        _Handles.gpu.recorder.add("wait", "event.synchronize()")
        if self._mark is not None:
            _Handles.gpu.wait_on_host(self._mark)

    def elapsed_time(self, end: Event) -> float:
        assert self._has_time and end._has_time, "both events need enable_timing=True"
        return float(_Handles.gpu.elapsed_ms(self._mark, end._mark))

    def __del__(self) -> None:
        if self._mark is not None:
            _Handles.gpu.free_mark(self._mark)
