"""The forward passes of a model: of training and of evaluation, compiled where speed.compile says so."""

from __future__ import annotations

import importlib.util
import os
import shutil

import torch

from hvdtrain.config.read import Provenance
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.parallel.strategy import Forward

COMPILERS = ("g++", "clang++", "c++")
GRAPHS = ("reduce-overhead", "max-autotune")  # torch.compile's modes with CUDA graphs


def forwards(config: Config, model: torch.nn.Module, wrapped: torch.nn.Module | None) -> tuple[torch.nn.Module, torch.nn.Module]:
    """(what a forward pass of training goes through, what one of evaluation does); `wrapped` is a reducer's own."""
    body = compiled(config, model)
    return (Forward(body, config.norm.kind == "sync") if wrapped is None else wrapped), body


def compiled(config: Config, model: torch.nn.Module) -> torch.nn.Module:
    """The model, which torch.compile turns into kernels at its first call: a minute, once for each shape, kept on disk by torch."""
    mode = config.speed.compile
    return model if mode == "none" else torch.compile(model, mode=mode)  # type: ignore[return-value]


def keep_gradients(config: Config, parameters: list[torch.nn.Parameter]) -> None:
    """Between two passes of a step: CUDA graphs write the next pass's gradients into the memory of this one's."""
    if config.speed.compile in GRAPHS and parameters[0].device.type == "cuda":
        for p in parameters:
            p.grad = None if p.grad is None else p.grad.clone()


def check_compiler(config: Config, provenance: Provenance, device: torch.device) -> None:
    """A UserError where torch.compile would fail at the first step: it calls a compiler, and on a GPU triton."""
    if config.speed.compile != "none" and device.type == "cuda" and not importlib.util.find_spec("triton"):
        raise UserError(
            "torch.compile on a GPU needs triton", provenance.where("speed.compile"), "pip install triton, or speed.compile=none"
        )
    own = os.environ.get("CXX", "")
    if config.speed.compile != "none" and not any(shutil.which(name) for name in (own, *COMPILERS) if name):
        what = "torch.compile needs a C++ compiler; none of " + ", ".join(COMPILERS) + " is on the path"
        raise UserError(what, provenance.where("speed.compile"), "install g++, or speed.compile=none")


def compile_words(config: Config) -> str:
    """For the line that tells the user."""
    return "" if config.speed.compile == "none" else f", compiled ({config.speed.compile})"
