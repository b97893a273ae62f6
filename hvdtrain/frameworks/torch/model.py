"""The torch model that model.name means, with its norms and first weights; and the check that it gives logits."""

from __future__ import annotations

import traceback

import torch

from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.frameworks import build_model as models
from hvdtrain.frameworks.learner import Task
from hvdtrain.frameworks.torch.classifier_init import init_classifier
from hvdtrain.frameworks.torch.norm.ghost import use_norm


def normed_model(config: Config, task: Task, communicator: Communicator) -> torch.nn.Module:
    """The model, with the norms of norm.kind and the classifier of model.classifier_std."""
    model = build_model(config, task)
    if config.model.classifier_std is not None:
        init_classifier(model, task.classes, config.model.classifier_std, config.where("model.classifier_std"))
    norm = config.norm
    return use_norm(model, norm.kind, norm.ghost, norm.statistics, communicator)


def check_logits(model: torch.nn.Module, config: Config, task: Task) -> None:
    """Raises UserError where a forward pass of two black images does not give two rows of logits; with norm.kind=sync also of none."""
    first, where = next(model.parameters()), config.where("model.name")
    for count in (2, 0) if config.norm.kind == "sync" else (2,):
        images = black(count, task, first)
        try:
            with torch.no_grad():
                logits = model.eval()(images)
        except UserError:
            raise
        except Exception as error:
            inner = traceback.extract_tb(error.__traceback__)[-1]
            what = f"the model fails for images {tuple(images.shape)}: {type(error).__name__}: {error}"
            fix = "x.flatten(1) takes an empty batch, which norm.kind=sync may give a rank" if not count else "try the model alone"
            raise UserError(what, f"{where}; {inner.filename}:{inner.lineno}", fix) from error
        if not isinstance(logits, torch.Tensor) or logits.ndim != 2 or len(logits) != count or logits.shape[1] < task.classes:
            shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
            what = f"for images {tuple(images.shape)} the model gives {shape}, not logits ({count}, {task.classes})"
            raise UserError(what, where, "end the model with one output for each class")


def black(count: int, task: Task, like: torch.Tensor) -> torch.Tensor:
    """Images of zeros, (count, C, H, W)."""
    return torch.zeros((count, task.shape[2], *task.shape[:2]), dtype=like.dtype, device=like.device)


def build_model(config: Config, task: Task) -> torch.nn.Module:
    """A plugin of torch/models/ by name, or the user's own package.module:Class. Raises UserError where it is not a model to train."""
    name, where = config.model.name, config.where("model.name")
    model: torch.nn.Module = models.build_model(config, task, "frameworks/torch/models")
    if not isinstance(model, torch.nn.Module):
        raise UserError(
            f"{name} gave a {type(model).__name__}, not a torch.nn.Module", where, "give a class of modules, or another framework="
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"{name} has no parameter to train", where, "give a model with parameters that require a gradient")
    return model


def checked_model(config: Config, task: Task) -> torch.nn.Module:
    """The model of one rank; a user's own class is checked by a forward pass."""
    model = normed_model(config, task, SingleProcessCommunicator())
    if plugins.is_dotted(config.model.name):  # the plugins fit every task; lazy layers of a user's get their shapes here
        check_logits(model, config, task)
    return model
