"""The layers of a model: parameters and operations, the parts on each rank, and what ranks send."""

from __future__ import annotations

from typing import NamedTuple

from hvdtrain.core.arrays import Way


class LayerSummary(NamedTuple):
    """A layer of a model, for people."""

    name: str
    kind: str
    outputs: tuple[int, ...] | None  # shape for one sample; None if it is not known
    parameters: int  # numbers of its own
    trained: int  # of these
    flops: (
        int | None
    )  # operations of a forward pass of one sample, a multiply-add is two; None if they are not counted  # noqa: E501


class LayerRange(NamedTuple):
    """A rank's part of a layer: from `start` to `stop`, shares of the cut axis."""

    start: float
    stop: float


class LayoutRow(NamedTuple):
    """A layer with weights, or several alike."""

    name: str  # "blocks.0-3.fc1"
    shape: tuple[int, ...]  # of its weight, whole
    bytes: int  # of all its weights, of all layers that are alike
    whole_bytes: int  # of these, of what each rank that has a part has whole: the biases of rows
    way: Way
    groups: int  # of features, each cut: 3 for queries, keys and values
    held: list[LayerRange | None]  # of each rank; None: it has none of it
    sent: str  # between the ranks that have it, in a step
    stage: int


class ParallelLayout(NamedTuple):
    title: str
    ranks: list[str]  # of each rank its place in the mesh
    rows: list[LayoutRow]
    # of each rank a number of its group, whose ranks compute one layer together
    together: list[int]
    # of each rank the bytes of weights that it updates, whose optimizer state it has
    updates: list[float]
    between_stages: str  # what a stage sends the next one; empty without stages
    gradients: str  # what goes over the ranks that have the same weights
    notes: list[str]

    def weight_bytes(self, rank: int) -> int:
        held = ((row, part) for row in self.rows if (part := row.held[rank]) is not None)
        return round(
            sum(
                row.whole_bytes + (row.bytes - row.whole_bytes) * (part.stop - part.start)
                for row, part in held
            )
        )
