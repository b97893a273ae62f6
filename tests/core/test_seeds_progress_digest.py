"""Seeds, progress and digests."""

from __future__ import annotations

import numpy as np

from hvdtrain.core.arrays import digest
from hvdtrain.core.progress import Progress, fold


def splitmix64(x: int) -> int:
    """The published mixing function, written independently: one call is state + golden ratio, then
    two multiply-xorshifts."""
    z = (x + 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) % 2**64
    return z ^ z >> 31


def test_fold_is_splitmix64() -> None:
    # the first output of the reference implementation from state 0
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    golden = 0x9E3779B97F4A7C15
    assert fold(0) == splitmix64((splitmix64(0) - golden) % 2**64)


def test_fold_of_an_array_is_fold_of_its_elements() -> None:
    counters = np.array([0, 1, 7, 2**63], dtype=np.uint64)
    assert fold(5, 3, counters).tolist() == [fold(5, 3, int(c)) for c in counters]


def test_fold_depends_on_every_counter_and_their_order() -> None:
    seeds = [
        fold(1, 2, 3),
        fold(1, 3, 2),
        fold(2, 1, 3),
        fold(1, 2, 4),
        fold(1, 2),
        fold(1, 2, 3, 0),
    ]
    assert len(set(seeds)) == len(seeds)
    many = fold(1, np.arange(100_000, dtype=np.uint64))
    assert len(np.unique(many)) == 100_000
    assert abs(float((many >> np.uint64(63)).mean()) - 0.5) < 0.01


def test_progress_counts_epochs_by_samples() -> None:
    p = Progress(dataset=10, total=20)
    assert (p.epoch, p.epochs, p.done) == (0, 0.0, False)
    for _ in range(3):
        p = p.advance(4)
    assert (p.step, p.samples, p.epoch, p.epochs, p.done) == (3, 12, 1, 1.2, False)
    assert p.advance(8).done


def test_digest_sees_values_names_shapes_and_types() -> None:
    a = {"p.x": np.arange(6, dtype=np.float32), "p.y": np.zeros(2)}
    same = {"p.y": np.zeros(2), "p.x": np.arange(6, dtype=np.float32)}
    assert digest(a) == digest(same)
    changed = np.arange(6, dtype=np.float32)
    changed[5] = np.nextafter(changed[5], np.float32(9))
    others = [
        a | {"p.x": changed},
        a | {"p.x": a["p.x"].reshape(2, 3)},
        a | {"p.x": a["p.x"].view(np.int32)},
        {"p.z": a["p.x"], "p.y": a["p.y"]},
    ]
    assert len({digest(a), *map(digest, others)}) == 5
    assert len(digest(a)) == 16
