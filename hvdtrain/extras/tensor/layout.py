"""The layers that a tensor group divides, for the figure."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import shown_bytes
from hvdtrain.extras.tensor.keys import TensorKeys
from hvdtrain.extras.tensor.plan import plan_of, resolve
from hvdtrain.frameworks.torch.layer import Layer, LayerCut


def tensor_cuts(model: nn.Module, config: Config, layers: Sequence[Layer]) -> dict[str, LayerCut]:
    """Returns cuts of the layers that the ranks of a tensor group have in parts, by name."""
    parts = TensorKeys.of(config).tensor
    where = config.where("parallel.tensor")
    by_name = {layer.name: layer for layer in layers}
    cuts = {}
    for name, way in resolve(model, plan_of(model, where), parts, where).items():
        if name not in by_name:  # a tied weight belongs to its first layer
            continue
        inputs = shown_bytes(by_name[name].inputs)
        outputs = shown_bytes(by_name[name].outputs)
        if way.kind == "columns":
            cuts[name] = LayerCut(
                "columns", f"backward: sum of gradients, {inputs} a sample", way.groups
            )
        elif way.kind == "rows":
            cuts[name] = LayerCut(
                "rows", f"forward: sum of outputs, {outputs} a sample", way.groups, axis=1
            )
        elif isinstance(model.get_submodule(name), nn.Embedding):
            cuts[name] = LayerCut("rows", f"forward: sum of outputs, {outputs} a sample")
        else:
            cuts[name] = LayerCut("columns", f"backward: sum of gradients, {inputs} a sample")
    return cuts
