"""What each device of a job achieves: samples, tokens and operations a second, and the model FLOPs
utilization (MFU)."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.extras.throughput.peaks import peak_tflops
from hvdtrain.frameworks.learner import Learner
from hvdtrain.tasks.task import Task
from hvdtrain.training.telemetry.throughput import Throughput

_DIGITS = 4  # digits of each number in the events


@dataclass(frozen=True)
class DeviceThroughput(Throughput):
    """Converts samples per second of all ranks into figures for one device."""

    devices: int = 1
    flops: float | None = None  # operations of the forward and backward pass of one sample
    why_no_flops: str = ""
    peak_tflops: float | None = None  # peak of one device
    of_peak: str = ""  # describes the peak, or why it is unknown

    def start_fields(self) -> dict[str, Any]:
        return {
            "devices": self.devices,
            "flops_per_sample": self.flops,
            "peak_tflops": self.peak_tflops,
        }

    def of_device(self, rates: Mapping[str, Any]) -> dict[str, float]:
        """Returns the fields; empty if no rate is known."""
        samples_per_s = rates.get("samples_per_s")
        if not samples_per_s or not math.isfinite(samples_per_s):
            return {}
        found = {"device_samples_per_s": samples_per_s / self.devices}
        if rates.get("tokens_per_s"):
            found["device_tokens_per_s"] = rates["tokens_per_s"] / self.devices
        if self.flops is not None:
            tflops = self.flops * samples_per_s / self.devices / 1e12
            found["device_tflops"] = tflops
            if self.peak_tflops:
                found["mfu"] = tflops / self.peak_tflops
        return {name: float(f"{value:.{_DIGITS}g}") for name, value in found.items()}

    def header_lines(self, more: Sequence[str] = ()) -> list[str]:
        """Formats the line: flops 9.87 MFLOP a sample, forward and backward; MFU of 989.5 TFLOP/s
        (NVIDIA H200, bfloat16)."""
        if self.flops is None:
            parts = [f"not counted: {self.why_no_flops}"]
        elif self.peak_tflops:
            parts = [
                _of_sample(self.flops),
                f"MFU of {self.peak_tflops:g} TFLOP/s ({self.of_peak})",
            ]
        else:
            parts = [_of_sample(self.flops), f"no MFU: {self.of_peak}"]
        return [f"flops   {'; '.join([*parts, *more])}"]

    def words(self, fields: Mapping[str, Any]) -> str:
        """Formats the rates: 1.23 TFLOP/s (45.1 % MFU) of each of 8 devices."""
        tflops = fields.get("device_tflops")
        if tflops is None:
            return ""
        mfu = f" ({fields['mfu']:.1%} MFU)" if "mfu" in fields else ""
        each = f" of each of {self.devices} devices" if self.devices > 1 else ""
        return f"{with_unit(1e12 * tflops)}/s{mfu}{each}"

    def on_other_ranks(
        self, config: Config, communicator: Communicator, learner: Learner
    ) -> Throughput:
        return replace(self, devices=count_devices(config, communicator, learner))


def _of_sample(flops: float) -> str:
    return f"{with_unit(flops)} a sample, forward and backward"


def with_unit(flops: float) -> str:
    """Formats operations: 8.18 GFLOP."""
    unit, factor = next(
        (
            (unit, factor)
            for unit, factor in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6))
            if flops >= factor
        ),
        ("kFLOP", 1e3),
    )
    return f"{flops / factor:.3g} {unit}"


def measure_throughput(
    config: Config, task: Task, communicator: Communicator, learner: Learner, *, is_small: bool
) -> Throughput:
    """Measures rank 0's model and device, and returns the result on every rank. A collective.
    is_small: the model can run on the CPU in milliseconds."""
    devices = count_devices(config, communicator, learner)
    found = (
        _of_this_rank(config, task, learner, devices, is_small) if not communicator.rank else None
    )
    result: DeviceThroughput = communicator.broadcast_object(found)
    return result


def _of_this_rank(
    config: Config, task: Task, learner: Learner, devices: int, is_small: bool
) -> DeviceThroughput:
    flops = None
    why = ""
    try:
        flops = _sample_flops(config, task, is_small)
    except UserError as error:
        why = error.what
    return DeviceThroughput(devices, flops, why, *_peak(config, learner))


def count_devices(config: Config, communicator: Communicator, learner: Learner) -> int:
    """Returns the devices of all ranks; a GPU that ranks share counts once. A collective."""
    gpu = learner.gpu()
    own = f"{socket.gethostname()} {gpu.uuid}" if gpu and gpu.uuid else f"{communicator.rank}"
    return len(set(communicator.allgather_object(own))) * config.speed.devices


def _sample_flops(config: Config, task: Task, is_small: bool) -> float:
    """Returns the operations of a sample. Raises UserError if they cannot be counted, or differ
    between samples."""
    if config.framework != "torch":
        raise UserError(f"framework={config.framework} does not count them")
    for key, differs in (
        ("data.pad", bool(config.data.pad)),
        (f"data.name={config.data.name}", config.data.is_of_texts),
        ("data.pack", config.data.pack is not None),
        ("model.thaw", bool(config.model.thaw)),
    ):
        if differs:
            raise UserError(f"{key} changes their number during the job")
    from hvdtrain.extras.throughput.sample_flops import sample_flops  # imports torch

    return sample_flops(config, task, is_small=is_small)


def _peak(config: Config, learner: Learner) -> tuple[float | None, str]:
    """Returns the peak of one device with its description, or why it is unknown."""
    if config.speed.peak_tflops is not None:
        return config.speed.peak_tflops, "speed.peak_tflops"
    gpu = learner.gpu()
    if gpu is None:
        return None, "speed.peak_tflops=N gives the peak of a processor"
    kind = learner.number_type
    peak = peak_tflops(gpu.name, kind)
    if peak is None:
        return None, f"the peak of {gpu.name} in {kind} is not known, speed.peak_tflops=N gives it"
    return peak, f"{gpu.name}, {kind}"
