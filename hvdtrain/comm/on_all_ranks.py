"""Values that are equal on every rank: sums over all ranks, and the result or UserError of work
that only rank 0 does."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

import numpy as np

from hvdtrain.comm.communicator import Communicator, PointToPoint
from hvdtrain.core.metrics import Concatenated, Part, Sums, host_value
from hvdtrain.errors import UserError

T = TypeVar("T")
MEET_S = 0.5  # between two collectives while rank 0 works: less than the shortest comm.timeout_s


def allreduce_sums(
    communicator: Communicator,
    sums: Sums,
    name: str,
    lengths: Mapping[str, int] | None = None,
    gathered: Mapping[str, Callable[[Concatenated], float]] | None = None,
) -> Sums:
    """Sums each value over all ranks, which have the same keys. Returns floats, and float64 arrays
    (n,) for vectors. The host waits for the device.

    lengths: lengths of vectors by name, 0 for a number, so that a rank without samples, which has a
    single 0, sends as many numbers as the others. gathered: names of Concatenated values, which a
    rank without samples lacks, with the functions that rank 0 applies to the values of all ranks;
    the results replace them.
    """
    values: Sums = {}
    for key, of in (gathered or {}).items():
        everywhere = gather_parts(communicator, sums.get(key, Concatenated()), f"{name}.{key}")
        values[key] = on_rank_0(communicator, functools.partial(_value_of, of, everywhere))
    sums = {key: value for key, value in sums.items() if key not in values}
    return _added_up(communicator, sums, name, lengths) | values


def _value_of(of: Callable[[Concatenated], float], parts: Concatenated | None) -> float:
    assert parts is not None, "of rank 0 alone"
    return float(of(parts))


def gather_parts(communicator: Communicator, own: Concatenated, name: str) -> Concatenated | None:
    """Gathers the parts of all ranks, in rank order, on rank 0; None on other ranks, to save
    memory. A collective."""
    forms = [
        [[(str(array.dtype), list(array.shape)) for array in group] for group in part]
        for part in own
    ]
    arrays = [
        np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for part in own
        for group in part
        for array in group
    ]
    forms_of_ranks = communicator.allgather_object(forms)
    content = np.concatenate(arrays) if arrays else np.zeros(0, np.uint8)
    sizes = [
        sum(_nbytes(*form) for part in forms for group in part for form in group)
        for forms in forms_of_ranks
    ]
    found: list[Part] = []  # on rank 0
    for forms, theirs in zip(
        forms_of_ranks, _on_rank_0_in_turn(communicator, content, sizes, name), strict=False
    ):
        found += _parts_in(theirs, forms)
    return None if communicator.rank else Concatenated(found)


Form = tuple[str, list[int]]  # dtype and shape of an array


def _nbytes(dtype: str, shape: list[int]) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def _parts_in(content: np.ndarray, forms: Sequence[Sequence[Sequence[Form]]]) -> Iterator[Part]:
    """Splits uint8 (n,) into the arrays of a rank's parts."""
    start = 0

    def array(dtype: str, shape: list[int]) -> np.ndarray:
        nonlocal start
        begin = start
        start += _nbytes(dtype, shape)
        return content[begin:start].copy().view(dtype).reshape(shape)

    for part in forms:
        yield tuple(tuple(array(*form) for form in group) for group in part)


TAG_OF_PARTS = 321


def _on_rank_0_in_turn(
    communicator: Communicator, own: np.ndarray, sizes: Sequence[int], name: str
) -> Iterator[np.ndarray]:
    """Yields the bytes of each rank, of these sizes, in turn on rank 0; nothing on other ranks. A
    collective if it is exhausted."""
    if "p2p" not in communicator.features:
        content = communicator.allgather(own, name)
        yield from [] if communicator.rank else np.split(content, np.cumsum(sizes)[:-1])
        return
    peers = cast(PointToPoint, communicator)
    if communicator.rank:
        peers.start_send(own, 0, name, TAG_OF_PARTS).wait()
        return
    yield own
    for rank, size in enumerate(sizes[1:], start=1):
        yield peers.start_recv(np.empty(size, np.uint8), rank, name, TAG_OF_PARTS).wait()


def _added_up(
    communicator: Communicator, sums: Sums, name: str, lengths: Mapping[str, int] | None
) -> Sums:
    keys = sorted(sums)
    arrays = []
    for key in keys:
        array = np.atleast_1d(np.asarray(host_value(sums[key]), np.float64))
        length = (lengths or {}).get(key, 0)
        arrays.append(np.broadcast_to(array, length) if length else array)
    total = communicator.allreduce(np.concatenate(arrays), name)
    totals = np.split(total, np.cumsum([len(array) for array in arrays])[:-1])
    is_vector = {
        key: bool((lengths or {}).get(key, 0)) or isinstance(sums[key], np.ndarray) for key in keys
    }
    return {
        key: one if is_vector[key] else float(one[0]) for key, one in zip(keys, totals, strict=True)
    }


def same_on_all_ranks(communicator: Communicator, digests: Sequence[int | None]) -> list[bool]:
    """Returns for each 64-bit number whether it is the same on all ranks that do not have None. A
    collective."""
    own = np.array([each or 0 for each in digests], np.uint64).view(np.int64)
    # the largest ~x belongs to the smallest x
    rows = np.stack([own, ~own])
    rows[:, [each is None for each in digests]] = np.iinfo(np.int64).min
    highest = communicator.allreduce(rows, "same", "max")
    return np.equal(highest[0], ~highest[1]).tolist()


def on_rank_0(communicator: Communicator, work: Callable[[], T]) -> T:
    """Returns on every rank what work() returns on rank 0, a small object. Every rank calls it.

    Raises on every rank the UserError that work() raises.
    """
    result, failure = communicator.broadcast_object(_tried(communicator, work))
    if failure:
        raise failure
    return result


def on_rank_0_only(communicator: Communicator, work: Callable[[], T]) -> T | None:
    """Returns what work() returns on rank 0, and None on the other ranks. Every rank calls it.

    Raises on every rank the UserError that work() raises.
    """
    result, failure = _tried(communicator, work)
    failure = communicator.broadcast_object(failure)
    if failure:
        raise failure
    return result


def _tried(communicator: Communicator, work: Callable[[], T]) -> tuple[T | None, UserError | None]:
    """Returns the result of the work, or its UserError, on rank 0."""
    if communicator.rank:
        return None, None
    try:
        return work(), None
    except UserError as error:
        return None, error


def long_on_rank_0(
    communicator: Communicator,
    work: Callable[[Callable[[], None]], T],
    go_on: Callable[[], None] = lambda: None,
) -> T:
    """Like on_rank_0(), for work that may take longer than the timeout of a collective.

    work() calls its argument, from the same thread, whenever it makes progress. Then all ranks
    synchronize, at most every MEET_S, and go_on() is called on each of them.
    """
    met_s = time.monotonic()

    def meet(works_on: bool) -> bool:
        return bool(communicator.allreduce(np.array([works_on], np.int64), "rank_0.works_on")[0])

    def move() -> None:
        nonlocal met_s
        if time.monotonic() - met_s >= MEET_S:
            met_s = time.monotonic()
            meet(works_on=True)
            go_on()

    def all_of_it() -> T:
        try:
            result = work(move)
        except UserError:
            meet(works_on=False)
            raise
        meet(works_on=False)
        return result

    while communicator.rank and meet(works_on=False):
        go_on()
    return on_rank_0(communicator, all_of_it)
