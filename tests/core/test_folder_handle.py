"""Folder: nothing below it is opened, written or removed through a link, and nothing but regular
files is read."""

from __future__ import annotations

import os
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from hvdtrain.core.folder import Folder, WrongKind


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder with one file, both as they were when the test ends."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"precious")
    yield outside
    assert os.listdir(outside) == ["file"] and (outside / "file").read_bytes() == b"precious"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    return run


def make_socket(path: Path, outside: Path) -> None:
    with socket.socket(socket.AF_UNIX) as door:
        home = os.open(path.parent, os.O_RDONLY)  # the path itself may be too long for a socket
        door.bind(f"/proc/self/fd/{home}/{path.name}")
        os.close(home)


ODD: dict[str, Callable[[Path, Path], None]] = {
    "a link": lambda path, outside: path.symlink_to(outside / "file"),
    "a pipe": lambda path, outside: os.mkfifo(path),
    "a folder": lambda path, outside: path.mkdir(),
    "a socket": make_socket,
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("method", ["open_file", "append"])
def test_what_is_no_regular_file_is_neither_read_nor_appended_to(
    run: Path, outside: Path, kind: str, method: str
) -> None:
    ODD[kind](run / "name", outside)
    with Folder.open(run) as folder, pytest.raises(WrongKind) as refused:
        getattr(folder, method)("name")
    assert (refused.value.strerror, refused.value.filename) == (f"{kind}, not a file", "name")


@pytest.mark.parametrize("target", ["file", "new"])
def test_a_file_takes_the_place_of_a_link(run: Path, outside: Path, target: str) -> None:
    (run / "name").symlink_to(outside / target)
    with Folder.open(run) as folder:
        with pytest.raises(FileExistsError):
            folder.create("name")
        folder.replace("name", b"new")
    assert not (run / "name").is_symlink() and (run / "name").read_bytes() == b"new"
    assert os.listdir(run) == ["name"]


def test_a_folder_is_never_opened_through_a_link(run: Path, outside: Path) -> None:
    (run / "name").symlink_to(outside)
    with Folder.open(run) as folder:
        for method in (folder.folder, folder.make_folder):
            with pytest.raises(WrongKind, match="a link, not a folder"):
                method("name")
        folder.remove_tree("name")
        assert folder.names() == []


def test_links_inside_of_a_folder_that_is_removed_are_not_followed(
    run: Path, outside: Path
) -> None:
    (run / "a" / "b").mkdir(parents=True)
    (run / "a" / "b" / "link").symlink_to(outside)
    (run / "a" / "link").symlink_to(outside / "file")
    with Folder.open(run) as folder:
        with pytest.raises(IsADirectoryError):
            folder.remove("a")
        folder.remove_tree("a")
        assert folder.names() == []
        with pytest.raises(FileNotFoundError):
            folder.remove_tree("a")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "../outside/file", "a\0b"])
def test_a_name_is_one_part_of_a_path(run: Path, outside: Path, name: str) -> None:
    with Folder.open(run) as folder:
        calls = (
            folder.open_file,
            folder.create,
            folder.append,
            folder.folder,
            folder.make_folder,
            folder.remove,
            folder.remove_tree,
            folder.status,
        )
        for call in calls:
            with pytest.raises(ValueError, match="is not a name in a folder"):
                call(name)
        for names in ((name, "x"), ("x", name)):
            with pytest.raises(ValueError, match="is not a name in a folder"):
                folder.rename(*names)


def test_the_path_of_the_first_folder_may_be_a_link_and_folders_inside_not(
    run: Path, outside: Path, tmp_path: Path
) -> None:
    (run / "a").mkdir()
    (run / "a" / "file").write_bytes(b"inside")
    (tmp_path / "link").symlink_to(run)
    with Folder.open(tmp_path / "link", "a") as folder:
        assert folder.read("file", 6) == b"inside"
    (run / "b").symlink_to("a")
    with pytest.raises(WrongKind):
        Folder.open(run, "b")


def test_a_library_does_not_write_where_a_link_leads_out(run: Path, outside: Path) -> None:
    with Folder.make(run, "a", "b") as folder:
        (run / "a" / "inside").mkdir()
        (run / "a" / "latest").symlink_to("inside")
        (run / "a" / "inside" / "log").symlink_to(outside / "file")
    with Folder.open(run, "a") as folder:
        folder.refuse_links(below=False)
        with pytest.raises(WrongKind, match=r"a link, not a file or folder: '.*/a/inside/log'"):
            folder.refuse_links()
        (run / "a" / "inside" / "log").unlink()
        folder.refuse_links()
        os.mkfifo(run / "a" / "inside" / "log")
        with pytest.raises(WrongKind, match="a pipe, not a file or folder"):
            folder.refuse_links()


def test_a_file_with_a_second_name_is_copied_before_it_grows(run: Path, outside: Path) -> None:
    os.link(outside / "file", run / "name")
    with Folder.open(run) as folder, folder.append("name") as file:
        file.write(b" and more")
    assert (run / "name").read_bytes() == b"precious and more"


def test_a_write_that_fails_leaves_everything_as_it_was(run: Path) -> None:
    (run / "name").write_bytes(b"old")
    with Folder.open(run) as folder, pytest.raises(KeyError), folder.replacing("name") as file:
        file.write(b"new")
        raise KeyError
    assert (os.listdir(run), (run / "name").read_bytes()) == (["name"], b"old")


def test_a_small_file_takes_little_memory_whatever_its_limit(run: Path) -> None:
    """1 GiB was allocated for the report of a rank with its part of a checkpoint, which then did
    not fit under ulimit -d."""
    (run / "name").write_bytes(bytes(3_000_000))
    with Folder.open(run) as folder:
        tracemalloc.start()
        try:
            assert len(folder.read("name", 2**30)) == 3_000_000
            assert tracemalloc.get_traced_memory()[1] < 12_000_000
        finally:
            tracemalloc.stop()


def test_more_than_the_limit_is_not_read(run: Path) -> None:
    with (run / "name").open("wb") as file:
        file.truncate(2**40)  # sparse: no disk, and more than any memory
    with Folder.open(run) as folder, pytest.raises(ValueError, match="more than 100 bytes"):
        folder.read("name", 100)


def test_no_handle_stays_open(run: Path, outside: Path) -> None:
    ODD["a link"](run / "link", outside)
    (run / "a").mkdir()
    before = os.listdir("/proc/self/fd")
    for inside in ((), ("a",), ("a", "b"), ("link",)):
        try:
            with Folder.open(run, *inside) as folder:
                folder.replace("x", b"x")
                folder.read("x", 1)
                folder.append("../x")
        except (OSError, ValueError):
            pass
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_name_that_changes_while_it_is_used_leads_nowhere_else(
    run: Path, outside: Path, what: str
) -> None:
    """A thread swaps the name for a link and back, at least 100 uses succeed, and 100 are
    refused."""
    (run / "name").mkdir() if what == "folder" else (run / "name").write_bytes(b"inside")
    (run / "link").symlink_to(outside if what == "folder" else outside / "file")
    stop = threading.Event()
    random = Random(1)

    def swap() -> None:
        while not stop.is_set():
            for old, new in (
                ("name", "kept"),
                ("link", "name"),
                ("name", "link"),
                ("kept", "name"),
            ):
                os.rename(run / old, run / new)
                time.sleep(random.random() / 5000 if new == "name" else 0)

    thread = threading.Thread(target=swap)
    thread.start()
    done = refused = 0
    end_s = time.monotonic() + 300
    try:
        with Folder.open(run) as folder:
            while min(done, refused) < 100 and time.monotonic() < end_s:
                try:
                    if what == "folder":
                        with folder.folder("name") as inner:
                            inner.replace("file", b"x")
                    else:
                        assert folder.read("name", 99) != b"precious"
                        with folder.append("name") as file:
                            file.write(b"")
                    done += 1
                except OSError:
                    refused += 1
    finally:
        stop.set()
        thread.join()
    assert min(done, refused) == 100, (done, refused)
