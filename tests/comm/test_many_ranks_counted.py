"""What ranks compute of what all of them sent: operations in proportion to the ranks, whatever the
groups."""

from __future__ import annotations

from typing import Any

import pytest

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.comm.launcher_variables import Placement
from hvdtrain.comm.mesh import split_groups
from hvdtrain.frameworks.torch.device import shared_gpu

RANKS = 8192


class Counted(int):
    """A color, or the number of a host, whose comparisons are counted."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return int(self) == other

    def __hash__(self) -> int:
        return hash(int(self))


class Ranks8192(SingleProcessCommunicator):
    """Rank 0 of many, in groups of 8 neighbours."""

    size = RANKS

    def allgather_object(self, thing: Any) -> list[Any]:
        return [(Counted(rank // 8), f"host{rank // 8}", rank % 8) for rank in range(RANKS)]


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    monkeypatch.setattr(Counted, "comparisons", 0)
    return Counted


def test_groups_of_many_ranks(comparisons: type[Counted]) -> None:
    groups = split_groups(Ranks8192(), 0)
    assert groups.members == [list(range(first, first + 8)) for first in range(0, RANKS, 8)]
    assert groups.hosts == [rank // 8 for rank in range(RANKS)]
    assert groups.place(8191) == Placement(7, 8, 7, 8, "split")
    assert comparisons.comparisons < 2 * RANKS, "8 million, of each rank with each color"


def test_gpus_of_many_ranks(comparisons: type[Counted]) -> None:
    owners: list[Any] = [(Counted(rank // 8), f"gpu{rank % 8}") for rank in range(RANKS)]
    assert shared_gpu(owners) == ""
    owners[8190] = owners[8191]
    assert shared_gpu(owners) == "ranks 8190, 8191 on 1023 train on one GPU"
    assert comparisons.comparisons < 4 * RANKS, "67 million, of each GPU with each rank"
