"""Several labels in torch: the loss of each sample, and its labels by prediction."""

from __future__ import annotations

import torch
from torch.nn import functional

from hvdtrain.tasks.label_counts import edges_of_bins, terms
from hvdtrain.tasks.task import DeviceAndDtype, Each
from hvdtrain.tasks.torch import Tensors, TorchInputs, main_output


class TorchMultilabel:
    """Logits (n, labels), y uint8 (n, labels). Images are uint8 (n, C, H, W)."""

    def __init__(self, inputs: TorchInputs, bins: int, place: DeviceAndDtype) -> None:
        self._inputs = inputs
        lower, upper = (
            torch.tensor(edges, dtype=torch.float64, device=place.device)
            for edges in edges_of_bins(bins)
        )
        self._edges = lower, upper

    def inputs(self, batch: Tensors) -> torch.Tensor:
        return self._inputs(batch["x"])

    def each(self, outputs: torch.Tensor, batch: Tensors, training: bool) -> Each:
        outputs = main_output(outputs)
        loss = functional.binary_cross_entropy_with_logits(
            outputs, batch["y"].to(outputs.dtype), reduction="none"
        ).mean(1)
        logits = outputs.detach()
        return Each(loss, terms(logits, logits.sigmoid(), batch["y"] > 0, self._edges))
