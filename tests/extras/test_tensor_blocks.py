"""A model that is created block by block, of whose layers a rank has parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.core.arrays import Cut
from hvdtrain.extras.tensor.plan import TensorParallelLayers
from hvdtrain.frameworks.torch import deferred
from hvdtrain.frameworks.torch.models.gpt import GPT
from hvdtrain.frameworks.torch.parallel import block_by_block
from hvdtrain.frameworks.torch.parallel.block_by_block import BlockByBlock, make_block_by_block

TOKENS = torch.arange(12).view(2, 6) % 17
ALONE = SingleProcessCommunicator()


@pytest.fixture(autouse=True)
def _no_model_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_by_block, "WHOLE_BYTES", 0)
    monkeypatch.setattr(deferred, "SMALL", 64)


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


class SecondOfTwo(SingleProcessCommunicator):
    rank = 1
    size = 2

    def allreduce(self, x: Any, name: str, op: Any = "sum") -> Any:
        return x  # as if the other rank had the same


def test_layers_are_cut_before_they_have_memory() -> None:
    expected = whole()
    blocks = made()
    blocks.end()
    plan = {name: how for name, how in expected.tensor_plan().items() if how != "sequence"}  # type: ignore[operator]
    layers = TensorParallelLayers(blocks.model, plan, SecondOfTwo(), "tests")
    layers.cut(blocks.model)
    assert layers.cuts and all(p.is_meta or p.numel() < 64 for p in layers.cuts)
    blocks.cut({part: (one, layers.cuts[part]) for one, part in layers.parts.items()})
    placed = blocks.place()
    cuts: dict[str, Cut] = layers.names
    for (name, p), other in zip(
        blocks.model.named_parameters(), expected.parameters(), strict=True
    ):
        assert torch.equal(p, cuts[name].take(other) if name in cuts else other), name
        assert p.untyped_storage().nbytes() == p.nbytes, name
    assert {placed[part] for part in layers.cuts} <= set(blocks.model.parameters())
