"""PlannedWork: what a rank does in one step, counted before there is a job."""

from __future__ import annotations

from typing import NamedTuple

from hvdtrain.comm.counted import Moved
from hvdtrain.frameworks.footprint import Footprint


class PlannedWork(NamedTuple):
    """Work of the first rank of a stage of a pipeline, whose parts are the largest of its stage; without a pipeline of rank 0."""

    footprint: Footprint
    flops: float  # of matrix products, convolutions and attention, forward and backward; a multiply-add counts as two
    touched_bytes: float  # which all other operations of forward and backward read and write
    updated_bytes: int  # of the weights that the rank's optimizer updates
    passes: int  # micro-batches
    moved: tuple[Moved, ...]  # in the order of the step

    @property
    def sent_bytes(self) -> int:
        return sum(each.sent_bytes for each in self.moved)
