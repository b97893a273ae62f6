"""Images decoded in worker processes: the same bytes and the same errors as on threads, and no
process left behind."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from images_in_memory import EndsItsReader, InMemory, InThisProcess, pixels_of
from ranks import ROOT, environment
from small_images import check_workers, colour, save, save_jpegs
from waiting import wait_until

from hvdtrain.config.read import configure
from hvdtrain.errors import UserError
from hvdtrain.extras.image_files.data.datasets import folder
from hvdtrain.extras.image_files.decoded_files import pack
from hvdtrain.extras.image_files.image_source import ImageSource
from hvdtrain.training.datasets import open_datasets

IMAGES = 12
BROKEN = 7


def source_of(files: InMemory) -> ImageSource:
    return ImageSource(files, np.arange(len(files)) % 3, 3, (6, 5, 3), False, str)


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


@pytest.mark.in_turn
def test_worker_processes_decode_the_same_bytes(tmp_path: Path) -> None:
    save_jpegs(tmp_path / "train", IMAGES)
    threads = folder.build("folder", tmp_path, "train", size=16, packed=False)
    assert isinstance(threads, ImageSource)
    check_workers(threads, IMAGES)


@pytest.mark.in_turn
def test_a_damaged_image_is_the_same_error_and_the_next_read_goes_on() -> None:
    threads = source_of(InMemory(IMAGES, BROKEN))
    processes = threads.read_by(2)
    read = np.array([0, 6, 7, 8])
    found = error_of(lambda: processes.read(read))
    assert found == error_of(lambda: threads.read(read))
    assert (
        found
        == "the image cannot be read: UnidentifiedImageError: neither JPEG nor PNG, BMP, WebP, "
        "TIFF, GIF, PPM\n  where: image 7\n" + ("  fix: repair or remove the file")
    )
    np.testing.assert_array_equal(
        processes.read(np.array([8, 6]))["x"], np.stack([pixels_of(8), pixels_of(6)])
    )


@pytest.mark.in_turn
@pytest.mark.parametrize("padding", [0, 5000])
def test_many_images_are_packed_by_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, padding: int
) -> None:
    """Small and large ones: the files and their checksums are the same, also where a thread asks
    for several blocks; no process stays."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    images = source_of(InMemory(700, padding=padding))
    mine = Path(f"/proc/{os.getpid()}/task")
    before = started(mine)
    pack(images, tmp_path / "threads", 90 * 400)
    pack(images, tmp_path / "processes", 90 * 400, worth_workers=700)
    for name in ("images-00000-of-00002.npy", "images-00001-of-00002.npy"):
        for file in (name, f"{name}.xxh3"):
            assert (tmp_path / "threads" / file).read_bytes() == (
                tmp_path / "processes" / file
            ).read_bytes()
    assert started(mine) <= before
    broken = source_of(InMemory(700, broken=650))
    assert "where: image 650\n" in error_of(
        lambda: pack(broken, tmp_path / "broken", 90 * 400, worth_workers=1)
    )
    assert [path.name for path in (tmp_path / "broken").glob("*.npy")] == [
        "images-00000-of-00002.npy"
    ] and started(mine) <= before


def test_who_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads do where images are few, or there is one core, or no memory to share (macOS).

    These images tell by being readable in this process alone.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    local = source_of(InThisProcess(20))
    for size, images in {
        "small": local,
        "large": source_of(InThisProcess(20, padding=5000)),
    }.items():
        pack(images, tmp_path / f"{size}, few", worth_workers=21)
        pack(images, tmp_path / f"{size}, few by default")
        assert "cannot be sent to a worker process" in error_of(
            lambda images=images: pack(images, tmp_path / "many", worth_workers=20)
        )
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    pack(local, tmp_path / "one core", worth_workers=20)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.delattr(os, "memfd_create")
    pack(local, tmp_path / "macOS", worth_workers=20)


@pytest.mark.in_turn
def test_no_process_stays_where_workers_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    mine = Path(f"/proc/{os.getpid()}/task")
    before = started(mine)
    images = source_of(EndsItsReader(20, padding=5000))
    ended = "of packing ended by exit code 3 while it started"
    assert (
        ended in error_of(lambda: pack(images, tmp_path, worth_workers=20))
        and started(mine) <= before
    )
    assert not list(tmp_path.glob("images*"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes = source_of(InMemory(IMAGES)).read_by(2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 6, limits[1]))
    try:
        found = error_of(lambda: processes.read(np.arange(IMAGES)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (
        found.startswith("cannot start 2 worker processes of data.workers: [Errno 24]")
        and started(mine) <= before
    )
    np.testing.assert_array_equal(
        processes.read(np.array([8, 6]))["x"], np.stack([pixels_of(8), pixels_of(6)])
    )


KILLED = """
import os, sys
from pathlib import Path
sys.path[:0] = ["tests/extras", "tests/support"]
os.sched_getaffinity = lambda pid: {0, 1}
from images_in_memory import InMemory
from test_image_files_workers import source_of
from hvdtrain.extras.image_files.decoded_files import pack
pack(source_of(InMemory(3000, endless=1500)), Path(sys.argv[1]), worth_workers=1)
"""


@pytest.mark.in_turn
def test_a_killed_packing_leaves_no_process(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, env=environment()
    ) as packing:
        tasks = Path(f"/proc/{packing.pid}/task")
        workers: set[int] = set()
        # beside the thread of the process itself
        wait_until(lambda: workers.update(started(tasks)) or len(workers) == 1, "a worker")
        packing.send_signal(signal.SIGKILL)
    wait_until(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "the end of the workers"
    )


def started(tasks: Path) -> set[int]:
    return {int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()}


@pytest.mark.in_turn
def test_the_key_data_workers(tmp_path: Path) -> None:
    for split, place in (("train", 0), ("train", 1), ("val", 1)):
        save(tmp_path / split / "ant" / f"{place}.png", colour(place))
    words = [
        "data.name=folder",
        f"data.root={tmp_path}",
        f"data.cache={tmp_path / 'cache'}",
        "batch.size=1",
    ]
    with pytest.raises(
        UserError,
        match=r"data\.name=folder has its pixels in array files.*\n.*\n  fix: data\.packed=false, "
        r"or leave",
    ):
        open_datasets(configure(None, [*words[:3], "data.workers=1"]))
    for workers in (1, 0):
        chosen = [*words, "data.packed=false", f"data.workers={workers}"]
        for source in open_datasets(configure(None, chosen))[:2]:
            assert isinstance(source, ImageSource) and (source.workers is not None) == (
                workers == 1
            )
