"""use_norm() replaces a model's batch norms, by ghost batch norms or by those over the samples of
all ranks."""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.order import SameOrder
from hvdtrain.errors import UserError
from hvdtrain.extras.batch_norms.ghost import GhostBatchNorm, Ghosts, Statistics
from hvdtrain.extras.batch_norms.sync import (
    SyncBatchNorm,
    end_forward,
    order_of_norms,
)
from hvdtrain.frameworks.torch.private_api import BatchNorm

CPU = torch.device("cpu")
Kind = Literal["batch", "ghost", "sync"]


def use_norm(
    model: nn.Module,
    kind: Kind,
    ghost: int,
    statistics: Statistics,
    communicator: Communicator,
    device: torch.device = CPU,
) -> nn.Module:
    """Replaces BatchNorm1d, 2d, 3d and SyncBatchNorm layers, at any depth, by ghost or sync norms;
    with kind=batch by nothing. device: on which the model will be.

    In place, except for a model that is itself a norm. The new layers have the weights, buffers,
    settings and state_dict names of the old, not their hooks. With ghost, call the model as
    model(batch, ...): its first input and its output have a row for each sample, in the order of
    the batch. With sync, every rank calls it equally often, a rank without samples with an empty
    batch.

    Raises UserError if the model has no such layer, or one that cannot be replaced.
    """
    if kind == "batch":
        return model
    ghosts = Ghosts(ghost)
    order = order_of_norms(communicator, device)
    replacements: dict[nn.Module, nn.Module] = {}
    for name, norm in model.named_modules():  # a layer in two places appears once
        if isinstance(norm, BatchNorm):
            check_replaceable(norm, name, kind)
            if kind == "ghost":
                replacements[norm] = GhostBatchNorm(norm, ghosts, statistics)
            else:
                replacements[norm] = SyncBatchNorm(norm, communicator, name or "model", order)
    if not replacements:
        raise UserError(
            "the model has no batch norm layer, so norm.kind has no effect",
            f"norm.kind={kind}",
            "norm.kind=batch",
        )
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if child in replacements:
                setattr(parent, name, replacements[child])
    model = replacements.get(model, model)
    if kind == "ghost":
        model.register_forward_pre_hook(ghosts.before_forward)
        model.register_forward_hook(ghosts.after_forward)
    else:
        model.register_forward_hook(functools.partial(end_forward, order))
    return model


def orders_of_norms(model: torch.nn.Module) -> list[SameOrder]:
    return list(
        dict.fromkeys(
            module.order for module in model.modules() if isinstance(module, SyncBatchNorm)
        )
    )


def check_replaceable(norm: BatchNorm, name: str, kind: Kind) -> None:
    """Raises UserError for a layer that cannot be replaced without loss."""
    layer = f"{name or 'the model'} ({type(norm).__name__})"
    where = f"norm.kind={kind}"
    if isinstance(norm, LazyModuleMixin):
        raise UserError(
            f"{layer} has no fixed number of channels yet",
            where,
            "give it: nn.BatchNorm2d(64), not nn.LazyBatchNorm2d()",
        )
    if type(norm).forward not in (BatchNorm.forward, nn.SyncBatchNorm.forward):
        raise UserError(
            f"{layer} overrides the computation of batch norm, which norm.kind={kind} would "
            "replace",
            where,
            "norm.kind=batch, or torch's own BatchNorm",
        )
