"""Jobs on a simulated GPU and on the CPU.

Alone each job runs on the CPU and on the GPU; on ranks on the GPU only, once for each engine.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
from invariance import COMMON, losses
from own_ways_on_ranks import trained
from waiting_rank import connect

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.config.read import configure
from hvdtrain.frameworks.footprint import PlannedStep
from hvdtrain.frameworks.torch.build import footprint
from hvdtrain.training.datasets import open_datasets
from simulated_gpu import checks, horovod_jobs, nccl
from simulated_gpu.load import Gpu
from simulated_gpu.table import WARM_UP

T = TypeVar("T")


class Job(NamedTuple):
    """train: as the trainer does; memory: with a prediction of its memory; loop: a script's loop of
    own_ways_on_ranks.py; horovod: a loop with Horovod's API; calls: all of Horovod's calls."""

    kind: str
    words: str


class Watched:
    """A learner's step that counts the host's waits, except in the steps of WARM_UP."""

    def __init__(self, gpu: Gpu, device: int) -> None:
        self._gpu = gpu
        self._device = device
        self.steps = 0
        self.peak_bytes = 0  # within a step
        # so far, before and after each step: what the host has sent to other ranks, or gathered
        self.exchanges: list[tuple[int, int]] = []

    def put_around(self, learner: Any) -> None:
        step = learner.step
        learner.step = lambda *arguments: self.watch(lambda: step(*arguments))

    def watch(self, step: Callable[[], T]) -> T:
        """Makes a step."""
        self.steps += 1
        recorder = self._gpu.recorder
        before = recorder.exchanges_of().total()
        if self.steps <= WARM_UP:
            found = step()
        else:
            self._gpu.reset_peak(self._device)
            with recorder.watching():
                found = step()
            self.peak_bytes = max(self.peak_bytes, self._gpu.peak_memory(self._device))
        self.exchanges.append((before, recorder.exchanges_of().total()))
        return found

    def waits(self) -> dict[str, float]:
        """In one step, by place."""
        watched = max(1, self.steps - WARM_UP)
        return {
            what: round(count / watched, 2)
            for what, count in self._gpu.recorder.waits_of("MainThread").items()
        }


class Run:
    """What one process does with a job, on its GPU or on the CPU."""

    def __init__(self, gpu: Gpu, job: Job, communicator: Any) -> None:
        self._gpu = gpu
        self._job = job
        self._communicator = communicator
        self._device = communicator.local_rank % gpu.device_count()

    def on_cpu(self) -> dict[str, Any]:
        return self._losses("cpu", lambda learner: None, lambda step: step())

    def on_gpu(self) -> dict[str, Any]:
        """Its losses, and what the process did meanwhile."""
        gpu = self._gpu
        gpu.recorder.clear()
        nccl.calls.clear()
        nccl.messages.clear()
        gpu.new_epoch()
        gc.collect()
        gpu.reset_peak(self._device)
        before = gpu.memory(self._device)
        watched = Watched(gpu, self._device)
        start = dict.fromkeys(("bytes", "peak_bytes", "largest_words"), 0)
        predicted: dict[str, int] = {}

        def built(learner: Any) -> None:
            start["bytes"] = gpu.memory(self._device) - before
            start["peak_bytes"] = gpu.peak_memory(self._device) - before
            watched.put_around(learner)
            start["largest_words"] = max(p.numel() for p in learner.parameters)
            if self._job.kind == "memory" and self._communicator.rank == 0:
                predicted.update(self._predicted(learner.data.size))

        began_s = time.perf_counter()
        found = self._losses("cuda", built, watched.watch)
        return {
            **found,
            "waits": watched.waits(),
            "exchanges": watched.exchanges,
            "exchanged": dict(gpu.recorder.exchanges_of()),
            "devices": sorted(gpu.recorder.devices),
            "races": list(gpu.recorder.races),
            "seconds": time.perf_counter() - began_s,
            "start": start,
            "peak_bytes": watched.peak_bytes - before,
            "predicted": predicted,
            "calls": [list(call) for call in nccl.calls],
            "messages": [list(message) for message in nccl.messages],
        }

    def _losses(
        self,
        device: str,
        built: Callable[[Any], None],
        watch: Callable[[Callable[[], Any]], Any],
    ) -> dict[str, Any]:
        """built: called with the learner; watch: calls each step of a loop with Horovod's API."""
        if self._job.kind in ("horovod", "calls"):
            own = torch.device(device, self._device if device == "cuda" else None)
            with horovod_jobs.initialized(self._communicator, own):
                if self._job.kind == "calls":
                    return horovod_jobs.called(own)
                return horovod_jobs.trained(self._job.words, own, watch)
        words = f"{self._job.words} speed.device={device}"
        if self._job.kind == "loop":
            found = trained([*words.split(), f"comm.engine={self._communicator.name}"])
            return {"losses": found["losses"], "val": {"loss": found["evaluated"]}}
        found = losses(words, self._communicator, built)
        return {"losses": found["losses"], "val": found["val"]}

    def _predicted(self, readers: int) -> dict[str, int]:
        """What `plan --memory` says of this rank, in bytes."""
        config = configure(None, f"{COMMON} {self._job.words}".split())
        task = open_datasets(config).task  # on rank 0 alone
        samples = -(-config.batch.size // readers)
        passes = -(-samples // (config.batch.micro or samples))
        step = PlannedStep(samples, passes, 1, 0, writes_checkpoints=False)
        ranks = self._communicator
        return footprint(config, task, step, ranks.size, ranks.features).named()


def alone(gpu: Gpu, jobs: dict[str, Job]) -> dict[str, Any]:
    one = SingleProcessCommunicator()
    results = {}
    for name, job in jobs.items():
        run = Run(gpu, job, one)
        try:
            results[name] = {"cpu": run.on_cpu(), "gpu": run.on_gpu()}
        except Exception:
            results[name] = {"error": traceback.format_exc()}
    return results


def on_ranks(gpu: Gpu, jobs: dict[str, Job], engine: str) -> dict[str, Any]:
    """What each job did on this rank. Loops come first: they connect the ranks themselves."""
    place = placement(os.environ)
    results: dict[str, Any] = {}
    loops = {name: job for name, job in jobs.items() if job.kind == "loop"}
    try:
        for name, job in loops.items():
            itself = SimpleNamespace(name=engine, local_rank=place.local_rank)
            results[name] = Run(gpu, job, itself).on_gpu()
        communicator = connect(engine, 1)
        for name, job in jobs.items():
            if name not in loops:
                results[name] = Run(gpu, job, communicator).on_gpu()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the other ranks wait in a collective
    if engine != "torchdist" and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    communicator.close()
    return results


def main(gpu: Gpu, out: str, words: dict[str, list[str]], engines: dict[str, list[str]]) -> None:
    """Writes what each job did to `out`, as JSON: {"tool": ..., "jobs": ...} of one process; on
    ranks {engine: {job: ...}}, to OUT.RANK. A job that fails leaves its traceback.

    words: {job: [kind, words]}; engines: {engine: its jobs}, empty for one process.
    """
    jobs = {name: Job(*row) for name, row in words.items()}
    if not engines:
        results = {"tool": checks.found(gpu), "jobs": alone(gpu, jobs)}
        Path(out).write_text(json.dumps(results))
        return
    every = {
        engine: on_ranks(gpu, {name: jobs[name] for name in names}, engine)
        for engine, names in engines.items()
    }
    Path(f"{out}.{placement(os.environ).rank}").write_text(json.dumps(every))
