"""Utilization of GPUs by an NVML of ours: how often it is read, and what the header says."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.extras.energy.gauge import gpu_percent, measure
from hvdtrain.extras.energy.utilization import Utilization
from hvdtrain.frameworks.learner import Gpu


class Driver:
    """NVML, as far as it is used."""

    class NVMLError(Exception):
        """As pynvml has it."""

    def __init__(self, *percent: float) -> None:
        self.percent = list(percent)

    def nvmlInit(self) -> None:
        """Nothing to do."""

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-a":
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        return [0, 0]

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        if not self.percent:
            raise self.NVMLError("GPU is lost")
        return SimpleNamespace(gpu=self.percent.pop(0), memory=1)


def utilization(driver: Any, uuid: str, clock: list[float]) -> Utilization:
    gpu = Gpu(uuid, "no UUID" * (not uuid), "H200", lambda: 0)
    return Utilization(gpu, driver, lambda: clock[0])


def test_utilization_is_read_once_a_second() -> None:
    clock = [0.0]
    found = utilization(Driver(70, 90), "GPU-a", clock)
    readings = []
    for clock[0] in (0.0, 0.9, 1.0, 1.5, 3.0, 9.0):
        readings.append(found.percent())
    assert found.reason == "" and readings[:4] == [70, 70, 90, 90]
    assert all(map(math.isnan, readings[4:])), "a lost GPU has no figure, and ends no job"
    for uuid, reason in (("", "no UUID"), ("MIG-1", "part of a GPU"), ("GPU-b", "Not Found")):
        other = utilization(Driver(1), uuid, clock)
        assert reason in other.reason and math.isnan(other.percent())
    assert math.isnan(Utilization(None).percent())
    assert gpu_percent({"rank.gpu_percent": np.array([50.0, math.nan, 100.0])}) == {
        "gpu_percent": 75.0
    }
    assert gpu_percent({}) == {}


class OneDevice:
    """A learner whose device is a GPU that NVML does not know, or a processor."""

    def __init__(self, *, is_gpu: bool) -> None:
        self._is_gpu = is_gpu

    def gpu(self) -> Gpu | None:
        return Gpu("", "no driver", "NVIDIA H200", lambda: 0) if self._is_gpu else None


def test_what_the_header_and_the_sums_have() -> None:
    on_gpu: Any = OneDevice(is_gpu=True)
    found = measure(SingleProcessCommunicator(), on_gpu)
    assert found.device_words() == ["GPU utilization not measured: no driver"]
    (line,) = found.header_lines()
    assert line.startswith("energy  GPUs not measured: no driver; processors ")
    assert math.isnan(found.values({})["rank.gpu_percent"])
    assert found.from_step(7).start_fields() == found.start_fields()
    on_processor: Any = OneDevice(is_gpu=False)
    found = measure(SingleProcessCommunicator(), on_processor)
    assert found.device_words() == [] and found.values({}) == {}
    assert found.sync_sums().keys() == {"joules.due", "joules.gpu", "joules.cpu"}
