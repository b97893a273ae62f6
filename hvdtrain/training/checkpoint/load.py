"""Loads a checkpoint into every rank. If the state is sharded and ranks wrote it together, each
reads its elements from the disk; otherwise rank 0 reads all of it and broadcasts it.

The rank that reads a damaged chunk detects it; all ranks then load the previous checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from hvdtrain.comm.communicator import Communicator, part_of
from hvdtrain.comm.on_all_ranks import long_on_rank_0
from hvdtrain.core.arrays import ArrayInFile, Arrays, ArrayStream
from hvdtrain.errors import UserError
from hvdtrain.events.terminal import warn
from hvdtrain.frameworks.learner import HasState
from hvdtrain.training.checkpoint.files import Damaged
from hvdtrain.training.checkpoint.ranges import CheckpointInParts, open_arrays, sees
from hvdtrain.training.checkpoint.resume import Reading
from hvdtrain.training.checkpoint.sums import CHUNK_BYTES
from hvdtrain.training.replicas.broadcast import broadcast_state, common_digest

T = TypeVar("T")
# the smallest part of an array that each rank sends to all others is this part of a chunk
_PARTS_OF_CHUNK = 16
# on rank 0: a small object for all ranks, and the arrays that it is about; None: nothing to load
Find = Callable[[Reading], tuple[T, Arrays | CheckpointInParts | None]]


class LoadedState(NamedTuple, Generic[T]):
    """The checkpoint that rank 0 found, and the loaded state; the same on all ranks."""

    found: T
    digest: str | None  # digest of the replicated arrays; None: nothing was loaded
    extra: Arrays  # arrays of the checkpoint that are not the learner's


def load_found(
    communicator: Communicator,
    learner: HasState,
    find: Find[T],
    limit_bytes: int,
    go_on: Callable[[], None] = lambda: None,
    is_extra: Callable[[str], bool] = lambda name: False,
) -> LoadedState[T]:
    """Loads the checkpoint that rank 0 finds. Every rank calls it.

    find: called again for another checkpoint if this one is damaged; it raises UserError if none is
    good, which is raised on all ranks. go_on: called on every rank as reading progresses. is_extra:
    whether an array does not belong to the learner, by its name.
    """
    damaged: dict[str, str] = {}  # why, by the name of the checkpoint's folder
    in_parts = learner.is_sharded and communicator.size > 1
    while True:
        restored: Arrays = {}

        def work(
            moved: Callable[[], None], in_parts: bool = in_parts
        ) -> tuple[T, CheckpointInParts | None, bool]:
            nonlocal restored
            reading = Reading(limit_bytes, learner.is_sharded, moved, in_parts, damaged)
            found, arrays = find(reading)
            if isinstance(arrays, CheckpointInParts):
                # each rank reads the shapes itself
                return found, arrays._replace(shapes={}), True
            restored = arrays or {}
            return found, None, arrays is not None

        found, parts, has_state = long_on_rank_0(communicator, work, go_on)
        if parts is None:
            if not has_state:
                return LoadedState(found, None, {})
            extra = {name: array for name, array in restored.items() if is_extra(name)}
            state = {name: array for name, array in restored.items() if name not in extra}
            digest = broadcast_state(communicator, learner, state, on_array=go_on)
            return LoadedState(found, digest, _broadcast(communicator, extra))
        if not all_ranks_see(communicator, parts):
            in_parts = False
            continue
        own = OwnElements(communicator, learner, go_on, is_extra)
        failures = own.load(partial(open_arrays, parts.folder, limit_bytes))
        if not failures:
            return LoadedState(found, common_digest(communicator, learner), own.extra)
        damaged[parts.folder.name] = failures[0].what


def all_ranks_see(communicator: Communicator, parts: CheckpointInParts) -> bool:
    """Whether all ranks see rank 0's checkpoint; warns if not. A collective."""
    seen = communicator.allgather(np.array([sees(parts)], np.uint8), "checkpoint.seen")
    blind: list[int] = np.flatnonzero(seen == 0).tolist()
    if blind and communicator.rank == 0:
        warn(
            f"rank {blind[0]} does not see {parts.folder} as rank 0 does: rank 0 reads the "
            "whole checkpoint and sends it; give run= a folder that all hosts share"
        )
    return not blind


class _FailedElsewhere(Exception):
    """A rank, maybe another one, could not read its elements."""


class OwnElements:
    """Reads on each rank the elements that its learner has.

    An array smaller than a chunk is read by one rank, another one for each chunk, and broadcast. Of
    a larger one that every rank has whole each rank reads an equal part, which it sends to the
    others, unless these parts are small. All ranks meet after each array, so that a rank that
    cannot read stops them all.
    """

    def __init__(
        self,
        communicator: Communicator,
        learner: HasState,
        go_on: Callable[[], None],
        is_extra: Callable[[str], bool] = lambda name: False,
        failure: type[UserError] = Damaged,
    ) -> None:
        """failure: what opening the arrays or reading one of them raises."""
        self._communicator = communicator
        self._learner = learner
        self._go_on = go_on
        self._is_extra = is_extra
        self._kind = failure
        self._failure: UserError | None = None
        self.extra: Arrays = {}

    def load(
        self,
        open_file: Callable[[], AbstractContextManager[dict[str, ArrayInFile]]],
        *,
        is_partial: bool = False,
    ) -> list[UserError]:
        """Returns why ranks could not read the arrays, which can be read inside open_file(); empty
        once they are loaded. A collective.

        is_partial: as of ArrayStream.
        """
        with contextlib.ExitStack() as stack:
            arrays: dict[str, ArrayInFile] = {}
            with self._trying():
                arrays = stack.enter_context(open_file())
            with contextlib.suppress(_FailedElsewhere):
                self._meet()
                self._load(arrays, is_partial)
                return []
        failures = self._communicator.allgather_object(self._failure)
        return [failure for failure in failures if failure]

    def _load(self, arrays: dict[str, ArrayInFile], is_partial: bool) -> None:
        own = {name: array for name, array in arrays.items() if not self._is_extra(name)}
        shapes = {name: array.shape for name, array in own.items()}
        with self._trying():
            self._learner.load(ArrayStream(shapes, self._stream(own), is_partial))
        if self._failure:
            self._meet()
        for (name, array), source in zip(arrays.items(), self._sources(arrays), strict=True):
            if name not in own:
                self.extra[name] = self._from_one_rank(name, array, source)

    def _sources(self, arrays: dict[str, ArrayInFile]) -> list[int]:
        """Returns the rank that reads each array that is broadcast; each chunk has one reader."""
        begins = itertools.accumulate((array.nbytes for array in arrays.values()), initial=0)
        chunks = [begin // CHUNK_BYTES for begin in begins][:-1]
        return [chunk % self._communicator.size for chunk in chunks]

    @contextlib.contextmanager
    def _trying(self) -> Iterator[None]:
        """Inside, this rank may fail: the next meeting tells the others."""
        try:
            yield
        except self._kind as error:
            self._failure = error

    def _meet(self) -> None:
        """A collective. Raises _FailedElsewhere on all ranks if one of them has failed."""
        failed = np.array([bool(self._failure)], np.int64)
        if self._communicator.allreduce(failed, "checkpoint.failed")[0]:
            raise _FailedElsewhere
        self._go_on()

    def _stream(self, arrays: dict[str, ArrayInFile]) -> Iterator[tuple[str, Any]]:
        replicated = {piece.name for piece in self._learner.pieces() if piece.is_whole}
        # a message of each rank costs more than one of a single rank
        worth_parts = self._communicator.size * CHUNK_BYTES // _PARTS_OF_CHUNK
        for (name, array), source in zip(arrays.items(), self._sources(arrays), strict=True):
            if array.nbytes < CHUNK_BYTES or (name in replicated and array.nbytes < worth_parts):
                yield name, self._from_one_rank(name, array, source)
            elif name in replicated:
                yield name, self._from_all_ranks(name, array)
            else:
                yield name, array
                self._meet()

    def _from_one_rank(self, name: str, array: ArrayInFile, source: int) -> np.ndarray:
        content = np.zeros(array.nbytes, np.uint8)
        if self._communicator.rank == source:
            with self._trying():
                content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._meet()
        if array.nbytes:
            content = self._communicator.broadcast(content, f"checkpoint.{name}", source)
        return content.view(array.dtype).reshape(array.shape)

    def _from_all_ranks(self, name: str, array: ArrayInFile) -> np.ndarray:
        count = math.prod(array.shape)
        own = part_of(count, self._communicator.rank, self._communicator.size)
        whole = np.empty(count, array.dtype)
        with self._trying():
            whole[own] = array.read([(own.start, own.stop)])
        self._meet()
        content = whole.view(np.uint8).reshape(count, array.dtype.itemsize)
        found: np.ndarray = self._communicator.start_spread(content, f"checkpoint.{name}").wait()
        return found.reshape(-1).view(array.dtype).reshape(array.shape)


def _broadcast(communicator: Communicator, arrays: Arrays) -> Arrays:
    """Broadcasts rank 0's arrays, by name. A collective."""
    schema = communicator.broadcast_object(
        [(name, list(array.shape), array.dtype.str) for name, array in arrays.items()]
    )
    arrays_of_root: Arrays = {}
    for name, shape, dtype in schema:
        own = (
            np.require(arrays[name], requirements=["C", "W"])
            if communicator.rank == 0
            else np.zeros(shape, dtype)
        )
        arrays_of_root[name] = communicator.broadcast(own.reshape(-1), f"extra.{name}").reshape(
            shape
        )
    return arrays_of_root
