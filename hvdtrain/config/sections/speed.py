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
        description="number type: fp32 or fp64; bf16, fp16: weights stay in fp32, layers "
        "compute in 16 bits; auto: bf16 if the device supports it in hardware",
    )
    device: Literal["auto", "cpu", "cuda", "xpu"] = Field(
        default="auto",
        description="cpu; cuda: the GPU of NVIDIA or AMD with this rank's local rank; xpu: the GPU "
        "of Intel; auto: such a GPU if there is one, otherwise the CPU",
    )
    devices: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="devices per rank, which divide its batches among them and have equal "
        "weights (framework=jax)",
    )
    channels_last: bool | None = Field(
        default=None,
        description="use the channels-last memory format for images; default: yes for "
        "built-in models, no for your own class (framework=torch)",
    )
    compile: Literal["none", "default", "reduce-overhead", "max-autotune"] = Field(
        default="none",
        description="mode of torch.compile: default, reduce-overhead (CUDA graphs) or "
        "max-autotune; none: do not compile (framework=torch)",
    )
    peak_tflops: float | None = Field(
        default=None,
        gt=0,
        le=1e7,
        description="most operations of one device in 10^12 a second, for the MFU of the events; "
        "default: the data sheet's, for the GPUs that hvdtrain knows (framework=torch)",
    )
    deterministic: bool = Field(
        default=False,
        description="use only GPU kernels that give the same bits each time, so that a "
        "resumed job is bit-identical to an uninterrupted one; slower. CPU "
        "kernels always do (framework=torch)",
    )
