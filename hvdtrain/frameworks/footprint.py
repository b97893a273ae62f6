"""Footprint: the memory of one rank by purpose, at the peak of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # of plans
    from hvdtrain.comm.counted import Moved

KINDS = (
    "weights",
    "gradients",
    "optimizer_state",
    "buffers",
    "activations",
    "communication",
    "workspace",
)


class PlannedStep(NamedTuple):
    """The properties of a job that determine the memory of a rank."""

    samples: int  # samples in a step, on the rank with the most
    passes: int  # forward passes of a step
    evaluated: int  # samples in one pass of an evaluation
    ahead: int  # steps whose samples are prefetched
    writes_checkpoints: bool

    @property
    def micro(self) -> int:
        """The largest micro-batch."""
        return -(-self.samples // self.passes)


class Footprint(NamedTuple):
    """Memory of rank 0, whose parts are the largest. The kinds add up to the total peak; each kind
    alone may peak higher."""

    weights: int = 0
    gradients: int = 0  # and the buckets in which they stay
    optimizer_state: int = 0
    buffers: int = 0  # running statistics
    activations: int = (
        # activations that the forward pass keeps for the backward pass, and temporary arrays of
        # both
        0
    )
    communication: int = 0  # data in transit between ranks
    workspace: int = 0  # the temporary arrays of clipping and of the optimizer
    evaluation: int = 0  # the most of an evaluation, with all that stays
    # weights and buffers before the first step, until each rank has only its parts
    start: int = 0
    inputs: int = 0  # samples of this step and of prefetched steps
    checkpoint: int = 0  # the copy that rank 0 writes during training
    copies: int = 0  # copies of the newest sync point, for guard.lost
    largest_array: int = (
        # largest array that a rank copies: a weight or a part of one; optimizer state has no larger
        # arrays
        0
    )

    @property
    def step(self) -> int:
        """The peak of a step, including everything that stays in memory."""
        return sum(self[: len(KINDS)])

    @property
    def tensors(self) -> int:
        """The peak of the tensors of training."""
        return max(self.step, self.evaluation, self.start)

    @property
    def total(self) -> int:
        """The peak of the rank without interpreter, libraries and data set."""
        return self.tensors + self.inputs + self.checkpoint + self.copies

    @property
    def staging(self) -> int:
        """Page-locked host memory of a GPU, through which arrays are copied one by one; torch
        rounds it up to a power of two."""
        return 1 << (self.largest_array - 1).bit_length() if self.largest_array else 0

    def named(self) -> dict[str, int]:
        """Returns the bytes by kind, and their sums."""
        return {
            **self._asdict(),
            "tensors": self.tensors,
            "total": self.total,
            "staging": self.staging,
        }


class PlannedWork(NamedTuple):
    """The work of the first rank in a pipeline stage, whose parts are the largest in the stage;
    without a pipeline, of rank 0."""

    footprint: Footprint
    # operations of matrix products, convolutions and attention, forward and backward; a
    # multiply-add counts as two
    flops: float
    touched_bytes: float  # bytes that all other operations of forward and backward read and write
    updated_bytes: int  # bytes of the weights that the rank's optimizer updates
    passes: int  # micro-batches
    moved: tuple[Moved, ...]  # in the order of the step

    @property
    def sent_bytes(self) -> int:
        return sum(each.sent_bytes for each in self.moved)
