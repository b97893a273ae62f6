"""Starts the simulated GPU. Imported before torch, because torch looks for a GPU only once.

PYTHONPATH=tests/support python -m simulated_gpu -m hvdtrain speed.device=cuda ...
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.abc
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from simulated_gpu.build import library, torch_folder
from simulated_gpu.record import Recorder

REPORT = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
TASK = ctypes.CFUNCTYPE(None, ctypes.c_int64)
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "report_to": (None, [REPORT]),
    "run_python": (None, [TASK]),
    "watch_waits": (None, [ctypes.c_int]),
    "new_epoch": (None, []),
    "touch": (None, [ctypes.c_int]),
    "device_count": (ctypes.c_int, []),
    "current_device": (ctypes.c_int, []),
    "set_device": (None, [ctypes.c_int]),
    "current_stream": (ctypes.c_int64, [ctypes.c_int]),
    "set_stream": (None, [ctypes.c_int, ctypes.c_int64]),
    "new_stream": (ctypes.c_int64, [ctypes.c_int]),
    "finish_stream": (None, [ctypes.c_int, ctypes.c_int64]),
    "finish_device": (None, [ctypes.c_int]),
    "is_idle": (ctypes.c_int, [ctypes.c_int, ctypes.c_int64]),
    "submit": (None, [ctypes.c_int, ctypes.c_int64, ctypes.c_int64]),
    "record": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]),
    "wait_on_stream": (None, [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]),
    "wait_on_host": (None, [ctypes.c_void_p]),
    "elapsed_ms": (ctypes.c_double, [ctypes.c_void_p, ctypes.c_void_p]),
    "free_mark": (None, [ctypes.c_void_p]),
    "memory": (ctypes.c_int64, [ctypes.c_int]),
    "peak_memory": (ctypes.c_int64, [ctypes.c_int]),
    "memory_limit": (ctypes.c_int64, [ctypes.c_int]),
    "reset_peak": (None, [ctypes.c_int]),
    "resize": (None, [ctypes.c_void_p, ctypes.c_size_t]),
}


class Gpu:
    """The loaded library. A method for each function of device.cpp: gpu.set_device(1). They run
    without the interpreter's lock."""

    def __init__(self, path: str) -> None:
        lib = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
        self.recorder = Recorder()
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(lib, f"sim_{name}")
            function.restype = result
            function.argtypes = arguments
            setattr(self, name, function)
        # an attribute: ctypes does not keep what C calls
        self._report = REPORT(lambda kind, what: self.recorder.add(kind.decode(), what.decode()))
        self.report_to(self._report)
        self._tasks: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count()
        self._run = TASK(lambda number: self._tasks.pop(number)())
        self.run_python(self._run)
        self.watch_waits(1)
        atexit.register(lambda: self.report_to(REPORT()))

    def later(self, stream: Any, task: Callable[[], None]) -> None:
        """Adds Python's work to a stream. It raises nothing."""
        number = next(self._numbers)
        self._tasks[number] = task
        self.submit(stream.device_index, stream.stream_id, number)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)  # for mypy: the functions are set above


def start(gpus: int = 1) -> Gpu:
    """Simulates `gpus` GPUs in this process; SIMULATED_GPUS says otherwise."""
    assert "torch" not in sys.modules, "start() comes before torch is imported"
    os.environ.setdefault("SIMULATED_GPUS", str(gpus))
    gpu = _loaded()
    _install(gpu)
    return gpu


def start_with_torch() -> None:
    """Simulates SIMULATED_GPUS GPUs in this process from the moment that it imports torch."""
    sys.meta_path.insert(0, _BeforeTorch())


class _BeforeTorch(importlib.abc.MetaPathFinder):
    """Loads the library, imports torch, and makes it use the library, at the first import of
    torch."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        gpu = _loaded()
        spec = importlib.util.find_spec("torch")
        assert spec and spec.loader
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _install(gpu)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _loaded() -> Gpu:
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_folder() / "lib" / name), ctypes.RTLD_GLOBAL)
    return Gpu(str(library()))


def _install(gpu: Gpu) -> None:
    from simulated_gpu import cuda, nccl

    cuda.install(gpu)
    nccl.install(gpu)
