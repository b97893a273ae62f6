"""Which rank has which part of a model's weights, and what ranks send each other, for a picture."""

from __future__ import annotations

from typing import Literal, NamedTuple

Way = Literal["whole", "columns", "rows"]  # columns: outputs are cut; rows: inputs, the tokens of an embedding, or the numbers of a shard


class Held(NamedTuple):
    """A rank's part of a layer: from `start` to `stop`, shares of the cut axis."""

    start: float
    stop: float


class Row(NamedTuple):
    """A layer with weights, or several alike."""

    name: str  # "blocks.0-3.fc1"
    shape: tuple[int, ...]  # of its weight, whole
    bytes: int  # of all its weights, of all layers that are alike
    whole_bytes: int  # of these, of what each rank that has a part has whole: the biases of rows
    way: Way
    groups: int  # of features, each of which is cut: 3 of queries, keys and values
    held: list[Held | None]  # of each rank; None: it has none of it
    sent: str  # between the ranks that have it, in a step
    stage: int


class Layout(NamedTuple):
    title: str
    ranks: list[str]  # of each rank its place in the mesh
    rows: list[Row]
    together: list[int]  # of each rank a number of its group, whose ranks compute one layer together
    updates: list[float]  # of each rank the bytes of weights that it updates, whose optimizer state it has
    between_stages: str  # what a stage sends the next one; empty without stages
    gradients: str  # what goes over the ranks that have the same weights
    notes: list[str]

    def weight_bytes(self, rank: int) -> int:
        held = ((row, part) for row in self.rows if (part := row.held[rank]) is not None)
        return round(sum(row.whole_bytes + (row.bytes - row.whole_bytes) * (part.stop - part.start) for row, part in held))


def size(count: float) -> str:
    """1.2 MB, 16 kB"""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} bytes"
