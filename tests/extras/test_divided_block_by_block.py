"""A large model of which ranks will have parts: the numbers of the whole model, and the memory of
one block at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from model_in_blocks import ALONE, gpt, made, run, whole
from rank_threads import ThreadRank, in_threads
from torch import nn

from hvdtrain.comm.on_all_ranks import same_on_all_ranks
from hvdtrain.extras.divided import block_by_block, deferred
from hvdtrain.extras.divided.block_by_block import make_block_by_block
from hvdtrain.extras.divided.blocks import units
from hvdtrain.extras.divided.same_weights import as_on_rank_0


@pytest.fixture(autouse=True)
def _no_model_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_by_block, "WHOLE_BYTES", 0)
    monkeypatch.setattr(deferred, "SMALL", 64)


def in_memory_bytes(model: nn.Module) -> int:
    return sum(p.untyped_storage().nbytes() for p in model.parameters() if not p.is_meta)


def test_a_pass_has_the_numbers_of_the_model_and_the_memory_of_a_block() -> None:
    expected = whole()
    blocks = made()
    after = torch.rand(1)
    most: list[int] = []
    for block in units(blocks.model):
        block.register_forward_hook(
            lambda *_: most.append(in_memory_bytes(blocks.model)), prepend=True
        )
    assert torch.equal(run(blocks.model), run(expected))
    of_block = sum(p.nbytes for p in units(expected)[0].parameters())
    rest = sum(p.nbytes for p in expected.parameters()) - 3 * of_block
    # small tensors have memory all along, on the host
    small = sum(p.nbytes for p in expected.parameters() if p.numel() < deferred.SMALL)
    assert len(most) == 3 and max(most) <= rest + of_block + small
    blocks.end()
    assert in_memory_bytes(blocks.model) <= small
    torch.manual_seed(3)
    gpt()
    assert torch.equal(after, torch.rand(1)), "the generator is where it would be"


def test_a_rank_has_what_it_takes_and_the_shapes_of_the_rest() -> None:
    expected = whole()
    blocks = made()
    blocks.end()
    here = set(units(blocks.model)[1].parameters())
    names = {name for name, p in blocks.model.named_parameters() if p in here}
    blocks.place(lambda p: p in here)
    for (name, p), other in zip(
        blocks.model.named_parameters(), expected.parameters(), strict=True
    ):
        assert p.shape == other.shape and p.dtype == torch.float64, name
        if name in names:
            assert torch.equal(p, other), name
        else:
            assert p.untyped_storage().nbytes() == 8, name


class ReadsWeights(nn.Module):
    """Its blocks are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(20, 20)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.blocks[0].weight
        return x @ weight.T


def test_a_model_that_reads_the_weights_of_a_block_is_made_whole() -> None:
    torch.manual_seed(3)
    expected = ReadsWeights()
    torch.manual_seed(3)
    x = torch.ones(1, 20)
    found = make_block_by_block(
        ReadsWeights, torch.device("cpu"), torch.float32, ALONE, lambda model: model(x)
    )
    assert isinstance(found, ReadsWeights)
    assert torch.equal(found.blocks[0].weight, expected.blocks[0].weight)  # type: ignore[arg-type]


def test_only_numbers_that_differ_travel() -> None:
    def of_rank(rank: ThreadRank) -> tuple[list[bool], list[torch.Tensor], int]:
        sent = 0
        broadcast = rank.broadcast

        def counted(x: Any, name: str, root: int = 0) -> Any:
            nonlocal sent
            sent += x.nbytes
            return broadcast(x, name, root)

        rank.broadcast = counted  # type: ignore[method-assign]
        same = same_on_all_ranks(rank, [2**64 - 1, 5 + (rank.rank == 1), 7 if rank.rank else None])  # type: ignore[arg-type]
        found = [
            as_on_rank_0(torch.full((3,), value), rank)  # type: ignore[arg-type]
            for value in (1.0, 2.0 + rank.rank)
        ]
        # rank 1 does not need it, and has none
        tensor = torch.full((4,), 5.0, device="meta" if rank.rank == 1 else "cpu")
        is_used = rank.rank != 1
        found.append(as_on_rank_0(tensor, rank, is_used=is_used))  # type: ignore[arg-type]
        return same, found, sent

    for number, (same, found, sent) in enumerate(in_threads(3, of_rank)):
        assert same == [True, False, True] and sent == 12
        assert [one.tolist() for one in found[:2]] == [[1.0] * 3, [2.0] * 3]
        assert number == 1 or np.array_equal(found[2].numpy(), [5.0] * 4)
