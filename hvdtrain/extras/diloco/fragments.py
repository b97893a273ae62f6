"""Which parameters belong to which fragment: every Nth layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdtrain.frameworks.torch.strategy import NamedParameters


def layer_of(name: str) -> str:
    """Returns the layer of a parameter: the module in a list, blocks.3 for
    blocks.3.attention.weight, else the module that has it."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts[:-1]) if part.isdecimal()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1])


def by_layer(named: NamedParameters) -> list[list[torch.nn.Parameter]]:
    """Returns the parameters of each layer, in the order of the model."""
    layers: dict[str, list[torch.nn.Parameter]] = {}
    for name, p in named:
        layers.setdefault(layer_of(name), []).append(p)
    return list(layers.values())


def strided(
    layers: Sequence[Sequence[torch.nn.Parameter]], fragments: int
) -> list[list[torch.nn.Parameter]]:
    """Returns the parameters of each fragment: of layers i, i + fragments, i + 2 fragments, ...
    (the strided pattern of Douillard 2025, arXiv:2501.18512)."""
    return [[p for layer in layers[first::fragments] for p in layer] for first in range(fragments)]
