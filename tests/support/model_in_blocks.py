"""A small GPT that is made block by block, as a large one is."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.extras.divided.block_by_block import BlockByBlock, make_block_by_block
from hvdtrain.frameworks.torch.models.gpt import GPT

TOKENS = torch.arange(12).view(2, 6) % 17
ALONE = SingleProcessCommunicator()


def gpt() -> nn.Module:
    return GPT(
        6,
        17,
        layers=3,
        heads=2,
        width=16,
        embedding_dropout=0.0,
        attention_dropout=0.0,
        residual_dropout=0.0,
        tied=False,
    )


def whole() -> nn.Module:
    torch.manual_seed(3)
    return gpt().double().eval()


@torch.no_grad()
def run(model: nn.Module) -> Any:
    return model.eval()(TOKENS)


def made() -> BlockByBlock:
    torch.manual_seed(3)
    found = make_block_by_block(gpt, torch.device("cpu"), torch.float64, ALONE, run)
    assert isinstance(found, BlockByBlock)
    return found
