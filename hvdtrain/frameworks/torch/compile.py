"""speed.compile: torch.compile, what it needs, and how its CUDA graphs are kept from overwriting gradients."""

from __future__ import annotations

import importlib.util
import os
import shutil

import torch

from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError

COMPILERS = ("g++", "clang++", "c++")
GRAPHS = ("reduce-overhead", "max-autotune")  # torch.compile's modes with CUDA graphs


def compiled(model: torch.nn.Module, mode: str) -> torch.nn.Module:
    """The model, which torch.compile turns into kernels at its first call: a minute, once for each shape, kept on disk by torch."""
    return model if mode == "none" else torch.compile(model, mode=mode)  # type: ignore[return-value]


def keep_gradients(mode: str, parameters: list[torch.nn.Parameter]) -> None:
    """Between two passes of a step: CUDA graphs write the next pass's gradients into the memory of this one's."""
    if mode in GRAPHS and parameters[0].device.type == "cuda":
        for p in parameters:
            p.grad = None if p.grad is None else p.grad.clone()


def check_compiler(config: Config, device: torch.device) -> None:
    """Raises UserError where torch.compile would fail at the first step: it calls a C++ compiler, and on a GPU triton."""
    if config.speed.compile != "none" and device.type == "cuda" and not importlib.util.find_spec("triton"):
        raise UserError("torch.compile on a GPU needs triton", config.where("speed.compile"), "pip install triton, or speed.compile=none")
    chosen = os.environ.get("CXX", "")
    if config.speed.compile != "none" and not any(shutil.which(name) for name in (chosen, *COMPILERS) if name):
        what = "torch.compile needs a C++ compiler; none of " + ", ".join(COMPILERS) + " is on the path"
        raise UserError(what, config.where("speed.compile"), "install g++, or speed.compile=none")


def compile_summary(mode: str) -> str:
    """For the line that describes the learner."""
    return "" if mode == "none" else f", compiled ({mode})"
