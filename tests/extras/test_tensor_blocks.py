"""A model that is created block by block, of whose layers a rank has parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_in_blocks import made, whole

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.core.arrays import Cut
from hvdtrain.extras.divided import block_by_block, deferred
from hvdtrain.extras.tensor.plan import TensorParallelLayers


@pytest.fixture(autouse=True)
def _no_model_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_by_block, "WHOLE_BYTES", 0)
    monkeypatch.setattr(deferred, "SMALL", 64)


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
