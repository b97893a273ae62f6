"""Jobs on a simulated GPU and on the CPU: a function for on_ranks.py, which has not imported torch.

Alone each job runs on the CPU and on the GPU; on ranks on the GPU only, once for each engine.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from simulated_gpu.load import Gpu, start

WARM_UP = 2  # steps in which torch and hvdtrain allocate what they keep


class Watched:
    """A learner's step, in which the waits of the host are counted, but not those of WARM_UP."""

    def __init__(self, gpu: Gpu, device: int) -> None:
        self._gpu = gpu
        self._device = device
        self.steps = 0
        self.peak_bytes = 0  # within a step

    def put_around(self, learner: Any) -> None:
        step = learner.step

        def watched(*arguments: Any) -> Any:
            self.steps += 1
            if self.steps <= WARM_UP:
                return step(*arguments)
            self._gpu.reset_peak(self._device)
            with self._gpu.recorder.watching():
                found = step(*arguments)
            self.peak_bytes = max(self.peak_bytes, self._gpu.peak_memory(self._device))
            return found

        learner.step = watched

    def waits(self) -> dict[str, float]:
        """In one step, by place."""
        watched = max(1, self.steps - WARM_UP)
        return {
            what: round(count / watched, 2)
            for what, count in self._gpu.recorder.waits_of("MainThread").items()
        }


def on_gpu(gpu: Gpu, words: str, communicator: Any) -> dict[str, Any]:
    """The losses of a job on this rank's GPU, and what its process did."""
    from invariance import losses

    from simulated_gpu import nccl

    device = communicator.local_rank % gpu.device_count()
    gpu.recorder.clear()
    nccl.calls.clear()
    gpu.new_epoch()
    gc.collect()
    gpu.reset_peak(device)
    before = gpu.memory(device)
    watched = Watched(gpu, device)
    start: dict[str, int] = {}

    def built(learner: Any) -> None:
        start["bytes"] = gpu.memory(device) - before
        start["peak_bytes"] = gpu.peak_memory(device) - before
        watched.put_around(learner)

    began_s = time.perf_counter()
    found = losses(f"{words} speed.device=cuda", communicator, built)
    return {
        "losses": found["losses"],
        "val": found["val"],
        "waits": watched.waits(),
        "devices": sorted(gpu.recorder.devices),
        "races": list(gpu.recorder.races),
        "seconds": time.perf_counter() - began_s,
        "start": start,
        "peak_bytes": watched.peak_bytes - before,
        "calls": [list(call) for call in nccl.calls],
    }


def on_cpu(words: str, communicator: Any) -> dict[str, Any]:
    from invariance import losses

    found = losses(f"{words} speed.device=cpu", communicator)
    return {"losses": found["losses"], "val": found["val"]}


def alone(gpu: Gpu, jobs: dict[str, str]) -> dict[str, Any]:
    from hvdtrain.comm.communicator import SingleProcessCommunicator

    one = SingleProcessCommunicator()
    results = {}
    for name, words in jobs.items():
        try:
            results[name] = {"cpu": on_cpu(words, one), "gpu": on_gpu(gpu, words, one)}
        except Exception:
            results[name] = {"error": traceback.format_exc()}
    return results


def on_ranks(gpu: Gpu, jobs: dict[str, str], engine: str) -> tuple[dict[str, Any], int]:
    """What each job did on each rank, and this rank."""
    import torch
    from waiting_rank import connect

    communicator = connect(engine, 1)
    results: dict[str, Any] = {}
    for name, words in jobs.items():
        try:
            found = on_gpu(gpu, words, communicator)
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # the other ranks wait in a collective
        results[name] = communicator.allgather_object(json.loads(json.dumps(found)))
    rank = communicator.rank
    if engine != "torchdist" and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    communicator.close()
    return results, rank


def main(out: str, jobs: dict[str, str], *engines: str) -> None:
    """Writes what each job did to `out`, as JSON: {"tool": ..., "jobs": ...} of one process, else
    {engine: {job: [each rank's]}}. A job that fails leaves its traceback."""
    gpu = start(2)
    if not engines:
        from simulated_gpu import checks

        results = {"tool": checks.found(gpu), "jobs": alone(gpu, jobs)}
        Path(out).write_text(json.dumps(results))
        return
    every = {}
    rank = 0
    for engine in engines:
        every[engine], rank = on_ranks(gpu, jobs, engine)
    if rank == 0:
        Path(out).write_text(json.dumps(every))
