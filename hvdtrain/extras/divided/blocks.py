"""The blocks of a model: modules that a rank can hold without the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch


def units(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the modules of the model's `blocks` that have parameters and share none with other
    modules. Other modules remain in the rest of the model."""
    blocks = [block for block in getattr(model, "blocks", ()) if isinstance(block, torch.nn.Module)]
    times = Counter(id(block) for block in blocks)
    owners = Counter(id(p) for p in _all_parameters(model.modules()))
    own = [block for block in blocks if times[id(block)] == 1 and list(block.parameters())]
    return [
        block
        for block in own
        if all(
            Counter(map(id, _all_parameters(block.modules())))[id(p)] == owners[id(p)]
            for p in block.parameters()
        )
    ]


def _all_parameters(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Returns the parameters of modules; a shared parameter occurs once for each of its modules."""
    return [p for module in modules for p in module._parameters.values() if p is not None]
