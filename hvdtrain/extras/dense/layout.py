"""The layers of the dense part, whose neurons are partitioned over all ranks, for a picture."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import shown_bytes
from hvdtrain.extras.dense.hybrid import HybridModel
from hvdtrain.extras.dense.keys import DenseKeys
from hvdtrain.frameworks.torch.layer import Layer, LayerCut
from hvdtrain.frameworks.torch.planned import PlannedCommunicator


def dense_cuts(
    model: nn.Module, config: Config, ranks: int, layers: Sequence[Layer]
) -> dict[str, LayerCut]:
    """Returns how the layers of the dense part are partitioned over all ranks."""
    scheme = DenseKeys.of(config).dense
    assert scheme != "none", "arrangement_of() asks for it"
    hybrid = HybridModel(
        model,
        PlannedCommunicator(ranks, frozenset()),
        scheme,
        config.where("parallel.dense"),
    )
    of_cuts = hybrid.cuts()
    names = list(
        dict.fromkeys(
            name.rpartition(".")[0] for name, p in model.named_parameters() if p in of_cuts
        )
    )
    by_name = {layer.name: layer for layer in layers}
    cuts = {}
    for number, name in enumerate(names):
        rows = (
            f"rows of all ranks, {shown_bytes(by_name[name].inputs)} a sample; "
            if not number
            else ""
        )
        cuts[name] = LayerCut(
            "columns",
            f"{rows}neurons of all ranks, {shown_bytes(by_name[name].outputs)} a sample",
            over_all=True,
        )
    return cuts
