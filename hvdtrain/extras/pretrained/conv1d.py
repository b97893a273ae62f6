"""Adapters of transformers' Conv1D, the linear layer of GPT-2: its weight is (inputs, outputs)."""

from __future__ import annotations

import torch
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from hvdtrain.frameworks.torch.lora_layer import LoraLayer

__all__ = ["Conv1D", "LoraConv1D"]


class LoraConv1D(LoraLayer, Conv1D):
    """A Conv1D with an adapter: lora_A (inputs, rank), lora_B (rank, outputs)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)
        x = functional.dropout(x, self.lora_dropout, self.training) if self.lora_dropout else x
        return y + self.lora_scale * ((x @ self.lora_A) @ self.lora_B)
