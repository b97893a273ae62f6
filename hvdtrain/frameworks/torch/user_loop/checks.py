"""Checks of ctx.prepare(): models and optimizers that the configuration does not support."""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.device import check_compiler
from hvdtrain.frameworks.torch.frozen import check_overlaps
from hvdtrain.frameworks.torch.optim.user_optimizer import check_elementwise
from hvdtrain.frameworks.torch.state import numpy_type
from hvdtrain.frameworks.torch.user_loop.prepared import WHERE, precision_is_asked


def uncompiled(model: Any) -> Any:
    """Returns the module inside a result of torch.compile(); its parameters have the original
    names."""
    return getattr(model, "_orig_mod", model)


def check_given(
    config: Config, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> None:
    """Raises UserError if the script's model or optimizer cannot be distributed over ranks as
    configured."""
    stage = config.shard.stage
    is_cut = config.shard.stage == 3 or config.parallel.cuts
    check_overlaps(model, WHERE)
    if not precision_is_asked(config):
        _check_types(uncompiled(model))
    if stage or is_cut:
        check_elementwise(
            optimizer,
            type(optimizer).__name__,
            config.where("shard.stage" if stage else "parallel.*"),
        )
    how, instead = (
        ("shard.stage=3", "shard.stage=2") if stage == 3 else ("parallel.*", "no parallel.*")
    )
    if is_cut and hasattr(model, "_orig_mod"):
        fix = f"torch.compile() of the layers inside, or {instead}"
        raise UserError(
            f"a compiled model would keep whole weights, but {how} divides them", WHERE, fix
        )
    types = {p.dtype for p in model.parameters()}
    if is_cut and len(types) > 1 and not precision_is_asked(config):
        what = (
            f"the model's parameters are of {', '.join(sorted(map(str, types)))}, but {how} only "
            "supports one type"
        )
        raise UserError(
            what,
            WHERE,
            f"model.to(torch.float32), with torch.autocast for 16-bit computation; or {instead}",
        )
    if config.speed.compile != "none" and hasattr(model, "_orig_mod"):
        raise UserError(
            "the model is compiled already",
            f"{WHERE}, {config.where('speed.compile')}",
            "one of the two",
        )
    check_compiler(config, device)


def _check_types(model: torch.nn.Module) -> None:
    """Raises UserError for a number type that a checkpoint's arrays cannot have."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        try:
            numpy_type(tensor.dtype)
        except TypeError:
            fix = (
                "speed.precision=bf16 in hvdtrain.init(): layers compute in bfloat16, weights and "
                "checkpoints are in float32"
            )
            what = f"{name} has type {tensor.dtype}, which a checkpoint cannot store"
            raise UserError(what, WHERE, fix) from None


def check_gradients(model: torch.nn.Module) -> None:
    """Raises UserError for gradients that cannot be reduced in buckets of real numbers."""
    sparse = next(
        (
            name
            for name, module in model.named_modules()
            if getattr(module, "sparse", False) is True
        ),
        None,
    )
    if sparse is not None:
        raise UserError(
            f"{sparse or 'the model'} makes sparse gradients",
            WHERE,
            "sparse=False, the default of torch.nn.Embedding",
        )
    numbers = next((name for name, p in model.named_parameters() if p.is_complex()), None)
    if numbers is not None:
        what = f"the parameter {numbers} is complex"
        raise UserError(
            what,
            WHERE,
            "a real parameter of shape (..., 2), and torch.view_as_complex() of it in forward",
        )
