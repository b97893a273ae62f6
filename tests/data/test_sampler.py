"""Which samples a rank reads: each once in an epoch, the same for any number of ranks, from any
position."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest

from hvdtrain.core.progress import fold
from hvdtrain.data.sampler import (
    LARGEST_SORTED,
    Sampling,
    evaluation_batches,
    indices,
    largest_share,
    permutation,
    permuted,
    positions_of_rank,
    share_bounds,
    shuffle_version,
)

SIZES = [1, 2, 3, 4, 5]
SAMPLINGS: list[Sampling] = ["global", "partition"]


def shuffled(seed: int, epoch: int, dataset: int) -> list[int]:
    """The epoch's order in plain Python: samples sorted by their own seed."""
    return sorted(range(dataset), key=lambda sample: fold(seed, epoch, sample))


def expected(
    start: int, count: int, rank: int, size: int, dataset: int, seed: int, sampling: str
) -> list[int]:
    """One position after the other, as the contract says it."""
    positions = list(range(start, start + count))
    if sampling == "global":
        positions = positions[count * rank // size : count * (rank + 1) // size]
    else:
        positions = [p for p in positions if p % dataset % size == rank]
    return [shuffled(seed, p // dataset, dataset)[p % dataset] for p in positions]


def together(start: int, count: int, size: int, dataset: int, sampling: Sampling) -> list[int]:
    return sorted(
        int(i)
        for rank in range(size)
        for i in indices(start, count, rank, size, dataset, 7, sampling)
    )


def test_values_of_a_small_case() -> None:
    # worked out apart from this project, with splitmix64 written down once more
    assert permutation(0, 0, 6).tolist() == shuffled(0, 0, 6) == [5, 1, 3, 0, 2, 4]
    assert permutation(0, 1, 6).tolist() == shuffled(0, 1, 6) == [3, 1, 0, 4, 2, 5]
    # positions 4..8 of the stream: 2, 4 of epoch 0, then 3, 1, 0 of epoch 1
    assert indices(4, 5, 0, 2, 6, 0).tolist() == [2, 4]
    assert indices(4, 5, 1, 2, 6, 0).tolist() == [3, 1, 0]
    assert indices(4, 5, 0, 2, 6, 0, "partition").tolist() == [2, 3, 0]  # places 4, then 0 and 2
    assert indices(4, 5, 1, 2, 6, 0, "partition").tolist() == [4, 1]  # places 5, then 1


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("size", SIZES)
def test_equal_to_the_definition_one_position_at_a_time(size: int, sampling: Sampling) -> None:
    for start, count, dataset in [
        (0, 8, 23),
        (20, 8, 23),
        (46, 23, 23),
        (5, 61, 23),
        (3, 2, 23),
        (0, 7, 1),
        (11, 0, 23),
    ]:
        for rank in range(size):
            got = indices(start, count, rank, size, dataset, 7, sampling)
            assert got.dtype == np.int64
            assert got.tolist() == expected(start, count, rank, size, dataset, 7, sampling), (
                start,
                count,
                rank,
            )


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("size", SIZES)
def test_every_sample_once_an_epoch(size: int, sampling: Sampling) -> None:
    dataset = 53
    batch = 10
    for epoch in range(3):
        ends = [*range(epoch * dataset, (epoch + 1) * dataset, batch), (epoch + 1) * dataset]
        read = [i for a, b in pairwise(ends) for i in together(a, b - a, size, dataset, sampling)]
        assert sorted(read) == list(range(dataset))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_all_ranks_together_read_the_same_for_any_size(sampling: Sampling) -> None:
    for start, count in [(0, 10), (50, 10), (100, 170), (7, 3)]:
        alone = together(start, count, 1, 53, "global")
        assert len(alone) == count
        for size in SIZES:
            assert together(start, count, size, 53, sampling) == alone, (start, count, size)


@pytest.mark.parametrize("size", SIZES)
def test_in_a_partition_each_rank_reads_one_part_of_the_epoch(size: int) -> None:
    dataset = 40
    batch = 8
    for epoch in range(3):
        order = shuffled(7, epoch, dataset)
        parts = []
        for rank in range(size):
            steps = [
                indices(start, batch, rank, size, dataset, 7, "partition")
                for start in range(epoch * 40, epoch * 40 + 40, batch)
            ]
            # as many steps on every rank, none starved
            assert {len(step) for step in steps} <= {
                batch // size,
                -(-batch // size),
            }
            parts.append(np.concatenate(steps).tolist())
            assert parts[rank] == order[rank::size]
        lengths = [len(part) for part in parts]
        assert max(lengths) - min(lengths) <= 1
        assert sorted(sample for part in parts for sample in part) == list(range(dataset))


def test_the_partition_differs_between_epochs() -> None:
    first, second = (
        set(indices(epoch * 60, 60, 0, 3, 60, 7, "partition").tolist()) for epoch in (0, 1)
    )
    assert len(first) == len(second) == 20
    assert first != second


def test_the_order_differs_between_epochs_and_seeds() -> None:
    orders = [permutation(seed, epoch, 60).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(60)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_positions_do_not_depend_on_earlier_calls(sampling: Sampling) -> None:
    # 40 steps over 53 samples: 6.8 epochs, more than the cache holds
    steps = [(start, 9) for start in range(0, 9 * 40, 9)]
    forward = [indices(start, count, 1, 3, 53, 7, sampling).tolist() for start, count in steps]
    permutation.cache_clear()
    backward = [
        indices(start, count, 1, 3, 53, 7, sampling).tolist() for start, count in reversed(steps)
    ]
    assert forward == backward[::-1]


def test_a_far_position_needs_no_replay() -> None:
    far = 10**12  # epoch 10^10 of 100 samples
    assert indices(far, 100, 0, 1, 100, 7).tolist() == shuffled(7, far // 100, 100)


def test_the_result_may_be_changed_and_the_permutation_may_not() -> None:
    for sampling in SAMPLINGS:
        indices(0, 10, 0, 1, 10, 7, sampling)[:] = 0
        assert sorted(indices(0, 10, 0, 1, 10, 7, sampling).tolist()) == list(range(10))
    with pytest.raises(ValueError, match="read-only"):
        permutation(7, 0, 10)[0] = 0


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_large_set_needs_no_array_of_its_size(sampling: Sampling) -> None:
    dataset = 10**9
    batch = 4096
    start = 3 * dataset - 1000  # the step crosses the end of epoch 2
    tracemalloc.start()
    of_ranks = [positions_of_rank(start, batch, rank, 3, dataset, 7, sampling) for rank in range(3)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
    alone = positions_of_rank(start, batch, 0, 1, dataset, 7)
    assert sorted(np.concatenate([found.samples for found in of_ranks])) == sorted(alone.samples)
    assert alone.epochs.tolist() == [2] * 1000 + [3] * 3096
    assert (
        alone.samples[:1000].tolist()
        == permuted(np.arange(dataset - 1000, dataset), dataset, 7, 2).tolist()
    )
    assert alone.samples[1000:].tolist() == permuted(np.arange(3096), dataset, 7, 3).tolist()


def test_the_sorted_order_is_taken_up_to_its_limit() -> None:
    assert shuffle_version(LARGEST_SORTED) is None
    assert shuffle_version(LARGEST_SORTED + 1) == "feistel-1"


def test_share_bounds() -> None:
    assert [share_bounds(10, rank, 4) for rank in range(4)] == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert [share_bounds(2, rank, 4) for rank in range(4)] == [(0, 0), (0, 1), (1, 1), (1, 2)]
    assert share_bounds(0, 0, 1) == (0, 0)


def test_an_evaluation_has_equally_many_batches_on_every_rank_and_each_sample_once() -> None:
    """By hand, for 10 samples in shares of 2, 3, 2 and 3: a rank whose share is over has an empty
    batch."""
    found = [[batch.tolist() for batch in evaluation_batches(10, 2, rank, 4)] for rank in range(4)]
    assert found == [[[0, 1], []], [[2, 3], [4]], [[5, 6], []], [[7, 8], [9]]]
    for samples, batch, size, batches in [
        (1, 5, 3, 1),
        (7, 3, 2, 2),
        (23, 4, 5, 2),
        (24, 4, 3, 2),
        (60, 1, 7, 9),
    ]:
        of_ranks = [evaluation_batches(samples, batch, rank, size) for rank in range(size)]
        assert {len(of_rank) for of_rank in of_ranks} == {batches}
        assert np.concatenate([rows for of_rank in of_ranks for rows in of_rank]).tolist() == list(
            range(samples)
        )


def test_an_unknown_sampling_fails_an_assertion() -> None:
    with pytest.raises(AssertionError, match="gloabl"):
        indices(0, 1, 0, 1, 1, 0, "gloabl")  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", ["global", "partition"])
def test_largest_share_bounds_every_rank(sampling: Sampling) -> None:
    for start, count, size, dataset in [
        (0, 31, 4, 100),
        (95, 31, 4, 100),
        (99, 4, 4, 100),
        (7, 250, 3, 100),
        (3, 3, 5, 100),
    ]:
        lengths = [
            len(indices(start, count, rank, size, dataset, 1, sampling)) for rank in range(size)
        ]
        epochs = (
            (start + count - 1) // dataset - start // dataset + 1 if sampling == "partition" else 1
        )
        largest = largest_share(start, count, size, dataset, sampling)
        assert max(lengths) <= largest <= -(-count // size) + epochs - 1
    assert largest_share(0, 31, 4, 100, sampling) == 8
    # 5 places of each of two epochs
    assert largest_share(95, 10, 4, 100, sampling) == (4 if sampling == "partition" else 3)
