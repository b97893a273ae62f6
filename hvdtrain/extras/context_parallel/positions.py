"""Which positions of a sequence each rank has."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hvdtrain.comm.communicator import part_of


class PositionsOfRanks(NamedTuple):
    """The positions of a sequence, divided among `ranks`.

    In zigzag order, the sequence has 2 x ranks chunks, and rank r has the chunks r and 2 x ranks -
    1 - r. With causal attention each rank then computes the same number of products (Grattafiori
    et al. 2024, arXiv:2407.21783, section 3.3.2; the imbalance without it: Brandon et al. 2023,
    arXiv:2311.09431). If the length does not divide evenly, the first chunks have one position
    more, so nothing is padded.
    """

    length: int
    ranks: int
    zigzag: bool

    def chunks(self, rank: int) -> tuple[range, ...]:
        """Returns the contiguous positions of a rank, in ascending order."""
        if not self.zigzag:
            parts = [part_of(self.length, rank, self.ranks)]
        else:
            count = 2 * self.ranks
            parts = [part_of(self.length, number, count) for number in (rank, count - 1 - rank)]
        return tuple(range(part.start, part.stop) for part in parts)

    def count(self, rank: int) -> int:
        return sum(map(len, self.chunks(rank)))

    def of(self, rank: int, device: torch.device | None = None) -> torch.Tensor:
        """Returns int64 (count(rank),)"""
        return torch.cat(
            [torch.arange(chunk.start, chunk.stop, device=device) for chunk in self.chunks(rank)]
        )
