"""Layers with a low-rank adapter; an extra adds it, and has one of transformers' Conv1D."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class LoraLayer(nn.Module):
    """A layer that became one with an adapter; its weight and bias keep their names."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scale: float
    lora_dropout: float


class LoraLinear(LoraLayer, nn.Linear):
    """A torch.nn.Linear with an adapter: lora_A (rank, inputs), lora_B (outputs, rank)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x, self.weight, self.bias)
        x = functional.dropout(x, self.lora_dropout, self.training) if self.lora_dropout else x
        return y + self.lora_scale * functional.linear(
            functional.linear(x, self.lora_A), self.lora_B
        )
