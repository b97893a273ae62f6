"""The forward passes of a model: of training and of evaluation, compiled where speed.compile says so."""

from __future__ import annotations

import os
import shutil

import torch

from hvdtrain.config import Config
from hvdtrain.configure import Origins
from hvdtrain.errors import UserError
from hvdtrain.frames.torch_reduce import Forward

COMPILERS = ("g++", "clang++", "c++")


def forwards(config: Config, model: torch.nn.Module, wrapped: torch.nn.Module | None) -> tuple[torch.nn.Module, torch.nn.Module]:
    """(what a forward pass of training goes through, what one of evaluation does); `wrapped` is a reducer's own."""
    body = compiled(config, model)
    return (Forward(body, config.norm.kind == "sync") if wrapped is None else wrapped), body


def compiled(config: Config, model: torch.nn.Module) -> torch.nn.Module:
    """The model, which torch.compile turns into kernels at its first call: a minute, once for each shape, kept on disk by torch."""
    mode = config.speed.compile
    return model if mode == "none" else torch.compile(model, mode=mode)  # type: ignore[return-value]


def check_compiler(config: Config, origins: Origins, device: torch.device) -> None:
    """A UserError where torch.compile would fail for want of a C++ compiler, which it calls on a CPU."""
    own = os.environ.get("CXX", "")
    if config.speed.compile != "none" and device.type == "cpu" and not any(shutil.which(name) for name in (own, *COMPILERS) if name):
        what = "torch.compile on a CPU needs a C++ compiler; none of " + ", ".join(COMPILERS) + " is on the path"
        raise UserError(what, origins.where("speed.compile"), "install g++, or speed.compile=none")


def compile_words(config: Config) -> str:
    """For the line that tells the user."""
    return "" if config.speed.compile == "none" else f", compiled ({config.speed.compile})"
