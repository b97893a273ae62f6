"""A checkpoint that several ranks wrote, loaded by any number of ranks: each reads its own
elements, and a damaged chunk is noticed by the rank that reads it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_threads import Counting, ThreadRank, in_threads

from hvdtrain.comm.communicator import part_of
from hvdtrain.core.arrays import Arrays, ArrayStream, Cut, Piece, elements, whole
from hvdtrain.errors import UserError
from hvdtrain.training.checkpoint import files, load, shards, sums
from hvdtrain.training.checkpoint.load import LoadedState, load_found
from hvdtrain.training.checkpoint.ranges import CheckpointInParts
from hvdtrain.training.checkpoint.resume import Reading, newest
from hvdtrain.training.checkpoint.shards import CheckpointShard, WrittenByAll, write_parts
from hvdtrain.training.progress.train_state import Progress, TrainState

CHUNK_BYTES = 2**12
LIMIT_BYTES = 2**22
STATE: Arrays = {
    "p.rows": np.sin(np.arange(30_001.0)).astype(np.float32),  # a range on each rank
    "p.columns": np.cos(np.arange(24_000.0)).reshape(40, 600),  # columns of it on each rank
    "p.everywhere": np.arange(9_000, dtype=np.float32),
    "p.small": np.arange(3.0),
    "b.seen": np.array(7),
    "s.rows.0": np.sin(np.arange(30_001.0)),
    "e.own": np.arange(5_000),  # of a script's loop
}
EXTRA = "e.own"


class Learner:
    """A learner that has parts of some arrays, and counts what it is given."""

    is_sharded = True

    def __init__(self, rank: int, ranks: int, state: Arrays) -> None:
        self._found = list(_pieces(rank, ranks, state))
        self.loads = 0

    def pieces(self) -> Iterator[Piece]:
        yield from self._found

    def load(self, state: ArrayStream) -> None:
        loaded = {}
        shapes = {piece.name: piece.shape for piece in self._found}
        assert state.shapes.items() <= shapes.items()
        assert state.is_partial or state.shapes == shapes
        for name, array in state.arrays:
            piece = next(each for each in self._found if each.name == name)
            loaded[name] = (
                np.asarray(array)
                if piece.is_whole
                else elements(array, piece.cut, piece.start, piece.stop)
            )
        self._found = [
            piece._replace(read=lambda array=loaded[piece.name]: array)
            if piece.name in loaded
            else piece
            for piece in self._found
        ]
        self.loads += 1


def _pieces(rank: int, ranks: int, state: Arrays) -> Iterator[Piece]:
    for name, array in state.items():
        piece = whole(name, array)
        if name == "p.columns":
            cut = Cut(1, 3, ranks, rank, 600)
            part = cut.take(array).reshape(-1)
            yield whole(name, part)._replace(
                shape=array.shape, is_whole=False, is_mine=True, cut=cut
            )
        elif "rows" in name:
            own = part_of(array.size, rank, ranks)
            yield whole(name, array[own])._replace(
                shape=array.shape, start=own.start, stop=own.stop, is_whole=False, is_mine=True
            )
        elif name != EXTRA:
            yield piece


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sums, shards, load):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK_BYTES)


def write(run: Path, ranks: int, step: int, state: Arrays) -> None:
    """A checkpoint of so many ranks."""
    run.mkdir(exist_ok=True)
    name = files.unfinished_name(step, "0123456789abcdef")
    parts = [
        CheckpointShard(
            [*_pieces(rank, ranks, state), whole(EXTRA, state[EXTRA])],
            files.ARRAYS,
            files.file_of,
            rank,
        )
        for rank in range(ranks)
    ]
    threads = [
        threading.Thread(target=write_parts, args=(part, run, name, lambda: False))
        for part in parts[1:]
    ]
    for thread in threads:
        thread.start()
    now = TrainState(Progress(10, 100, step, 24))
    by_all = WrittenByAll(parts[0], range(1, ranks), [""] * ranks, name)
    files.write(run, now, by_all, {})
    for thread in threads:
        thread.join()


def restore(rank: Counting, run: Path) -> tuple[LoadedState[Any], Learner]:
    def find(reading: Reading) -> Any:
        good = newest(run, reading)
        return (good.checkpoint.train_state.progress.step, good.notes), good.arrays

    state = {name: np.zeros_like(array) for name, array in STATE.items()}
    learner = Learner(rank.rank, rank.size, state)
    loaded = load_found(
        rank,  # type: ignore[arg-type]
        learner,  # type: ignore[arg-type]
        find,
        LIMIT_BYTES,
        is_extra=lambda name: name.startswith("e."),
    )
    return loaded, learner


def check(loaded: LoadedState[Any], learner: Learner, rank: ThreadRank, state: Arrays) -> None:
    expected = Learner(rank.rank, rank.size, state)
    for ours, theirs in zip(learner.pieces(), expected.pieces(), strict=True):
        assert ours.read().tobytes() == theirs.read().tobytes(), ours.name
    assert np.array_equal(loaded.extra[EXTRA], state[EXTRA])


@pytest.mark.parametrize(("writers", "readers"), [(3, 2), (2, 3), (1, 2)])
def test_each_rank_reads_what_it_has(
    tmp_path: Path, writers: int, readers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "run", writers, 3, STATE)
    read = Counter[str]()
    read_chunk = sums.read_chunk

    def counted(file: Any, number: int) -> bytes:
        read[threading.current_thread().name] += CHUNK_BYTES
        return read_chunk(file, number)

    monkeypatch.setattr(sums, "read_chunk", counted)

    def of_rank(rank: ThreadRank) -> int:
        counting = Counting(rank._ranks, rank.rank)
        loaded, learner = restore(counting, tmp_path / "run")
        assert loaded.found == (3, []) and loaded.digest and learner.loads == 1
        check(loaded, learner, counting, STATE)
        return counting.sent

    sent = in_threads(readers, of_rank)
    of_all = sum(array.nbytes for array in STATE.values())
    # arrays smaller than a chunk are broadcast, by the ranks in turn, and those of the script
    small = sum(a.nbytes for a in STATE.values() if a.nbytes < CHUNK_BYTES)
    assert sum(sent) == small + STATE[EXTRA].nbytes, sent
    # of the cut by columns each rank reads all; of an array a chunk more at each end
    own = (of_all - STATE["p.columns"].nbytes) / readers + STATE["p.columns"].nbytes
    assert max(read.values()) < own + 16 * CHUNK_BYTES < of_all + 16 * CHUNK_BYTES, (read, own)


def test_a_chunk_that_one_rank_finds_damaged_sends_all_to_the_checkpoint_before(
    tmp_path: Path,
) -> None:
    older = {name: array * 0 + 1 for name, array in STATE.items()}
    run = tmp_path / "run"
    write(run, 2, 3, older)
    write(run, 2, 6, STATE)
    newest_file = files.finished(run)[-1] / "optimizer.safetensors"
    content = bytearray(newest_file.read_bytes())
    content[-9] ^= 1  # of the last rank's part alone
    newest_file.write_bytes(content)
    size = len(content)

    def of_rank(rank: ThreadRank) -> None:
        counting = Counting(rank._ranks, rank.rank)
        loaded, learner = restore(counting, run)
        (step, notes) = loaded.found
        begin = (size - 1) // CHUNK_BYTES * CHUNK_BYTES
        assert step == 3 and notes == [
            f"damaged step-00000006 is skipped: optimizer.safetensors: bytes {begin} to {size} do "
            "not have their checksum"
        ]
        check(loaded, learner, counting, older)

    in_threads(3, of_rank)
    (files.finished(run)[0] / "weights.safetensors").write_bytes(b"")

    def without(rank: ThreadRank) -> None:
        with pytest.raises(UserError, match="no checkpoint of .* is good: damaged step-00000006"):
            restore(Counting(rank._ranks, rank.rank), run)

    in_threads(2, without)


class Elsewhere(Counting):
    """A rank on which rank 0's folder has another name."""

    def broadcast_object(self, thing: Any, root: int = 0) -> Any:
        match super().broadcast_object(thing, root):
            case ((value, CheckpointInParts() as parts, has_state), failure) if self.rank == 1:
                return (value, parts._replace(folder=parts.folder / "absent"), has_state), failure
            case found:
                return found


def test_a_rank_that_does_not_see_the_folder_is_named_and_rank_0_sends_all(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "run", 2, 3, STATE)

    def of_rank(rank: ThreadRank) -> int:
        elsewhere = Elsewhere(rank._ranks, rank.rank)
        loaded, learner = restore(elsewhere, tmp_path / "run")
        check(loaded, learner, elsewhere, STATE)
        return elsewhere.sent

    sent = in_threads(2, of_rank)
    assert sent == [sum(array.nbytes for array in STATE.values()), 0]
    assert "rank 1 does not see" in capfd.readouterr().err


def test_one_ranks_checkpoint_is_read_by_rank_0(tmp_path: Path) -> None:
    """Its files have one checksum each, which tells nothing of a part."""
    (tmp_path / "run").mkdir()
    now = TrainState(Progress(10, 100, 3, 24))
    files.write(tmp_path / "run", now, STATE, {})

    def of_rank(rank: ThreadRank) -> int:
        counting = Counting(rank._ranks, rank.rank)
        loaded, learner = restore(counting, tmp_path / "run")
        check(loaded, learner, counting, STATE)
        return counting.sent

    assert in_threads(2, of_rank) == [sum(array.nbytes for array in STATE.values()), 0]
