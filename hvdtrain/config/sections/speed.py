"""The section speed: number types, devices and compilation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hvdtrain.config.sections.extra_keys import with_keys_of_extras
from hvdtrain.config.sections.section import Section


@with_keys_of_extras
class SpeedConfig(Section):
    """How each rank computes."""

    section = "speed"
    precision: Literal["auto", "fp32", "fp64", "bf16", "fp16"] = Field(
        default="fp32",
        description="number type: fp32, fp64; bf16, fp16: weights stay in fp32, layers compute in "
        "16 bits; "
        "auto: bf16 where the device supports it in hardware",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="cpu; cuda: the GPU with this rank's local rank; auto: that GPU if there is "
        "one, else the CPU",
    )
    devices: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="devices of each rank, which divide the rows of its batches and have equal "
        "weights (framework=jax)",
    )
    channels_last: bool | None = Field(
        default=None,
        description="channels-last memory format for images; default: yes for built-in models, no "
        "for a class of your own "
        "(framework=torch)",
    )
    compile: Literal["none", "default", "reduce-overhead", "max-autotune"] = Field(
        default="none",
        description="torch.compile's mode: default, reduce-overhead (CUDA graphs) or "
        "max-autotune; none: not compiled (framework=torch)",
    )
    deterministic: bool = Field(
        default=False,
        description="on a GPU: only kernels that give the same bits each time, so that a resumed "
        "job equals one that never stopped to the "
        "last bit; slower. A CPU's always do (framework=torch)",
    )
