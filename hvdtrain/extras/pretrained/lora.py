"""model.lora: low-rank adapters beside the frozen weights of linear layers, and of transformers'
Conv1D.

Source: Hu et al. 2021, arXiv:2106.09685, 4.1: W x + (alpha / rank) B A x, where A is initialized
like a linear layer of torch, and B is zero.
"""

from __future__ import annotations

import fnmatch
import math
import sys
from typing import Any

import torch
from torch import nn

from hvdtrain.config.schema import Config
from hvdtrain.config.sections.model import ModelConfig
from hvdtrain.errors import UserError, nearest, short
from hvdtrain.frameworks.torch.call import Called, call
from hvdtrain.frameworks.torch.check_outputs import example
from hvdtrain.frameworks.torch.lora_layer import LoraLayer, LoraLinear
from hvdtrain.tasks.task import Task


def add_adapters(model: nn.Module, config: Config, task: Task) -> None:
    """Adds adapters. Raises UserError if an adapter would have no effect. Other errors of the model
    are reported where it is checked."""
    adapt(model, config.model)
    try:
        check_calls(
            model,
            example(2, config, task, next(model.parameters()).detach().new_empty(0)),
            config.model,
        )
    except UserError:
        raise
    except Exception:
        return


def adapt(model: nn.Module, config: ModelConfig) -> None:
    """Adds an adapter to each layer that matches model.lora, and freezes its weight and bias.

    Raises UserError if a pattern matches no layer, or if a weight is shared with another layer,
    because a merge would change both.
    """
    kinds = _kinds()
    layers = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module) in kinds
    }
    for pattern in config.lora:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in layers):
            names = " or ".join(["torch.nn.Linear", *(kind.__name__ for kind in [*kinds][1:])])
            what = f"model.lora: {short(pattern)} matches no {names} of the model"
            raise UserError(
                what,
                config.where("lora"),
                nearest(pattern, list(layers)) if layers else "a model with linear layers",
            )
    adapted = {
        name: layer
        for name, layer in layers.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in config.lora)
    }
    for name, layer in adapted.items():
        _check_weight(model, name, layer, config)
    for layer in dict.fromkeys(adapted.values()):  # a layer may have several names
        _adapt(layer, kinds[type(layer)], config)
    _call_layers(model)


def _kinds() -> dict[type[nn.Module], type[LoraLayer]]:
    """Returns the kinds of layers that get an adapter, and what each becomes."""
    kinds: dict[type[nn.Module], type[LoraLayer]] = {nn.Linear: LoraLinear}
    if "transformers" in sys.modules:
        from hvdtrain.extras.pretrained.conv1d import Conv1D, LoraConv1D

        kinds[Conv1D] = LoraConv1D
    return kinds


def _call_layers(model: nn.Module) -> None:
    """Makes encoders of torch.nn call their layers in evaluation too: torch's fast path would use
    the weights of adapted layers without their adapters."""
    for module in model.modules():
        if not any(isinstance(inner, LoraLayer) for inner in module.modules()):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # only the fast path reads it
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # only the fast path takes nested tensors


def _check_weight(model: nn.Module, name: str, layer: nn.Module, config: ModelConfig) -> None:
    """Raises UserError if a layer's weight is tied to another module's, or is computed from
    other parameters."""
    where = config.where("lora")
    if not isinstance(weight := layer._parameters.get("weight"), nn.Parameter):
        what = (
            f"model.lora: the weight of {name} is computed from other parameters, as with "
            "weight_norm"
        )
        raise UserError(what, where, "fewer names in model.lora, or the layer without it")
    for other_name, module in model.named_modules():
        for own, p in module._parameters.items():
            if p is weight and module is not layer:
                other = f"{other_name}.{own}".removeprefix(".")
                what = (
                    f"model.lora: {name}.weight is tied to {other}, so merging an adapter into it "
                    "would change both"
                )
                untied = "model.tied=false of gpt, model.tie_word_embeddings=false of transformers"
                fix = f"leave {name} out of model.lora; or a model that does not tie them: {untied}"
                raise UserError(what, where, fix)


def _adapt(layer: Any, kind: type[LoraLayer], config: ModelConfig) -> None:
    weight = layer.weight
    is_linear = kind is LoraLinear
    outputs, inputs = weight.shape if is_linear else weight.shape[::-1]
    rank = config.lora_rank
    # a square Conv1D with the full rank could not be told from a Linear by shapes
    most = min(weight.shape) - (not is_linear and inputs == outputs)
    if rank > most:
        what = (
            f"model.lora_rank={rank} is too large for a layer of {inputs} inputs and "
            f"{outputs} outputs"
        )
        raise UserError(what, config.where("lora_rank"), f"{most} or less")
    layer.requires_grad_(False)
    layer.__class__ = kind
    shapes = ((rank, inputs), (outputs, rank)) if is_linear else ((inputs, rank), (rank, outputs))
    layer.lora_A = nn.Parameter(weight.new_empty(shapes[0]))
    layer.lora_B = nn.Parameter(weight.new_zeros(shapes[1]))
    # bounded by the number of inputs
    nn.init.kaiming_uniform_(
        layer.lora_A, a=math.sqrt(5), mode="fan_in" if is_linear else "fan_out"
    )
    layer.lora_scale = config.lora_scale
    layer.lora_dropout = config.lora_dropout


def check_calls(model: nn.Module, inputs: Called, config: ModelConfig) -> None:
    """Raises UserError if a forward pass takes the weight of an adapted layer without calling
    the layer."""
    waiting = {
        name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)
    }
    called: set[nn.Module] = set()
    hooks = [
        module.register_forward_hook(lambda module, *_: called.add(module))
        for module in waiting.values()
    ]
    training = model.training
    try:
        with torch.no_grad():
            call(model.eval(), inputs)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    if left := [name for name, module in waiting.items() if module not in called]:
        what = f"the model does not call its layer {left[0]}, so an adapter would have no effect"
        raise UserError(what, config.where("lora"), "fewer names in model.lora")
