"""A multi-layer perceptron with ReLU: no batch statistics, so that any number of ranks computes the
same."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict

from torch import nn

from hvdtrain.frameworks.model_options import check_mlp
from hvdtrain.frameworks.torch.sparse_dropout import SparseDropout


class MLP(nn.Sequential):
    """Flattened images, hidden layers, logits."""

    def tensor_plan(self) -> dict[str, str]:
        """Partitions pairs of layers, so that one sum over ranks follows each pair; with an odd
        number of layers, the last one is replicated."""
        layers = [
            name for name, layer in self.named_children() if name.startswith("fc") or name == "head"
        ]
        pairs = zip(layers[::2], layers[1::2], strict=False)
        return {
            name: way
            for columns, rows in pairs
            for name, way in ((columns, "columns"), (rows, "rows"))
        }


def build(
    name: str,
    shape: tuple[int, ...],
    outputs: int,
    *,
    widths: tuple[int, ...] = (128,),
    dropout: float = 0.0,
) -> nn.Module:
    """Flattened images, hidden layers, logits.

    widths: neurons of each hidden layer
    dropout: share of hidden activations dropped in training, 0 to 1

    Raises UserError for widths below 1 and a dropout outside of 0 to 1.
    """
    check_mlp(widths, dropout)
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    for i, (before, after) in enumerate(itertools.pairwise((math.prod(shape), *widths)), start=1):
        layers[f"fc{i}"] = nn.Linear(before, after)
        layers[f"relu{i}"] = nn.ReLU()
        if dropout:
            layers[f"dropout{i}"] = SparseDropout(dropout)
    layers["head"] = nn.Linear((math.prod(shape), *widths)[-1], outputs)
    return MLP(layers)
