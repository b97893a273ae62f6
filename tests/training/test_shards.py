"""A checkpoint that several ranks write: the same bytes for any number of them, and an error where
one of them fails."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_threads import ThreadRank, in_threads
from ranks import HANG_S, ROOT, environment, mpirun, mpirun_path, needs_mpirun
from waiting import wait_until

from hvdtrain.comm import on_all_ranks
from hvdtrain.comm.communicator import part_of
from hvdtrain.config.sections.checkpoint import CheckpointConfig
from hvdtrain.core.arrays import WHOLE, Arrays, ArrayStream, Cut, Piece, whole
from hvdtrain.core.folder import Folder
from hvdtrain.errors import Diverged
from hvdtrain.events.log import Log
from hvdtrain.training.checkpoint import array_file, checkpoints, files, shards, shared_file, sums
from hvdtrain.training.checkpoint.checkpoints import Checkpoints, LastWrite
from hvdtrain.training.checkpoint.files import Damaged
from hvdtrain.training.checkpoint.saver import Saver
from hvdtrain.training.checkpoint.shards import CheckpointShard, WrittenByAll, write_parts
from hvdtrain.training.checkpoint.shared_file import BLOCK_BYTES, WholeBlocks
from hvdtrain.training.checkpoint.sums import ByteSum
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.progress.train_state import Progress, TrainState

IDENTITY = {"seed": 5, "data": {"samples": 10}}
NOW = TrainState(Progress(10, 100, 3, 24))
STATE: Arrays = {
    "p.body.weight": np.arange(35, dtype=np.float32).reshape(7, 5),
    "p.bias": np.array(2.5),
    "b.seen": np.array(7),
    "s.body.weight.0": np.arange(35, dtype=np.float32).reshape(7, 5) * 0.5,
    "s.body.weight.step": np.array(3.0, np.float32),
    "s.head.0": np.linspace(0, 1, 3),
}
SHARDED = ("s.body.weight.0", "s.head.0")


def pieces(rank: int, ranks: int, state: Arrays = STATE) -> list[Piece]:
    found = []
    for name, array in state.items():
        if name in SHARDED:
            own = part_of(array.size, rank, ranks)
            part = whole(name, array.reshape(-1)[own])
            found.append(
                part._replace(
                    shape=array.shape, start=own.start, stop=own.stop, is_whole=False, is_mine=True
                )
            )
        else:
            found.append(whole(name, array))
    return found


def test_a_cut_lies_in_stretches_of_the_whole() -> None:
    whole_array = np.arange(24.0).reshape(6, 4)
    for cut in (WHOLE, Cut(0, 1, 2, 1), Cut(1, 1, 2, 0), Cut(1, 1, 4, 3), Cut(0, 3, 2, 1)):
        part = cut.take(whole_array)
        assert (
            cut.whole_shape(part.shape) == whole_array.shape
            and cut.local_shape(whole_array.shape) == part.shape
        )
        for start, stop in ((0, part.size), (1, part.size - 1), (part.size // 2, part.size // 2)):
            runs = cut.runs(whole_array.shape, start, stop)
            found = [
                number for first, behind in runs for number in whole_array.reshape(-1)[first:behind]
            ]
            assert found == part.reshape(-1)[start:stop].tolist(), (cut, start, stop)
        copy = np.zeros_like(whole_array)
        cut.put(copy, part)
        assert np.array_equal(copy[copy > 0], np.sort(part[part > 0]))


@pytest.mark.parametrize("several_hosts", [False, True])
def test_ranks_with_columns_write_the_bytes_of_one_process(
    tmp_path: Path, several_hosts: bool
) -> None:
    def columns(rank: int) -> list[Piece]:
        # one column of five
        cut = Cut(1, 1, 5, rank)
        name = "s.body.weight.0"
        part = whole(name, cut.take(STATE[name]).reshape(-1))
        column = part._replace(shape=STATE[name].shape, is_whole=False, is_mine=True, cut=cut)
        return [
            column if piece.name == name else piece._replace(is_mine=rank == 0)
            for piece in pieces(0, 1)
        ]

    def other(rank: int) -> None:
        write_parts(of_rank(rank), run, name, lambda: False)

    def of_rank(rank: int) -> CheckpointShard:
        return CheckpointShard(
            columns(rank), files.ARRAYS, files.file_of, rank, several_hosts=several_hosts
        )

    run = tmp_path / "columns"
    name = files.unfinished_name(3, "0123456789abcdef")
    run.mkdir()
    threads = [threading.Thread(target=other, args=(rank,)) for rank in range(1, 5)]
    for thread in threads:
        thread.start()
    found = files.write(run, NOW, WrittenByAll(of_rank(0), range(1, 5), [""] * 5, name), IDENTITY)
    for thread in threads:
        thread.join()
    whole_run = write(tmp_path / "one", 1)
    for file in files.ARRAYS:
        assert (found / file).read_bytes() == (whole_run / file).read_bytes(), file


def parts(
    rank: int, ranks: int, state: Arrays = STATE, several_hosts: bool = False
) -> CheckpointShard:
    return CheckpointShard(
        pieces(rank, ranks, state), files.ARRAYS, files.file_of, rank, several_hosts=several_hosts
    )


def write(
    run: Path,
    ranks: int,
    other: Callable[[int], None] | None = None,
    state: Arrays = STATE,
    several_hosts: bool = False,
) -> Path:
    """By rank 0 in this thread, and by the others in threads; `other`: what they do instead."""
    run.mkdir()
    name = files.unfinished_name(3, "0123456789abcdef")
    is_over = threading.Event()
    does = other or (
        lambda rank: write_parts(
            parts(rank, ranks, state, several_hosts), run, name, is_over.is_set
        )
    )
    threads = [threading.Thread(target=does, args=(rank,)) for rank in range(1, ranks)]
    for thread in threads:
        thread.start()
    try:
        of_rank_0 = parts(0, ranks, state, several_hosts)
        return files.write(
            run, NOW, WrittenByAll(of_rank_0, range(1, ranks), ["n1"] * ranks, name), IDENTITY
        )
    finally:
        is_over.set()  # a rank may come to a folder that rank 0 has removed
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_the_bytes_do_not_depend_on_the_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "alone").mkdir()
    alone = files.write(tmp_path / "alone", NOW, STATE, IDENTITY)
    one = write(tmp_path / "one", 1)
    many = write(tmp_path / "many", ranks)
    assert {path.name: path.read_bytes() for path in one.iterdir()} == {
        path.name: path.read_bytes() for path in many.iterdir()
    }
    assert all((alone / file).read_bytes() == (many / file).read_bytes() for file in files.ARRAYS)
    for mapped in (True, False):
        read = files.read_arrays(many, 2**20, mapped=mapped)
        assert read.keys() == STATE.keys() and all(
            np.array_equal(read[name], STATE[name]) for name in STATE
        )


class NfsClients:
    """os.pwrite as clients of NFS may do it: whole pages are written, in which all but the rank's
    own bytes are as the file began."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._pwrite = os.pwrite
        self._lock = threading.Lock()
        self._first: dict[
            str, bytes
        ] = {}  # by the file's path: an inode is used again after a write that failed
        self._pages: dict[
            tuple[threading.Thread, str], bytearray
        ] = {}  # by the thread, which is a host of its own, and the file

    def __call__(self, handle: int, data: memoryview, begin: int) -> int:
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY:
            raise OSError(errno.EBADF, "a client that may read reads whole pages")
        path = os.readlink(f"/proc/self/fd/{handle}")
        with self._lock:
            first = self._first.setdefault(path, Path(path).read_bytes())
            seen = self._pages.setdefault((threading.current_thread(), path), bytearray(first))
            seen[begin : begin + len(data)] = data
            start = begin // self._page_bytes * self._page_bytes
            stop = min(-(-(begin + len(data)) // self._page_bytes) * self._page_bytes, len(seen))
            assert self._pwrite(handle, seen[start:stop], start) == stop - start
        return len(data)


LARGE: Arrays = {  # every rank has whole blocks of some arrays, and none of others
    "p.wide.weight": np.arange(70_000, dtype=np.float32).reshape(70, 1000),
    "b.seen": np.array(7),
    "s.body.weight.0": np.sin(np.arange(90_001.0)),
    "s.head.0": np.linspace(0, 1, 1001),
    "s.step": np.array(3.0, np.float32),
}


@pytest.mark.parametrize("page_bytes", [4096, 65536])
@pytest.mark.parametrize("ranks", [2, 4])
def test_hosts_whose_clients_write_whole_pages_do_not_undo_each_others_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, page_bytes: int
) -> None:
    one = write(tmp_path / "one", 1, state=LARGE)
    monkeypatch.setattr(os, "pwrite", NfsClients(page_bytes))
    many = write(tmp_path / "many", ranks, state=LARGE, several_hosts=True)
    assert {path.name: path.read_bytes() for path in one.iterdir()} == {
        path.name: path.read_bytes() for path in many.iterdir()
    }


class ShardedLearner:
    """One rank's part of LARGE."""

    is_sharded = True

    def __init__(self, rank: int, ranks: int) -> None:
        self._pieces = pieces(rank, ranks, LARGE)

    def pieces(self) -> Iterator[Piece]:
        return iter(self._pieces)

    def state_dict_names(self) -> dict[str, str]:
        return {}

    def load(self, state: ArrayStream) -> None:
        for name, array in state.arrays:
            assert np.array_equal(array, LARGE[name]), name


@pytest.mark.parametrize("hosts", [["n1", "n2"], ["n1", "n1"]])
def test_a_job_on_several_hosts_writes_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: list[str]
) -> None:
    """Two ranks that take each other for one host's write single bytes: the checksums find what
    such clients undo."""

    def finish(communicator: ThreadRank) -> LastWrite:
        saver = (
            None
            if communicator.rank
            else Saver(tmp_path / "run", CheckpointConfig(), IDENTITY, Log([]))
        )
        learner: Any = ShardedLearner(communicator.rank, communicator.size)
        return Checkpoints(communicator, learner, tmp_path / "run", 2**20, saver, hosts).finish(NOW)

    (tmp_path / "run").mkdir()
    one = write(tmp_path / "one", 1, state=LARGE)
    monkeypatch.setattr(os, "pwrite", NfsClients(4096))
    failure = in_threads(2, finish)[0].failure
    if hosts == ["n1", "n1"]:
        assert (
            re.search("are not what was written", failure)
            and files.finished(tmp_path / "run") == []
        )
    else:
        (many,) = files.finished(tmp_path / "run")
        assert not failure and all(
            (one / file).read_bytes() == (many / file).read_bytes() for file in files.ARRAYS
        )


def test_ranks_that_wait_for_rank_0_make_progress_as_long_as_it_writes_or_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """guard.start_s and guard.stall_s count from the last bytes; so does the timeout of a
    collective where one reads."""

    def finish_and_read(communicator: ThreadRank) -> tuple[int, int]:
        beats = Heartbeat()
        saver = (
            None if communicator.rank else Saver(tmp_path, CheckpointConfig(), IDENTITY, Log([]))
        )
        learner: Any = ShardedLearner(communicator.rank, communicator.size)
        of_rank = Checkpoints(
            communicator, learner, tmp_path, 2**20, saver, ["n1", "n1"], beats.go_on
        )
        assert of_rank.finish(NOW) == ("", True)
        written = beats.beats
        assert of_rank.roll_back() == NOW
        return written, beats.beats - written

    monkeypatch.setattr(on_all_ranks, "MEET_S", 0.0)
    found = in_threads(2, finish_and_read)
    assert all(written > 0 for written, _ in found)
    # once all ranks have opened it, and after each array
    assert [read for _, read in found] == [1 + len(LARGE)] * 2


def test_a_checkpoint_that_waits_for_a_long_write_makes_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of training and without shards, too: each fsync takes 0.03 s here, and there is
    one for each 64 KiB."""

    def train(communicator: ThreadRank) -> list[int]:
        beats = Heartbeat()
        saver = (
            None if communicator.rank else Saver(tmp_path, CheckpointConfig(), IDENTITY, Log([]))
        )
        of_rank = Checkpoints(
            communicator,
            WholeLearner(),
            tmp_path,
            2**20,
            saver,
            ["n1"] * communicator.size,
            beats.go_on,
        )
        found = list[int]()
        for step in (3, 4):
            of_rank.expect()
            of_rank.save_if_due(TrainState(Progress(10, 100, step, 8 * step), evaluated=step))
            found.append(beats.beats)
        of_rank.close()
        return found

    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (time.sleep(0.03), fsync(handle)))
    monkeypatch.setattr(checkpoints, "LOOK_S", 0.01)
    monkeypatch.setattr(files, "SYNC_BYTES", 2**16)
    monkeypatch.setattr(array_file, "PIECE_BYTES", 2**16)
    for ranks in (1, 2):
        for first, second in in_threads(ranks, train):
            # 280 kB of weights in five pieces, 728 kB in twelve
            assert first == 0 and second > 2, (
                first,
                second,
            )
        assert [folder.name for folder in files.finished(tmp_path)] == [
            "step-00000003",
            "step-00000004",
        ]


class WholeLearner:
    """All of LARGE on each rank."""

    is_sharded = False

    def state(self) -> Arrays:
        return LARGE

    def state_dict_names(self) -> dict[str, str]:
        return {}


def test_whole_blocks_are_a_ranks_own_and_the_rest_is_left() -> None:
    block = BLOCK_BYTES
    blocks = WholeBlocks(
        [
            (3 * block + 5, 3 * block + 9),
            (10, block),
            (block, 2 * block + 7),
            (4 * block - 1, 4 * block + 30),
        ],
        4 * block + 30,
    )
    assert list(blocks.split(10, block)) == [(10, block, False)]
    assert list(blocks.split(block, 2 * block + 7)) == [
        (block, 2 * block, True),
        (2 * block, 2 * block + 7, False),
    ]
    assert list(blocks.split(block + 1, block + 4)) == [(block + 1, block + 4, True)]
    assert list(blocks.split(3 * block + 5, 3 * block + 9)) == [
        (3 * block + 5, 3 * block + 9, False)
    ]
    end = [(4 * block - 1, 4 * block, False), (4 * block, 4 * block + 30, True)]
    assert list(blocks.split(4 * block - 1, 4 * block + 30)) == end  # the file ends there


def report(run: Path, **content: object) -> None:
    """What rank 1 says, which has written nothing."""
    folder = shards._wait_for_folder(
        run, files.unfinished_name(3, "0123456789abcdef"), lambda: False
    )
    assert folder is not None
    with folder:
        folder.replace("rank-00001.written", json.dumps(content).encode())


def test_a_rank_that_cannot_write_is_named_and_nothing_stays(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(OSError, match=r"No space left on device \(rank 1 on n1\)") as caught:
        write(
            run, 2, lambda rank: report(run, errno=errno.ENOSPC, failure="No space left on device")
        )
    assert caught.value.errno == errno.ENOSPC and list((run / "checkpoints").iterdir()) == []


class Wrong(CheckpointShard):
    """Rank 1, which writes all, and says `more` than that."""

    def __init__(self, more: ByteSum) -> None:
        super().__init__(pieces(1, 2), files.ARRAYS, files.file_of, 1)
        self._more = more

    def write(self, folder: Folder, on_disk: Callable[[], None] = lambda: None) -> list[ByteSum]:
        return [of_file.plus(self._more) for of_file in super().write(folder, on_disk)]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (ByteSum(0, 1), "were not written, or were written by several ranks"),
        (ByteSum(1, 0), "are not what was written"),
    ],
)
def test_a_rank_that_writes_too_little_or_something_else_is_found(
    tmp_path: Path, more: ByteSum, words: str
) -> None:
    run = tmp_path / "run"
    name = files.unfinished_name(3, "0123456789abcdef")
    with pytest.raises(OSError, match=f"bytes of weights.safetensors {words}"):
        write(run, 2, lambda _: write_parts(Wrong(more), run, name, lambda: False))
    assert list((run / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("several_hosts", [False, True])
def test_each_rank_reads_an_equal_share_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, several_hosts: bool
) -> None:
    for module in (sums, shards):
        monkeypatch.setattr(module, "CHUNK_BYTES", 2**16)
    read: Counter[str] = Counter()
    pread = os.pread

    def counted(handle: int, length: int, begin: int) -> bytes:
        found = pread(handle, length, begin)
        read[threading.current_thread().name] += len(found)
        return found

    monkeypatch.setattr(os, "pread", counted)
    many = write(tmp_path / "many", 4, state=LARGE, several_hosts=several_hosts)
    sizes = [(many / file).stat().st_size for file in files.ARRAYS]
    assert sum(read.values()) == sum(sizes) and len(read) == 4
    assert max(read.values()) <= 2**16 * -(-sum(-(-size // 2**16) for size in sizes) // 4), read


def test_a_report_has_the_same_few_bytes_for_any_number_of_stretches(tmp_path: Path) -> None:
    """Of columns each row of a matrix is a stretch."""
    sizes = []
    for rows in (2, 3000):
        run = tmp_path / str(rows)
        name = files.unfinished_name(3, "0123456789abcdef")
        cut = Cut(1, 1, 2, 1)
        array = np.arange(rows * 4.0).reshape(rows, 4)
        part = whole("s.w.0", cut.take(array).reshape(-1))
        column = part._replace(shape=array.shape, is_whole=False, is_mine=True, cut=cut)
        of_rank = CheckpointShard([column], files.ARRAYS, files.file_of, 1)
        with Folder.make(run, "checkpoints", name) as folder:
            WrittenByAll(of_rank, [1], ["n1", "n1"], name).prepare(folder)
            write_parts(of_rank, run, name, lambda: False, is_lost=lambda: True)
            sizes.append(len(folder.read("rank-00001.written", 2**20)))
    assert max(sizes) < 200, sizes


def test_a_rank_that_has_written_reads_its_share_though_its_job_ends(tmp_path: Path) -> None:
    """Rank 0 waits for it: a checkpoint that all have written is not lost."""
    run = tmp_path / "run"
    name = files.unfinished_name(3, "0123456789abcdef")
    is_over = threading.Event()

    class LastOne(CheckpointShard):
        def write(
            self, folder: Folder, on_disk: Callable[[], None] = lambda: None
        ) -> list[ByteSum]:
            is_over.set()
            return super().write(folder, on_disk)

    last = LastOne(pieces(1, 2), files.ARRAYS, files.file_of, 1)
    found = write(run, 2, lambda rank: write_parts(last, run, name, is_over.is_set))
    assert is_over.is_set() and files.read_arrays(found, 2**20).keys() == STATE.keys()


def test_a_rank_whose_job_ends_does_not_wait_long_for_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "CLOSING_S", 0.2)
    name = files.unfinished_name(3, "0123456789abcdef")
    is_over = threading.Event()
    of_rank = parts(1, 2)
    with Folder.make(tmp_path, "checkpoints", name) as folder:
        WrittenByAll(of_rank, [1], ["n1", "n1"], name).prepare(folder)
        thread = threading.Thread(
            target=write_parts, args=(of_rank, tmp_path, name, is_over.is_set)
        )
        thread.start()
        wait_until(lambda: "rank-00001.written" in folder.names(), "rank 1 has written")
        thread.join(1.0)
        assert thread.is_alive(), "rank 0 may take its time"
        is_over.set()
        thread.join(HANG_S)
        assert not thread.is_alive() and "rank-00001.read" not in folder.names()


@pytest.mark.parametrize(
    ("sizes", "ranks"), [((10, 3), 4), ((0, 5), 3), ((1, 0), 2), ((7, 9), 1), ((2, 1), 5)]
)
def test_shares_are_equal_and_every_chunk_is_in_one(sizes: tuple[int, int], ranks: int) -> None:
    """sizes: of two files, in chunks; the last chunks have one byte."""
    in_bytes = {
        file: max(0, (count - 1) * sums.CHUNK_BYTES + 1) if count else 0
        for file, count in zip("ab", sizes, strict=True)
    }
    shares = [shards.ChunkShare(in_bytes, rank, ranks)._chunks for rank in range(ranks)]
    assert [chunk for share in shares for chunk in share] == [("a", n) for n in range(sizes[0])] + [
        ("b", n) for n in range(sizes[1])
    ]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_every_flipped_bit_and_every_missing_file_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sums, shards):
        monkeypatch.setattr(module, "CHUNK_BYTES", 2**6)
    folder = write(tmp_path / "run", 3)
    random = np.random.default_rng(1)
    names = sorted(path.name for path in folder.iterdir())
    chunks = [f"{file}.chunks" for file in files.ARRAYS]
    assert names == sorted(["SHA256SUMS", *files.ARRAYS, *chunks, "progress.json"])
    for name in names:
        whole_file = (folder / name).read_bytes()
        for bit in random.choice(8 * len(whole_file), 40, replace=False):
            flipped = bytearray(whole_file)
            flipped[bit // 8] ^= 1 << bit % 8
            (folder / name).write_bytes(flipped)
            with pytest.raises(Damaged):
                read(folder)
        longer_or_shorter = (whole_file[:-1], whole_file + b"0", whole_file + whole_file[-65:])
        for other in (None, b"", *(longer_or_shorter if name != "SHA256SUMS" else ())):
            (folder / name).unlink()
            if other is not None:
                (folder / name).write_bytes(other)
            with pytest.raises(Damaged, match=name.removesuffix(".chunks")):
                read(folder)
            (folder / name).write_bytes(whole_file)
    assert read(folder).keys() == STATE.keys()


def read(folder: Path) -> Arrays:
    files.read_numbers(folder)
    return files.read_arrays(folder, 2**20)


def test_a_chunk_that_is_damaged_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sums, shards):
        monkeypatch.setattr(module, "CHUNK_BYTES", 2**16)
    folder = write(tmp_path / "run", 2, state=LARGE)
    with (folder / "optimizer.safetensors").open("r+b") as file:
        file.seek(300_000)
        file.write(b"?")
    with pytest.raises(
        Damaged, match="optimizer.safetensors: bytes 262144 to 327680 do not have their checksum"
    ):
        read(folder)


def test_chunks_are_checked_by_hand(tmp_path: Path) -> None:
    """The two commands of docs/reliability.md, of files of 9 MB and of some bytes."""
    folder = write(tmp_path / "run", 2, state={"p.w": np.arange(9e6 / 8), "s.head.0": np.zeros(2)})
    done = subprocess.run(
        ["sha256sum", "-c", "SHA256SUMS"], cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        f"{name}: OK"
        for name in ("weights.safetensors.chunks", "optimizer.safetensors.chunks", "progress.json")
    ]
    for file in files.ARRAYS:
        command = f"split -b 4M --filter=sha256sum {file} | cut -c 1-64 | cmp - {file}.chunks"
        assert (
            subprocess.run(
                ["bash", "-o", "pipefail", "-c", command], cwd=folder, check=False
            ).returncode
            == 0
        ), command
    assert len((folder / "weights.safetensors.chunks").read_text().splitlines()) == 3


class SlowRank:
    """The clock of rank 0, 10 s further at each look, and a rank that writes until 1,500 s and
    tells so every 200 s, as long as `moves`.

    It reads until 1,700 s.
    """

    def __init__(self, run: Path, moves: bool) -> None:
        self._run = run
        self._moves = moves
        self.now_s = 0

    def __call__(self) -> float:
        self.now_s += 10
        with Folder.open(
            self._run, "checkpoints", files.unfinished_name(3, "0123456789abcdef")
        ) as folder:
            if self.now_s % 200 == 0 and self._moves:
                shards._tell_progress(folder, 1)
            if self.now_s == 1500:
                folder.replace(
                    "rank-00001.written", json.dumps({"sums": parts(1, 2).write(folder)}).encode()
                )
            if self.now_s == 1700:
                share = shards.ChunkShare(parts(1, 2).layout.sizes, 1, 2).read(folder, lambda: None)
                folder.replace(
                    "rank-00001.read",
                    json.dumps(
                        {"sums": [*share.sums.values()], "checksums": share.checksums}
                    ).encode(),
                )
        return float(self.now_s)


@pytest.mark.parametrize("moves", [True, False])
def test_a_rank_may_write_for_any_time_and_is_named_where_it_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: bool
) -> None:
    monkeypatch.setattr(shards, "LOOK_S", 0.0)
    run = tmp_path / "run"
    clock = SlowRank(tmp_path / "run", moves)
    run.mkdir()
    written = WrittenByAll(
        parts(0, 2), [1], ["n1", "n2"], files.unfinished_name(3, "0123456789abcdef"), clock=clock
    )
    if moves:
        moves = list[int]()
        found = files.write(run, NOW, written, IDENTITY, moved=lambda: moves.append(clock.now_s))
        assert (found / files.ARRAYS[1]).read_bytes() == (
            write(tmp_path / "one", 1) / files.ARRAYS[1]
        ).read_bytes()
        assert moves[:7] == [210, 410, 610, 810, 1010, 1210, 1410] and clock.now_s == 1700
    else:
        with pytest.raises(
            OSError,
            match="rank 1 on n2 has made no progress with its part for 300 s",
        ):
            files.write(run, NOW, written, IDENTITY)
        assert clock.now_s == 320  # its first look is at 10 s


def test_a_rank_tells_of_what_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_file, "SYNC_BYTES", 2**17)
    monkeypatch.setattr(shared_file, "PIECE_BYTES", 2**16)
    of_rank_0 = WrittenByAll(parts(0, 1, LARGE), [], ["n1"], "")
    synced = list[int]()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(handle) or fsync(handle))
    told = list[int]()
    with Folder.open(tmp_path) as folder:
        of_rank_0.prepare(folder)
        parts(0, 1, LARGE).write(folder, lambda: told.append(len(synced)))
    assert told == [1, 2, 4, 5, 6, 7, 8]  # 280 kB of weights and the end of their file; then 728 kB


def test_a_number_that_is_not_finite_is_found_on_the_rank_that_has_it(tmp_path: Path) -> None:
    bad = STATE | {"s.head.0": np.array([0.0, 1.0, np.inf])}
    with pytest.raises(Diverged, match="s.head.0 is not finite"):
        write(tmp_path / "run", 3, state=bad)


def test_a_part_that_nobody_waits_for_is_not_written(tmp_path: Path) -> None:
    write_parts(parts(1, 2), tmp_path, "absent", lambda: True)
    with Folder.open(tmp_path) as folder:
        assert folder.names() == []


@needs_mpirun
@pytest.mark.slow
def test_ranks_that_do_not_see_one_disk_gather_the_state_and_say_so(tmp_path: Path) -> None:
    """Each rank starts in a folder of its own, and run= is relative: rank 1 sees no run folder. The
    files are those of a shared one."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    words = (
        "model.name=mlp model.widths=[8] optim.base_lr=0.01 batch.size=64 epochs=1 "
        "comm.engine=mpi shard.stage=2 speed.precision=fp64"
    )
    start = (
        f"cd {tmp_path}/$OMPI_COMM_WORLD_RANK && exec {sys.executable} -m hvdtrain run=r {words}"
    )
    result = mpirun_of(["sh", "-c", start])
    assert result.returncode == 0, result
    assert (
        "rank 1 on " in result.stderr and "does not see the run folder r of rank 0" in result.stderr
    ), result.stderr
    assert not (tmp_path / "1" / "r" / "checkpoints").exists()
    shared = mpirun(2, ["-m", "hvdtrain", f"run={tmp_path}/shared", *words.split()])
    assert shared.returncode == 0 and "does not see" not in shared.stderr, shared
    for file in files.ARRAYS:
        newest = [
            files.finished(run)[-1] / file for run in (tmp_path / "0" / "r", tmp_path / "shared")
        ]
        assert newest[0].read_bytes() == newest[1].read_bytes()


def mpirun_of(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Two ranks of another program than Python."""
    environ = {**environment(), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [str(mpirun_path()), "-np", "2", *command],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        env=environ,
    )
