"""Samples of HDF5 files that are known in advance: each block is decoded a few times alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import stored_data
from pool import alone
from ranks import mpirun, needs_mpirun

import hvdtrain
from hvdtrain.config.read import configure
from hvdtrain.core.progress import Progress
from hvdtrain.data.array_files import array_files_in
from hvdtrain.data.sampler import BlocksOfRanks, Positions, parts_of_rank, positions_of_rank
from hvdtrain.data.source import (
    Foresight,
)
from hvdtrain.data.subset import subset
from hvdtrain.data.upcoming import Upcoming
from hvdtrain.errors import UserError
from hvdtrain.extras.science.data.datasets import hdf5
from hvdtrain.extras.science.stored.source import StoredSource
from hvdtrain.training.data_facts import data_facts
from hvdtrain.training.datasets import open_datasets

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("h5py"), reason="h5py is not installed"
)
SAMPLES = 3000
BATCH = 20
ROWS = 15
X = np.random.default_rng(1).normal(size=(SAMPLES, 4, 40)).astype("f4")  # 1.9 MB, twice the cache
Y = X.reshape(SAMPLES, -1)[:, :2].copy()


def of(folder: Path) -> StoredSource:
    import h5py

    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset(
            "x", data=X, chunks=(ROWS, 4, 40), compression="gzip", compression_opts=1
        )
        file["y"] = np.arange(SAMPLES, dtype="f4")
    return of_file(folder / "a.h5")


def of_file(path: Path) -> StoredSource:
    source = array_files_in(hdf5.build("hdf5", path, "train", cache_mb=1))
    assert source is not None
    return source


def of_blocks(folder: Path) -> list[str]:
    """The words of a job on them, with two numbers Y to predict."""
    import h5py

    of(folder)
    with h5py.File(folder / "a.h5", "r+") as file:
        file["z"] = Y
    return [
        "data.name=hdf5",
        "data.root=a.h5",
        "data.fields={x: x, y: z}",
        "data.cache_mb=1",
        "data.readers=2",
    ]


def samples_of(progress: Progress, rank: int = 0, size: int = 1) -> np.ndarray:
    return positions_of_rank(progress.samples, BATCH, rank, size, SAMPLES, 7).samples


def steps(progress: Progress) -> Iterator[Progress]:
    while not progress.done:
        yield progress
        progress = progress.advance(BATCH)


def test_blocks_are_decoded_a_fraction_as_often(tmp_path: Path) -> None:
    told = of(tmp_path)
    untold = of_file(tmp_path / "a.h5")
    upcoming = Upcoming(told, samples_of, steps)
    for progress in steps(Progress(SAMPLES, 3 * SAMPLES)):
        upcoming.reads(progress)
        samples = samples_of(progress)
        batch = told.read(samples)
        assert batch["x"].tobytes() == X[samples].tobytes() == untold.read(samples)["x"].tobytes()
        assert batch["y"].tolist() == samples.tolist() and batch["y"].dtype == np.float32
    decoded = told.samples.cache.decoded
    before = untold.samples.cache.decoded
    assert decoded < before / 4, (decoded, before)
    need = Foresight(SAMPLES, ROWS, int(0.875e6) // 644)
    assert 1 < decoded / (3 * SAMPLES * need.decoded) < 1.75, (decoded, need)
    assert told.foresight == need and need.ahead < SAMPLES


def test_several_threads_and_reads_that_nobody_expected(tmp_path: Path) -> None:
    """Samples of an evaluation between steps, twice in a read, or read by two threads at once;
    another order from now on."""
    source = of(tmp_path)
    part = subset(source, np.arange(SAMPLES)[::-1].copy())
    upcoming = Upcoming(part, samples_of, steps)

    def right(samples: np.ndarray) -> bool:
        batch = part.read(samples)
        return (
            batch["x"].tobytes() == X[::-1][samples].tobytes()
            and batch["y"].tolist() == (SAMPLES - 1 - samples).tolist()
        )

    with ThreadPoolExecutor(4) as pool:
        found = []
        for start in (0, 5 * SAMPLES + 7, 60):
            for progress in list(steps(Progress(SAMPLES, start + SAMPLES, 0, start)))[:60]:
                upcoming.reads(progress)
                now = samples_of(progress)
                found += [
                    pool.submit(right, samples)
                    for samples in (
                        now,
                        now[:3],
                        np.concatenate([now[-2:], now[-2:], [0, 1, 2, 3]]),
                    )
                ]
            upcoming.forget()
        found.append(pool.submit(right, np.empty(0, np.int64)))
        assert all(one.result() for one in found)
    assert len(source._known["ahead"]._kept) <= int(0.875e6) // 644


def test_a_damaged_block_is_an_error_of_its_own_samples(tmp_path: Path) -> None:
    source = of(tmp_path)
    array = source.samples.parts[0].arrays["x"][0].array
    with (tmp_path / "a.h5").open("r+b") as file:
        file.seek(int(array.offsets[3, 0, 0]))  # type: ignore[union-attr]
        file.write(bytes(40))
    source = of_file(tmp_path / "a.h5")
    source.expect(np.arange(40, 75), anew=True)
    with pytest.raises(UserError, match=r"a chunk of /x, \(3, 0, 0\), cannot be unpacked"):
        source.read(np.array([40, 50, 60]))  # blocks 2, 3 and 4
    for samples in ([41, 42, 61], [40, 62]):
        assert source.read(np.array(samples))["y"].tolist() == samples
    with pytest.raises(UserError, match=r"\(3, 0, 0\)"):
        source.read(np.array([51]))


def test_processes_read_what_is_known_in_advance(tmp_path: Path) -> None:
    source = of(tmp_path).read_by(2)
    upcoming = Upcoming(source, samples_of, steps)
    for progress in list(steps(Progress(SAMPLES, SAMPLES)))[:30]:
        upcoming.reads(progress)
        assert source.read(samples_of(progress))["x"].tobytes() == X[samples_of(progress)].tobytes()


def test_what_fits_into_memory_is_not_told(tmp_path: Path) -> None:
    of(tmp_path)
    assert hdf5.build("hdf5", tmp_path / "a.h5", "train", cache_mb=2).foresight is None
    fields = {"x": "y", "y": "y"}
    small = hdf5.build("hdf5", tmp_path / "a.h5", "train", fields=fields, cache_mb=1)
    assert small.foresight is None


def test_a_job_knows_its_samples_in_advance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of a job on arrays, to the last bit, also stopped in the middle of an epoch and
    resumed."""
    monkeypatch.chdir(tmp_path)
    words = of_blocks(tmp_path)
    arrays = hvdtrain.train(stored_data.JOB, "run=arrays", train_data={"x": X, "y": Y}).weights
    files = hvdtrain.train(stored_data.JOB, "run=files", *words).weights
    assert stored_data.bits(files) == stored_data.bits(arrays)
    hvdtrain.train(stored_data.JOB, "run=stopped", "stop.steps=50", *words)
    assert stored_data.bits(
        hvdtrain.train("resume=stopped", "stop.steps=null").weights
    ) == stored_data.bits(arrays)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_read_blocks_of_their_own(size: int, parts: int) -> None:
    """The samples of each step are those of a full shuffle; shares differ by at most 1; few blocks
    are read by two ranks in an epoch."""
    read = [set[int]() for _ in range(size)]
    for start, count in [(0, 7), *((first, 240) for first in range(7, 2 * SAMPLES, 240))]:
        shares = [
            parts_of_rank(start, count, parts, rank, size, SAMPLES, 3, shuffle=BlocksOfRanks(ROWS))
            for rank in range(size)
        ]
        assert max(map(_samples, shares)) - min(map(_samples, shares)) <= 1
        for part, whole in enumerate(parts_of_rank(start, count, parts, 0, 1, SAMPLES, 3)):
            found = [pair for share in shares for pair in zip(*share[part], strict=True)]
            assert sorted(found) == sorted(zip(*whole, strict=True))
        for rank, share in enumerate(shares):
            own = np.concatenate([positions.samples[positions.epochs == 1] for positions in share])
            read[rank] |= set((own // ROWS).tolist())
            assert all((np.diff(positions.epochs) >= 0).all() for positions in share)
    assert len(set.union(*read)) == SAMPLES // ROWS
    assert sum(map(len, read)) < 1.5 * SAMPLES // ROWS, [len(one) for one in read]


def _samples(share: list[Positions]) -> int:
    return sum(len(positions.samples) for positions in share)


def test_two_ranks_decode_fewer_blocks_where_each_has_its_own(tmp_path: Path) -> None:
    found = {}
    of(tmp_path)
    for shuffle in (None, BlocksOfRanks(ROWS)):
        for rank in range(2):
            source = of_file(tmp_path / "a.h5")

            def share(
                progress: Progress, shuffle: BlocksOfRanks | None = shuffle, rank: int = rank
            ) -> np.ndarray:
                return positions_of_rank(
                    progress.samples, BATCH, rank, 2, SAMPLES, 7, shuffle=shuffle
                ).samples

            upcoming = Upcoming(source, share, steps, 2 if shuffle else 1)
            for progress in steps(Progress(SAMPLES, 3 * SAMPLES)):
                upcoming.reads(progress)
                assert source.read(share(progress))["y"].tolist() == share(progress).tolist()
            found[shuffle, rank] = source.samples.cache.decoded
    assert found[BlocksOfRanks(ROWS), 0] + found[BlocksOfRanks(ROWS), 1] < 0.9 * (
        found[None, 0] + found[None, 1]
    ), found


def test_ranks_whose_files_have_other_blocks_are_told(tmp_path: Path) -> None:
    """They would divide a step by other blocks; the samples are the same."""
    import h5py

    found = []
    for rows in (ROWS, 2 * ROWS):
        words = [
            f"data.root={tmp_path}/a.h5" if word.startswith("data.root") else word
            for word in of_blocks(tmp_path)
        ]
        with h5py.File(tmp_path / "a.h5", "r+") as file:
            del file["x"]
            file.create_dataset("x", data=X, chunks=(rows, 4, 40), compression="gzip")
        config = configure(
            None, [*words, "task.name=regression", "data.val_share=0.1", "model.name=mlp"]
        )
        found.append(data_facts(config, open_datasets(config)))
    assert {name for name in found[0] if found[0][name] != found[1][name]} == {
        "samples in a block of the training files"
    }


@needs_mpirun
def test_ranks_with_blocks_of_their_own_train_the_weights_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = of_blocks(tmp_path)
    one = hvdtrain.train(stored_data.JOB, "run=one", *words).weights
    done = mpirun(2, alone("stored_data:train_on_ranks", str(tmp_path), ["hdf5"], words))
    assert done.returncode == 0, done.stderr
    assert "2 steps ahead, each rank other blocks" in done.stdout
    for name, array in np.load(tmp_path / "weights-hdf5.npz").items():
        np.testing.assert_allclose(array, one[name], rtol=0, atol=1e-12)
