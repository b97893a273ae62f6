"""The position in a stream that a checkpoint keeps, and the comparison of the stream between
ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from hvdtrain.errors import UserError
from hvdtrain.training.hooks import Hook, Training


class Positioned(Protocol):
    """A stream whose position is kept."""

    @property
    def name(self) -> str: ...
    @property
    def where(self) -> str: ...
    def state(self) -> Any: ...
    def resume_from(self, state: Any) -> None: ...
    def digests_of_last_samples(self) -> dict[int, str]: ...
    def close(self) -> None: ...


class StreamPosition(Hook):
    """Keeps the position of a stream in checkpoints, and compares what the ranks have read."""

    is_listed = False

    def __init__(self, source: Positioned) -> None:
        self._source = source

    def state_dict(self) -> Any:
        return self._source.state()

    def load_state_dict(self, state: Any) -> None:
        self._source.resume_from(state)

    def after_evaluation(self, training: Training, metrics: Mapping[str, float]) -> None:
        self._compare(training)

    def before_checkpoint(self, training: Training) -> None:
        self._compare(training)

    def on_end(self, training: Training) -> None:
        self._compare(training)
        self._source.close()

    def _compare(self, training: Training) -> None:
        """Compares digests of some samples that all ranks have read. A collective."""
        of_ranks = training.allgather(self._source.digests_of_last_samples())
        for number, digest in of_ranks[0].items():
            for rank, theirs in enumerate(of_ranks):
                if theirs.get(number, digest) != digest:
                    what = (
                        f"sample {number:,} of {self._source.name} differs between rank 0 and rank "
                        f"{rank}: each rank must get the whole stream"
                    )
                    fix = (
                        "the same samples on every rank: do not divide the stream by rank "
                        "(split_dataset_by_node, RANK), and seed its random numbers"
                    )
                    raise UserError(what, self._source.where, fix)
