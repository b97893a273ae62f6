"""The dtypes in which a torch model computes, and the loss scale for fp16 gradients."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.call import Called, any_of, call
from hvdtrain.frameworks.torch.private_api import cpu_multiplies_bf16

T = TypeVar("T")

FIRST_SCALE = 2.0**16
NAME = "s.loss scale"  # the scale's name in a state; no parameter's name has a space
GROW_AFTER = 2000  # good steps, as in torch.amp.GradScaler


class Precision(NamedTuple):
    """Weights, gradients and optimizer state are of one type; with `layers` matrix products and
    convolutions compute in another."""

    weights: torch.dtype
    layers: torch.dtype | None
    summary: str  # "float32 and bfloat16"
    note: str = ""  # why it is slow on this device; printed after the device's name
    keeps_casts: bool = (
        True  # True: a weight is cast once per pass, and the copy stays until the pass ends
    )

    def autocast(self, device: torch.device) -> torch.autocast:
        """Returns the context of a forward pass on the device."""
        enabled = self.layers is not None
        return torch.autocast(
            device.type,
            self.layers or torch.bfloat16,
            enabled=enabled,
            cache_enabled=self.keeps_casts,
        )


def pick_precision(config: Config, device: torch.device, communicator: Communicator) -> Precision:
    """Returns the precision of speed.precision on this device; auto is bf16 if the devices of all
    ranks support it. Every rank calls it."""
    name = config.speed.precision
    why = ""
    if name == "auto":
        able = all(communicator.allgather_object(is_built_for_bf16(device)))
        name, why = (
            ("bf16", ", which this device is built for") if able else ("fp32", ": no bf16 unit")
        )
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
    weights = torch.float64 if name == "fp64" else torch.float32
    summary = (
        str(weights).removeprefix("torch.")
        + (f" and {str(half).removeprefix('torch.')}" if half else "")
        + why
    )
    note = ""
    if half is not None and is_emulated(half, device):
        note = (
            f" ({name} is emulated: this CPU has no instructions for it, and speed.precision=fp32 "
            "is several times faster)"
        )
    return Precision(weights, half, summary, note, keeps_casts=config.shard.stage < 3)


def is_built_for_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 faster than float32: AVX512-BF16, AMX, tensor cores of
    2020 and later, or an Intel GPU that reports it."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "xpu":
        return torch.xpu.is_bf16_supported(including_emulation=False)
    return cpu_multiplies_bf16()


_FLAGS = {  # in /proc/cpuinfo, on x86 and Arm
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "asimdhp"),
}


def is_emulated(half: torch.dtype, device: torch.device) -> bool:
    """Whether a CPU is known to have no instructions for products in this number type."""
    flags = cpu_flags() if device.type == "cpu" else frozenset()
    return bool(flags) and flags.isdisjoint(_FLAGS[half])


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Returns the features that the first core reports; empty if the system does not report
    them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(
        next(
            (
                line.partition(":")[2].split()
                for line in lines
                if line.startswith(("flags", "Features"))
            ),
            (),
        )
    )


def refuse_tiny_images(
    model: torch.nn.Module, inputs: Called, precision: Precision, where: str
) -> None:
    """Raises UserError for a convolution with a stride whose input has size 1x1: its bf16 gradient
    on a CPU is uninitialised memory.

    This is a bug of oneDNN in torch 2.13 for kernels of 3x3 and larger, found by tests that compare
    bf16 gradients with float32 gradients.
    """
    if precision.layers is not torch.bfloat16 or any_of(inputs).device.type != "cpu":
        return
    found: list[str] = []
    hooks = []
    for name, module in model.named_modules():
        if (
            isinstance(module, torch.nn.Conv2d)
            and max(module.stride) > 1
            and max(module.kernel_size) > 1
        ):
            hooks.append(
                module.register_forward_pre_hook(functools.partial(_note_tiny, found, name))
            )
    try:
        with torch.no_grad():
            call(model.eval(), inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if found:
        what = (
            f"{found[0]} has a stride and gets images of 1x1, for which this torch computes a "
            "wrong bf16 gradient on a CPU"
        )
        raise UserError(
            what,
            where,
            "larger images, a model that halves images less often, or speed.precision=fp32",
        )


def _note_tiny(
    found: list[str], name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]
) -> None:
    """A forward pre-hook for the convolution `name`."""
    if max(inputs[0].shape[2:]) == 1:
        found.append(name)


class Scale:
    """The factor of the loss before backward: 1, for dtypes whose gradients need no scale."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def scale(self, factor: torch.Tensor) -> torch.Tensor:
        """Returns the factor of the loss, times the scale."""
        return factor

    def unscale_(self, parameters: list[torch.nn.Parameter]) -> None:
        """Divides every p.grad by the scale."""

    def value(self) -> float | None:
        """Returns the scale, for which the host waits; None if the loss is not scaled."""
        return None

    def update(self, bad: torch.Tensor) -> torch.Tensor | bool:
        """Returns whether to skip the step because the scale was too large: a () bool tensor if
        only the device knows. `bad`: () bool, whether a gradient was not finite."""
        return False


class LossScale(Scale):
    """Multiplies the loss by a power of two, which is halved when gradients overflow and doubled
    after GROW_AFTER good steps.

    Micikevicius et al. 2018, arXiv:1710.03740, section 3.2, as torch.amp.GradScaler. All ranks see
    the same mean gradient, so their scales stay equal. A step that overflows is skipped. It counts
    as a step with bad numbers only if the scale cannot become smaller.
    """

    def __init__(self, device: torch.device) -> None:
        self._scale = torch.tensor(FIRST_SCALE, dtype=torch.float32, device=device)
        # steps since the scale changed
        self._good = torch.zeros((), dtype=torch.int64, device=device)
        self.tensors = {NAME: self._scale, f"{NAME} steps": self._good}

    def scale(self, factor: torch.Tensor) -> torch.Tensor:
        return factor * self._scale

    def unscale_(self, parameters: list[torch.nn.Parameter]) -> None:
        """Divides every p.grad by the scale: all lie on the model's device, or with shard.offload
        all in host memory."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients:
            # the host also waits if the gradients were copied to it
            factor = (1.0 / self._scale).to(gradients[0].device)
            torch._foreach_mul_(gradients, factor)

    def value(self) -> float | None:
        return float(self._scale)

    def update(self, bad: torch.Tensor) -> torch.Tensor:
        """Scale.update(), without waiting for the device."""
        bad = bad.to(self._scale.device)  # `bad` is in host memory if gradients are offloaded
        overflowed = bad & (self._scale > 1.0)
        self._good += 1
        grows = ~bad & (self._good >= GROW_AFTER)
        larger = (2.0 * self._scale).clamp(max=2.0**24)
        smaller = (0.5 * self._scale).clamp(min=1.0)
        self._scale.copy_(torch.where(bad, smaller, torch.where(grows, larger, self._scale)))
        self._good.masked_fill_(bad | grows, 0)
        return overflowed


def loss_scale(precision: Precision, device: torch.device) -> Scale:
    """Returns the loss scale for this precision."""
    return LossScale(device) if precision.layers is torch.float16 else Scale()


def load_loss_scale(scale: Scale, state: Arrays) -> None:
    """Loads the scale of a state if both have one: a job may resume in another precision."""
    for name, tensor in scale.tensors.items():
        if name in state:
            tensor.copy_(torch.from_numpy(np.asarray(state[name])))


def without_loss_scale(state: Mapping[str, T]) -> dict[str, T]:
    """Returns a state, or its shapes, without the loss scale."""
    return {name: of for name, of in state.items() if not name.startswith(NAME)}
