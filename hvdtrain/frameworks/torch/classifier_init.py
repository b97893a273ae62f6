"""The first weights of the last layer."""

from __future__ import annotations

from torch import nn

from hvdtrain.errors import UserError


def init_classifier(model: nn.Module, classes: int, std: float, where: str) -> None:
    """Draws the weights of the last linear layer with `classes` outputs from N(0, std^2), and sets its bias to 0.

    Goyal 2017, arXiv:1706.02677, 5.1: std 0.01. Last is by the order in which the model's layers were made.

    Raises UserError where the model has no such layer.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer.out_features == classes]
    if not layers:
        what = f"{type(model).__name__} has no linear layer with {classes} outputs, one for each class"
        raise UserError(what, where, "leave model.classifier_std out, or end the model with an nn.Linear")
    nn.init.normal_(layers[-1].weight, std=std)
    if layers[-1].bias is not None:
        nn.init.zeros_(layers[-1].bias)
