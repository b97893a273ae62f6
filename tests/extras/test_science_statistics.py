"""Mean and deviation of large files: each sample read by one rank; the same bits on any number of
ranks; kept until a file changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_threads import in_threads

from hvdtrain.data.array_files import ReadingRanks, array_files_in
from hvdtrain.data.configured.split import divide
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError
from hvdtrain.extras.science.data.datasets import npz
from hvdtrain.extras.science.stored import statistics
from hvdtrain.extras.science.stored.source import StoredSource
from hvdtrain.tasks import transform
from hvdtrain.tasks.transform import column_stats

RANDOM = np.random.default_rng(5)
# far from zero; one column is constant
X = RANDOM.normal(1e4, 0.1, (997, 3, 5)) * np.array([1, 1, 10, 0, 1e-3])


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(transform, "_MOST_VALUES", 100)
    monkeypatch.setattr(statistics, "_VALUES", 64 * 15)
    np.savez(tmp_path / "a.npz", x=X, y=X[:, 0, 0])
    return tmp_path / "a.npz"


def stats_on(ranks: int, file: Path, share: float | None = None) -> list[tuple[bytes, bytes, int]]:
    """Mean and deviation of x on each rank, and how many samples it has read for them."""

    def on_rank(communicator: Any) -> tuple[bytes, bytes, int]:
        source: Source = npz.build("npz", file, "train")
        stored = array_files_in(source)
        assert stored is not None
        read: list[int] = []
        counted = StoredSource.read_field

        def count(self: StoredSource, name: str, indices: np.ndarray) -> np.ndarray:
            read.append(len(indices))
            return counted(self, name, indices)

        stored.identity()
        object.__setattr__(stored, "read_field", lambda name, indices: count(stored, name, indices))
        stored.read_together(
            ReadingRanks(communicator.rank, communicator.size, communicator.allreduce)
        )
        found = column_stats(source if share is None else divide(source, share).train, "x")
        return found.mean.tobytes(), found.std.tobytes(), sum(read)

    return in_threads(ranks, on_rank)


def test_each_rank_reads_a_part_and_all_have_the_same_bits(file: Path) -> None:
    found = {}
    for ranks in (1, 2, 3):
        for old in (file.parent / "cache").rglob("*.json"):
            old.unlink()
        results = stats_on(ranks, file)
        assert (
            sum(read for _, _, read in results) == len(X)
            and len({bits[:2] for bits in results}) == 1
        )
        found[ranks] = results[0][:2]
    assert found[1] == found[2] == found[3]
    mean, std = (np.frombuffer(part) for part in found[1])
    np.testing.assert_allclose(mean, X.mean((0, 1)), rtol=1e-13)
    np.testing.assert_allclose(std[[0, 1, 2, 4]], X.std((0, 1))[[0, 1, 2, 4]], rtol=1e-9)
    assert std[3] == 1.0


def test_they_are_kept_until_the_file_changes(file: Path) -> None:
    first = stats_on(2, file)
    assert [read for _, _, read in stats_on(3, file)] == [0, 0, 0] and stats_on(1, file)[0][
        :2
    ] == first[0][:2]
    (kept,) = (file.parent / "cache").rglob("*.json")
    kept.write_text("[[1")
    assert stats_on(1, file)[0] == (*first[0][:2], len(X))  # a damaged one is computed again
    os.utime(file, ns=(1, 1))
    assert sum(read for _, _, read in stats_on(2, file)) == len(X)


def test_a_part_of_the_samples_has_its_own(file: Path) -> None:
    part = stats_on(2, file, 0.3)
    assert {bits[:2] for bits in part} != {stats_on(2, file)[0][:2]} and sum(
        read for _, _, read in part
    ) == len(X) - round(0.3 * len(X))


def test_a_number_that_is_not_finite_is_named(file: Path) -> None:
    x = X.copy()
    x[700, 1, 2] = np.nan
    np.savez(file, x=x, y=X[:, 0, 0])
    with pytest.raises(UserError, match="field x of sample 700 has nan"):
        stats_on(1, file)
