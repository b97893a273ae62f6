"""Which samples a rank reads, as a pure function of the number of samples consumed.

The job reads one endless stream of samples. Position p is in epoch p // dataset and holds sample
order(seed, epoch, dataset)[p % dataset]. With weights it holds the sample drawn by (seed, p). A
step reads the next `batch` positions, divided among the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple, Protocol

import numpy as np

from hvdtrain.core.arrays import digest
from hvdtrain.core.progress import fold

# up to this many samples the order is one array of 128 MiB; for larger sets it is computed position
# by position
LARGEST_SORTED = 2**24

_EVALUATION = 2**63  # used instead of an epoch, so that no training epoch has this order

Sampling = Literal["global", "partition"]


class Positions(NamedTuple):
    """Positions of the stream: the sample at each position, and its epoch. Both arrays have the
    same length."""

    samples: np.ndarray  # int64 (n,), each in 0 ... dataset - 1
    # int64 (n,), non-decreasing; for draws with replacement the position, so that each draw has
    # separate random numbers
    epochs: np.ndarray

    def part(self, low: int, high: int) -> Positions:
        return Positions(self.samples[low:high], self.epochs[low:high])

    def split(self, parts: int) -> list[Positions]:
        """Splits the positions into contiguous parts whose lengths differ by at most 1, longer
        parts first, as numpy.array_split does."""
        pairs = zip(
            np.array_split(self.samples, parts), np.array_split(self.epochs, parts), strict=True
        )
        return [Positions(samples, epochs) for samples, epochs in pairs]


class _EpochRange(NamedTuple):
    """The positions [first, last) of one epoch, counted from its beginning."""

    epoch: int
    first: int
    last: int


class BlockShuffle(NamedTuple):
    """A shuffle for data whose neighbouring samples are read together. Blocks have a random order,
    and samples are shuffled within a window of blocks."""

    block: int  # neighbouring samples of the data set; the last block may have fewer
    window: int  # blocks that are neighbours in the order of an epoch

    def positions(self, start: int, count: int, dataset: int, seed: int) -> Positions:
        """Returns positions of the stream, sorted by block within each window and epoch."""
        return _by_block(start, count, dataset, seed, self)


class Order(Protocol):
    """An order of the stream that replaces data.shuffle."""

    def positions(self, start: int, count: int, dataset: int, seed: int) -> Positions:
        """Returns positions of the stream; they depend only on the arguments."""

    @property
    def facts(self) -> dict[str, str]:
        """What decides the order besides the seed, by the key of the data: compared between ranks,
        and at a resume."""

    def words(self, samples: int) -> str:
        """Returns what the header says about the first `samples` of the stream; may be empty."""


@dataclass(frozen=True, eq=False)
class WeightedDraws:
    """Draws with replacement: each position contains sample i with probability weights[i] /
    sum(weights), independently of the others.

    An epoch has as many draws as there are samples.
    """

    weights: np.ndarray  # (dataset,), finite, none negative, at least one above 0

    @cached_property
    def _sums(self) -> np.ndarray:
        """Returns the cumulative sums of weights, float64 (dataset,), scaled so that the largest
        weight is 1."""
        return np.cumsum(self.weights / self.weights.max(), dtype=np.float64)

    @cached_property
    def _last(self) -> int:
        return int(np.flatnonzero(self.weights)[-1])

    @property
    def facts(self) -> dict[str, str]:
        return {"sample_weights": digest({"weights": self.weights})}

    def words(self, samples: int) -> str:
        return ""

    def positions(self, start: int, count: int, dataset: int, seed: int) -> Positions:
        assert len(self.weights) == dataset, (len(self.weights), dataset)
        positions = np.arange(start, start + count)
        shares = (
            fold(seed, _DRAWS, positions.astype(np.uint64)) >> np.uint64(11)
        ) * 2.0**-53  # in [0, 1)
        samples = np.searchsorted(self._sums, shares * self._sums[-1], "right")
        # a product may round up to the sum
        return Positions(np.minimum(samples, self._last).astype(np.int64, copy=False), positions)


class BlocksOfRanks(NamedTuple):
    """A full shuffle in which each rank reads different blocks of neighbouring samples, as far as
    equal shares allow.

    Each epoch has a random order of blocks, and the samples of a step are sorted by it.
    """

    block: int  # neighbouring samples of the data set

    def positions(self, start: int, count: int, dataset: int, seed: int) -> Positions:
        """Returns positions of the stream, sorted by block within each epoch."""
        samples, epochs = positions_of_rank(start, count, 0, 1, dataset, seed)
        places = fold(
            fold(seed, _OWNERS), epochs.astype(np.uint64), (samples // self.block).astype(np.uint64)
        )
        order = np.lexsort((places, epochs))
        return Positions(samples[order], epochs[order])


Shuffle = BlockShuffle | BlocksOfRanks | Order
_OWNERS = 0x6F776E6572  # a stream of counters
_DRAWS = 0x647261777321  # a stream of counters, distinct from the streams of other random numbers


def positions_of_rank(
    start: int,
    count: int,
    rank: int,
    size: int,
    dataset: int,
    seed: int,
    sampling: Sampling = "global",
    shuffle: Shuffle | None = None,
) -> Positions:
    """Returns this rank's share of the positions [start, start + count) of the stream, as new
    arrays.

    Invariants, for either sampling:
    - together the ranks read each of the positions once, for any `size`; - each sample is read once
    in an epoch of `dataset` positions, except with replacement; - the result depends only on the
    arguments, so a job can start at any position without reading earlier ones.

    "global": rank r reads the r-th contiguous share of the positions; shares differ by at most 1.
    "partition": rank r reads every position whose index in its epoch is r modulo size. So in an
    epoch a rank reads the same 1 / size of the data set for any batch size. Shares differ by at
    most 1 for each epoch that the positions touch. shuffle: "global" only; the positions of a
    window of BlockShuffle, or of a step of BlocksOfRanks, are divided by block, so that few blocks
    are read by two ranks.
    """
    assert start >= 0 and count >= 0 and 0 <= rank < size and dataset > 0, (
        start,
        count,
        rank,
        size,
        dataset,
    )
    assert sampling in ("global", "partition"), sampling
    if shuffle is not None:
        assert sampling == "global", sampling
        low, high = share_bounds(count, rank, size)
        return shuffle.positions(start, count, dataset, seed).part(low, high)
    stride = 1
    if sampling == "partition":
        stride = size
        ranges = [
            part._replace(first=part.first + (rank - part.first) % size)
            for part in _epochs(start, start + count, dataset)
        ]
    else:
        low, high = share_bounds(count, rank, size)
        ranges = list(_epochs(start + low, start + high, dataset))
    samples = [np.empty(0, np.int64)]
    epochs = [np.empty(0, np.int64)]
    for epoch, first, last in ranges:
        samples.append(_order(seed, epoch, dataset, range(first, last, stride)))
        epochs.append(np.full(len(samples[-1]), epoch, np.int64))
    return Positions(np.concatenate(samples), np.concatenate(epochs))


def parts_of_rank(
    start: int,
    count: int,
    parts: int,
    rank: int,
    size: int,
    dataset: int,
    seed: int,
    sampling: Sampling = "global",
    shuffle: Shuffle | None = None,
) -> list[Positions]:
    """Divides the positions [start, start + count) into contiguous `parts`, longer ones first, and
    returns this rank's share of each.

    A part has the same positions for any `size`. "global": shares of a part are contiguous and
    differ by at most 1, and so do the ranks' shares of all positions. A single part is divided as
    by positions_of_rank().
    """
    if parts == 1:
        return [positions_of_rank(start, count, rank, size, dataset, seed, sampling, shuffle)]
    positions = []
    for part in range(parts):
        first = _dealt_below(count, part, parts)
        last = _dealt_below(count, part + 1, parts)
        if sampling == "partition":
            positions.append(
                positions_of_rank(start + first, last - first, rank, size, dataset, seed, sampling)
            )
            continue
        low, high = _share_of_part(first, last, rank, size)
        if shuffle is not None:
            positions.append(
                shuffle.positions(start + first, last - first, dataset, seed).part(
                    low - first, high - first
                )
            )
            continue
        positions.append(positions_of_rank(start + low, high - low, 0, 1, dataset, seed))
    return positions


def parts_by_length(
    step: Positions, lengths: np.ndarray, parts: int, rank: int, size: int
) -> list[Positions]:
    """Divides a step's positions into `parts` and returns this rank's share of each. Samples of
    similar lengths are in the same part and on the same rank.

    step: all positions of the step; lengths: int64 (dataset,). Parts and shares have the same
    numbers of positions as in parts_of_rank().
    """
    order = np.argsort(lengths[step.samples], kind="stable")
    step = Positions(step.samples[order], step.epochs[order])
    positions = []
    for part in range(parts):
        first = _dealt_below(len(order), part, parts)
        last = _dealt_below(len(order), part + 1, parts)
        positions.append(step.part(*_share_of_part(first, last, rank, size)))
    return positions


def _share_of_part(first: int, last: int, rank: int, size: int) -> tuple[int, int]:
    """Returns [low, high), the rank's contiguous share of the part [first, last) of a step."""
    low, high = (
        first + _dealt_below(last, r, size) - _dealt_below(first, r, size) for r in (rank, rank + 1)
    )
    return low, high


def _dealt_below(count: int, rank: int, size: int) -> int:
    """Returns how many of `count` positions, dealt to ranks in turn, go to ranks below `rank`."""
    return count // size * rank + min(count % size, rank)


def indices(
    start: int,
    count: int,
    rank: int,
    size: int,
    dataset: int,
    seed: int,
    sampling: Sampling = "global",
) -> np.ndarray:
    """Returns the samples of positions_of_rank(), int64 (n,)."""
    return positions_of_rank(start, count, rank, size, dataset, seed, sampling).samples


def share_bounds(count: int, rank: int, size: int) -> tuple[int, int]:
    """Returns [low, high), the rank's contiguous share of range(count). Shares differ by at most 1,
    and each index is in exactly one share."""
    return count * rank // size, count * (rank + 1) // size


def evaluation_batches(samples: int, batch: int, rank: int, size: int) -> list[np.ndarray]:
    """Returns this rank's share of range(samples) in batches of at most `batch`, int64 (n,) each.
    Each sample is in the share of exactly one rank.

    Every rank has the same number of batches; the last one may be empty.
    """
    start, end = share_bounds(samples, rank, size)
    firsts = range(start, start + -(-samples // size), batch)
    return [np.arange(first, min(first + batch, end)) for first in firsts]


def evaluated_samples(samples: int, count: int, seed: int) -> np.ndarray:
    """Returns the `count` samples that the keyed permutation of `seed` puts first, ascending, int64
    (count,)."""
    return np.sort(permuted(np.arange(count), samples, seed, _EVALUATION))


def largest_share(
    start: int, count: int, size: int, dataset: int, sampling: Sampling = "global"
) -> int:
    """Returns an upper bound of len(indices(start, count, ...)) over all ranks; the same on every
    rank."""
    if sampling == "global":
        return -(-count // size)
    return sum(
        -(-(last - first) // size) for _, first, last in _epochs(start, start + count, dataset)
    )


def shuffle_version(dataset: int) -> str | None:
    """Returns the name of the shuffle algorithm for `dataset` samples, which a checkpoint stores;
    None for permutation(), which has only one version."""
    return KEYED_VERSION if dataset > LARGEST_SORTED else None


def _order(seed: int, epoch: int, dataset: int, positions: range) -> np.ndarray:
    """Returns the samples at these positions of one epoch, int64 (len(positions),)."""
    if dataset <= LARGEST_SORTED:
        return permutation(seed, epoch, dataset)[positions.start : positions.stop : positions.step]
    return permuted(
        np.arange(positions.start, positions.stop, positions.step), dataset, seed, epoch
    )


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, dataset: int) -> np.ndarray:
    """Returns the order of one epoch, int64 (dataset,), read-only. Takes 7 ms for 60,000 samples,
    then it is cached. It is equal for every version of NumPy."""
    order = np.argsort(
        fold(seed, epoch, np.arange(dataset, dtype=np.uint64)), kind="stable"
    ).astype(np.int64, copy=False)
    order.setflags(write=False)
    return order


_BLOCKS = 0x626C6F63  # a stream of counters, so that no data set has the same order as the blocks
BLOCKS_VERSION = "blocks-1"  # version of the order of shuffled_by_blocks(), stored in checkpoints


def _by_block(start: int, count: int, dataset: int, seed: int, shuffle: BlockShuffle) -> Positions:
    """Returns positions of the stream, sorted by block within each window and epoch."""
    samples = [np.empty(0, np.int64)]
    epochs = [np.empty(0, np.int64)]
    for epoch, first, last in _epochs(start, start + count, dataset):
        for piece in _pieces(seed, epoch, dataset, shuffle, first, last):
            samples.append(piece[np.argsort(piece // shuffle.block, kind="stable")])
            epochs.append(np.full(len(piece), epoch, np.int64))
    return Positions(np.concatenate(samples), np.concatenate(epochs))


def shuffled_by_blocks(
    seed: int, epoch: int, dataset: int, shuffle: BlockShuffle, first: int, last: int
) -> np.ndarray:
    """Returns the samples at positions [first, last) of one epoch, int64. An epoch has each sample
    once; the result depends only on the arguments.

    The blocks of an epoch are shuffled, then all samples within each `window` of blocks. So two
    consecutive samples are from the same block with a probability of about 1 / window.
    """
    return np.concatenate(
        [np.empty(0, np.int64), *_pieces(seed, epoch, dataset, shuffle, first, last)]
    )


def _pieces(
    seed: int, epoch: int, dataset: int, shuffle: BlockShuffle, first: int, last: int
) -> Iterator[np.ndarray]:
    """Yields the samples at positions [first, last) of one epoch, window by window."""
    _, edges = _windows(seed, epoch, dataset, shuffle)
    window = int(np.searchsorted(edges, first, "right")) - 1
    while first < last:
        end = min(last, int(edges[window + 1]))
        begin = int(edges[window])
        yield _window(seed, epoch, dataset, shuffle, window)[first - begin : end - begin]
        first = end
        window = window + 1


@lru_cache(maxsize=4)
def _windows(
    seed: int, epoch: int, dataset: int, shuffle: BlockShuffle
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the blocks of one epoch in order, and the positions where windows begin, followed by
    the end of the epoch."""
    blocks = -(-dataset // shuffle.block)
    order = permutation(fold(seed, _BLOCKS), epoch, blocks)
    sizes = np.where(order == blocks - 1, dataset - (blocks - 1) * shuffle.block, shuffle.block)
    ends = np.cumsum(sizes)
    return order, np.concatenate(
        [[0], ends[shuffle.window - 1 : -1 : shuffle.window], [dataset]]
    ).astype(np.int64)


@lru_cache(maxsize=8)
def _window(seed: int, epoch: int, dataset: int, shuffle: BlockShuffle, window: int) -> np.ndarray:
    """Returns the samples of one window in order, read-only."""
    order, _ = _windows(seed, epoch, dataset, shuffle)
    blocks = order[window * shuffle.window : (window + 1) * shuffle.window]
    samples = (blocks[:, None] * shuffle.block + np.arange(shuffle.block)).ravel()
    samples = samples[samples < dataset]
    shuffled = samples[np.argsort(fold(seed, epoch, samples.astype(np.uint64)), kind="stable")]
    shuffled.setflags(write=False)
    return shuffled


def _epochs(start: int, stop: int, dataset: int) -> Iterator[_EpochRange]:
    """Splits the positions [start, stop) by epoch."""
    while start < stop:
        epoch, first = divmod(start, dataset)
        last = min(dataset, first + stop - start)
        yield _EpochRange(epoch, first, last)
        start += last - first


# version of the order of permuted(), stored in checkpoints: another number of rounds would change
# the order
KEYED_VERSION = "feistel-1"
_ROUNDS = 16
_STREAM = 0x66656973  # a stream of counters, distinct from the streams of other random numbers


def permuted(positions: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the values of a permutation of 0 ... n - 1, drawn by (seed, epoch), at `positions`:
    int64 (m,) for int64 (m,).

    A Feistel network on pairs (left, right) of Z_b x Z_a with a b >= n, whose rounds add a hash of
    one half to the other (Black, Rogaway 2002, "Ciphers with arbitrary finite domains", method 3).
    Results in n ... a b - 1 are permuted again until they are below n (cycle walking, method 2).
    With a = ceil(sqrt(n)) that is at most one position in b. The result is equal for every version
    of NumPy.
    """
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    keys = fold(fold(seed, epoch, _STREAM), np.arange(_ROUNDS, dtype=np.uint64))
    x = _network(positions.astype(np.uint64), a, b, keys)
    outside = np.flatnonzero(x >= n)
    while len(outside):
        x[outside] = _network(x[outside], a, b, keys)
        outside = outside[x[outside] >= n]
    return x.astype(np.int64)


def _network(x: np.ndarray, a: int, b: int, keys: np.ndarray) -> np.ndarray:
    """Applies the network once to x, uint64 (m,): a permutation of 0 ... a b - 1."""
    # in 0 ... b - 1 and in 0 ... a - 1
    left = x // np.uint64(a)
    right = _remainder(x, a)
    for even, odd in keys.reshape(-1, 2):
        left = _remainder(left + _hash(right ^ even), b)
        right = _remainder(right + _hash(left ^ odd), a)
    return left * np.uint64(a) + right


def _remainder(x: np.ndarray, divisor: int) -> np.ndarray:
    """Returns x % divisor in a third of the time, because NumPy vectorizes division but not the
    remainder."""
    return x - x // np.uint64(divisor) * np.uint64(divisor)


def _hash(x: np.ndarray) -> np.ndarray:
    """Hashes each of x, uint64 (m,), to 63 bits in place, with splitmix64's mixing function as in
    core/progress.py."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    x >>= np.uint64(1)  # so that the sum with a half does not overflow
    return x
