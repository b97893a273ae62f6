"""The layers of a model: parameters and operations, the parts on each rank, and what ranks send."""

from __future__ import annotations

from typing import NamedTuple

from hvdtrain.core.arrays import Way


class LayerSummary(NamedTuple):
    """A layer of a model, for people."""

    name: str
    kind: str
    outputs: tuple[int, ...] | None  # shape for one sample; None if it is not known
    parameters: int  # its own parameters
    trained: int  # trained parameters among them
    flops: (
        int | None
    )  # operations of a forward pass of one sample, a multiply-add is two; None if they are not counted  # noqa: E501


class LayerRange(NamedTuple):
    """A rank's part of a layer: from `start` to `stop`, shares of the cut axis."""

    start: float
    stop: float


class LayoutRow(NamedTuple):
    """A layer with weights, or several similar layers."""

    name: str  # "blocks.0-3.fc1"
    shape: tuple[int, ...]  # shape of its full weight
    bytes: int  # bytes of all its weights, in all similar layers
    # of these, bytes that are replicated on each rank with a part: the biases of rows
    whole_bytes: int
    way: Way
    groups: int  # groups of features, each partitioned: 3 for queries, keys and values
    held: list[LayerRange | None]  # the range on each rank; None: it has no part
    sent: str  # data sent between its ranks in a step
    stage: int


class ParallelLayout(NamedTuple):
    title: str
    ranks: list[str]  # place of each rank in the mesh
    rows: list[LayoutRow]
    # group number of each rank; the ranks of a group compute a layer together
    together: list[int]
    # bytes of weights that each rank updates, and whose optimizer state it has
    updates: list[float]
    between_stages: str  # data that a stage sends to the next; empty without stages
    gradients: str  # communication between ranks with the same weights
    notes: list[str]

    def weight_bytes(self, rank: int) -> int:
        held = ((row, part) for row in self.rows if (part := row.held[rank]) is not None)
        return round(
            sum(
                row.whole_bytes + (row.bytes - row.whole_bytes) * (part.stop - part.start)
                for row, part in held
            )
        )
