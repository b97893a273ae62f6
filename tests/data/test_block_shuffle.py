"""data.shuffle=blocks: each sample once in an epoch, on any number of ranks, from any position; how
random it is; few blocks on each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import stored_data
from pool import alone
from ranks import mpirun, needs_mpirun

import hvdtrain
from hvdtrain.core.extras import archives
from hvdtrain.core.progress import fold
from hvdtrain.data.sampler import (
    BlockShuffle,
    parts_of_rank,
    permutation,
    positions_of_rank,
    shuffled_by_blocks,
)
from hvdtrain.errors import UserError

SHUFFLES = [
    (1000, 64, 4),
    (1000, 1, 16),
    (1000, 1000, 2),
    (999, 10, 7),
    (5, 3, 1),
    (7, 100, 1),
    (128, 16, 100),
]


def expected(seed: int, epoch: int, dataset: int, block: int, window: int) -> list[int]:
    """The order in plain Python, as its contract says it."""
    blocks = [range(first, min(first + block, dataset)) for first in range(0, dataset, block)]
    of_blocks = fold(seed, 0x626C6F63)
    order = sorted(range(len(blocks)), key=lambda number: fold(of_blocks, epoch, number))
    found: list[int] = []
    for first in range(0, len(order), window):
        samples = [sample for number in order[first : first + window] for sample in blocks[number]]
        found += sorted(samples, key=lambda sample: fold(seed, epoch, sample))
    return found


@pytest.mark.parametrize(("dataset", "block", "window"), SHUFFLES)
def test_an_epoch_is_shuffled_as_the_contract_says(dataset: int, block: int, window: int) -> None:
    shuffle = BlockShuffle(block, window)
    one = expected(3, 2, dataset, block, window)
    assert shuffled_by_blocks(3, 2, dataset, shuffle, 0, dataset).tolist() == one and sorted(
        one
    ) == list(range(dataset))
    for first, last in ((0, 1), (dataset // 3, dataset - 1), (dataset - 1, dataset), (2, 2)):
        assert shuffled_by_blocks(3, 2, dataset, shuffle, first, last).tolist() == one[first:last]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(("dataset", "block", "window"), SHUFFLES)
def test_ranks_together_read_the_samples_of_each_step_once(
    dataset: int, block: int, window: int, size: int
) -> None:
    shuffle = BlockShuffle(block, window)
    order = [
        expected(3, epoch, dataset, block, window) for epoch in range((61 + dataset) // dataset + 1)
    ]
    start = 0
    for count in (7, 40, 1, dataset, 13):
        wanted = [
            (position // dataset, order[position // dataset][position % dataset])
            for position in range(start, start + count)
        ]
        for parts in (1, 3):
            shares = [
                parts_of_rank(start, count, parts, rank, size, dataset, 3, shuffle=shuffle)
                for rank in range(size)
            ]
            found = [
                (int(e), int(s))
                for share in shares
                for part in share
                for s, e in zip(part.samples, part.epochs, strict=True)
            ]
            assert sorted(found) == sorted(wanted)
            counts = [sum(len(part.samples) for part in share) for share in shares]
            assert max(counts) - min(counts) <= 1
            assert all((np.diff(part.epochs) >= 0).all() for share in shares for part in share)
        start += count


def test_how_random_it_is() -> None:
    """Beside a full shuffle of 64,000 samples: the distance from a sample's place in the data set,
    and the serial correlation of places."""
    dataset = 64_000
    measures = {}
    for name, order in {
        "full": permutation(0, 0, dataset),
        **{
            window: shuffled_by_blocks(0, 0, dataset, BlockShuffle(64, window), 0, dataset)
            for window in (1, 16, 64)
        },
    }.items():
        distance = np.abs(order - np.arange(dataset)).mean() / (dataset / 3)
        measures[name] = distance, np.corrcoef(order[:-1], order[1:])[0, 1]
    assert all(0.9 < distance < 1.1 for distance, _ in measures.values()), measures
    assert abs(measures["full"][1]) < 0.02
    for window in (1, 16, 64):  # neighbours in the order are of one block in one of `window` cases
        assert measures[window][1] == pytest.approx(1 / window, abs=0.05), measures


def test_ranks_share_the_blocks_of_a_window() -> None:
    """Of 100 blocks in windows of 10, two ranks that read an epoch in steps of 40 read 1.3 times
    100 blocks together, not 2 times."""
    shuffle = BlockShuffle(64, 10)
    dataset = 6400
    read = 0
    for rank in range(2):
        steps = [
            positions_of_rank(start, 40, rank, 2, dataset, 0, shuffle=shuffle).samples
            for start in range(0, dataset, 40)
        ]
        read += sum(
            len(np.unique(np.concatenate(steps[first : first + 16]) // 64))
            for first in range(0, 160, 16)
        )
    assert 100 <= read <= 150, read


def test_partitions_are_not_by_block() -> None:
    with pytest.raises(
        UserError, match=r"data.shuffle=blocks gives each rank the blocks of its share"
    ) as caught:
        hvdtrain.train({}, "data.shuffle=blocks", "data.sampling=partition")
    assert "data.shuffle=full" in caught.value.fix


@pytest.mark.skipif(".npz" not in archives(), reason="this copy reads no .npz")
@pytest.mark.in_turn
@needs_mpirun
def test_a_job_is_the_same_on_ranks_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stored_data.write(tmp_path, "npz")
    words = ["data.shuffle=blocks", "data.shuffle_block=10", "data.shuffle_window=3"]
    one = stored_data.weights("npz", "one", *words)
    other = stored_data.weights("npz", "full")
    stored_data.weights("npz", "stopped", "stop.steps=5", *words)
    resumed = hvdtrain.train("resume=stopped", "stop.steps=null").weights
    assert stored_data.bits(resumed) == stored_data.bits(one) != stored_data.bits(other)
    assert (
        mpirun(2, alone("stored_data:train_on_ranks", str(tmp_path), ["npz"], words)).returncode
        == 0
    )
    for name, array in np.load(tmp_path / "weights-npz.npz").items():
        np.testing.assert_allclose(array, one[name], rtol=0, atol=1e-12)
    with pytest.raises(UserError, match="blocks-1 10 x 3"):
        hvdtrain.train("resume=stopped", "data.shuffle_window=4")
