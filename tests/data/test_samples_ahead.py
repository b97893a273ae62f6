"""Samples that are known in advance: the numbers are those of the file whatever was told, and blocks are decoded a fraction as often."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import stored_data

import hvdtrain
from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import Batch
from hvdtrain.core.progress import Progress
from hvdtrain.data.datasets import hdf5
from hvdtrain.data.sampler import positions_of_rank
from hvdtrain.data.source import AroundSource, NamedArrays, Source, expect, foresight
from hvdtrain.data.stored.ahead import Need
from hvdtrain.data.stored.source import StoredSource, read_by, stored_in
from hvdtrain.data.subset import subset
from hvdtrain.errors import UserError
from hvdtrain.training.build import build_learner, build_recipe, build_task
from hvdtrain.training.input import Prefetcher
from hvdtrain.training.upcoming import Upcoming

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("h5py"), reason="h5py is not installed")
SAMPLES, BATCH, ROWS = 3000, 20, 15
X = np.random.default_rng(1).normal(size=(SAMPLES, 4, 40)).astype("f4")  # 1.9 MB, twice the cache


def of(folder: Path) -> StoredSource:
    import h5py

    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", data=X, chunks=(ROWS, 4, 40), compression="gzip", compression_opts=1)
        file["y"] = np.arange(SAMPLES, dtype="f4")
    return of_file(folder / "a.h5")


def of_file(path: Path) -> StoredSource:
    source = stored_in(hdf5.build("hdf5", path, "train", cache_mb=1))
    assert source is not None
    return source


def samples_of(progress: Progress, rank: int = 0, size: int = 1) -> np.ndarray:
    return positions_of_rank(progress.samples, BATCH, rank, size, SAMPLES, 7).samples


def steps(progress: Progress) -> Iterator[Progress]:
    while not progress.done:
        yield progress
        progress = progress.advance(BATCH)


def test_blocks_are_decoded_a_fraction_as_often(tmp_path: Path) -> None:
    told, untold = of(tmp_path), of_file(tmp_path / "a.h5")
    upcoming = Upcoming(told, samples_of, steps)
    for progress in steps(Progress(SAMPLES, 3 * SAMPLES)):
        upcoming.reads(progress)
        samples = samples_of(progress)
        batch = told.read(samples)
        assert batch["x"].tobytes() == X[samples].tobytes() == untold.read(samples)["x"].tobytes()
        assert batch["y"].tolist() == samples.tolist() and batch["y"].dtype == np.float32
    decoded, before = told.samples.cache.decoded, untold.samples.cache.decoded
    assert decoded < before / 4, (decoded, before)
    need = Need(SAMPLES, ROWS, int(0.875e6) // 644)
    assert 1 < decoded / (3 * SAMPLES * need.decoded) < 1.75, (decoded, need)
    assert told.foresight == need.ahead < SAMPLES


def test_several_threads_and_reads_that_nobody_expected(tmp_path: Path) -> None:
    """Samples of an evaluation between steps, twice in a read, or read by two threads at once; another order from now on."""
    source = of(tmp_path)
    part = subset(source, np.arange(SAMPLES)[::-1].copy())
    upcoming = Upcoming(part, samples_of, steps)

    def right(samples: np.ndarray) -> bool:
        batch = part.read(samples)
        return batch["x"].tobytes() == X[::-1][samples].tobytes() and batch["y"].tolist() == (SAMPLES - 1 - samples).tolist()

    with ThreadPoolExecutor(4) as pool:
        found = []
        for start in (0, 5 * SAMPLES + 7, 60):
            for progress in list(steps(Progress(SAMPLES, start + SAMPLES, 0, start)))[:60]:
                upcoming.reads(progress)
                now = samples_of(progress)
                found += [pool.submit(right, samples) for samples in (now, now[:3], np.concatenate([now[-2:], now[-2:], [0, 1, 2, 3]]))]
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
    expect(source, np.arange(40, 75), anew=True)
    with pytest.raises(UserError, match=r"a chunk of /x, \(3, 0, 0\), cannot be unpacked"):
        source.read(np.array([40, 50, 60]))  # blocks 2, 3 and 4
    for samples in ([41, 42, 61], [40, 62]):
        assert source.read(np.array(samples))["y"].tolist() == samples
    with pytest.raises(UserError, match=r"\(3, 0, 0\)"):
        source.read(np.array([51]))


def test_processes_read_what_is_known_in_advance(tmp_path: Path) -> None:
    source = read_by(of(tmp_path), 2)
    upcoming = Upcoming(source, samples_of, steps)
    for progress in list(steps(Progress(SAMPLES, SAMPLES)))[:30]:
        upcoming.reads(progress)
        assert source.read(samples_of(progress))["x"].tobytes() == X[samples_of(progress)].tobytes()


def test_what_fits_into_memory_is_not_told(tmp_path: Path) -> None:
    of(tmp_path)
    assert foresight(hdf5.build("hdf5", tmp_path / "a.h5", "train", cache_mb=2)) == 0
    assert foresight(hdf5.build("hdf5", tmp_path / "a.h5", "train", fields={"x": "y", "y": "y"}, cache_mb=1)) == 0


def test_a_job_knows_its_samples_in_advance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of a job on arrays, to the last bit, also stopped in the middle of an epoch and resumed."""
    monkeypatch.chdir(tmp_path)
    of(tmp_path)
    y = X.reshape(SAMPLES, -1)[:, :2].copy()
    import h5py

    with h5py.File("a.h5", "r+") as file:
        file["z"] = y
    words = ["data.name=hdf5", "data.root=a.h5", "data.fields={x: x, y: z}", "data.cache_mb=1", "data.readers=2"]
    arrays = hvdtrain.train(stored_data.JOB, "run=arrays", train_data={"x": X, "y": y}).weights
    files = hvdtrain.train(stored_data.JOB, "run=files", *words).weights
    assert stored_data.bits(files) == stored_data.bits(arrays)
    hvdtrain.train(stored_data.JOB, "run=stopped", "stop.steps=50", *words)
    assert stored_data.bits(hvdtrain.train("resume=stopped", "stop.steps=null").weights) == stored_data.bits(arrays)


class Listening(AroundSource):
    """A source that wants to know 100 samples in advance."""

    foresight = 100

    def __init__(self, source: Source) -> None:
        self.source, self.told, self.reads = source, [np.empty(0, np.int64)], list[np.ndarray]()

    def read(self, indices: np.ndarray) -> Batch:
        assert set(indices.tolist()) <= set(np.concatenate(self.told).tolist())
        self.reads.append(indices)
        return self.source.read(indices)

    def expect(self, indices: np.ndarray, anew: bool) -> None:
        self.told = [indices] if anew else [*self.told, indices]


@pytest.mark.parametrize(
    "words", [["data.ahead=0"], ["data.ahead=3", "data.readers=1"], ["data.ahead=2", "data.readers=1", "batch.micro=5"]]
)
def test_a_prefetcher_tells_what_it_reads(words: list[str]) -> None:
    arrays = NamedArrays({"x": X[:500], "y": X[:500, 0, :3].copy()})
    config = configure(None, ["task.name=regression", "model.name=mlp", "batch.size=13", "speed.device=cpu", "epochs=2", *words])
    source = Listening(arrays)
    learner = build_learner(config, build_task(arrays, arrays, config), SingleProcessCommunicator())
    prefetcher = Prefetcher(config, SingleProcessCommunicator(), build_recipe(config, 500, None), source, learner)
    for start in (0, 490):  # from the beginning, and as a job that is resumed
        progress, source.reads = Progress(500, 1000, 0, start), []
        for _ in range(30):
            prefetcher.take(progress)
            progress = progress.advance(13)
        prefetcher.drain()
        told, read = np.concatenate(source.told).tolist(), np.concatenate(source.reads).tolist()
        assert told[: len(read)] == read == positions_of_rank(start, len(read), 0, 1, 500, config.seed).samples.tolist()
        assert 100 - 13 < len(told) - len(read) <= 100 or len(told) == -(-(1000 - start) // 13) * 13
    prefetcher.close()
