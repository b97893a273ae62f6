"""A folder by its handle. Names in it are opened, written and removed relative to the handle, never
through a link, and only as regular files."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# a pipe is opened without waiting for its other end, then rejected
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
}
NO_LINKS = (
    "hvdtrain makes no links, pipes or devices: do not trust this folder; if it is yours, "
    "replace the link by its target"
)
_PIECE_BYTES = 2**20  # bytes to read at a time
UNFINISHED = (
    ".unfinished"  # the last part of the name of a file that does not have its own name yet
)


class WrongKind(OSError):
    """Raised for a link, a pipe, a device or a socket instead of a file or a folder; strerror says
    which."""


class Folder:
    """An open folder. The path that opens it may contain links; below it no link is followed.

    A name is one part of a path; a name with a slash raises ValueError. All methods raise OSError,
    and WrongKind for anything but a regular file or a folder of this one. Close it, or use it in a
    `with`.
    """

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path  # for messages
        self._handle = handle

    @classmethod
    def open(cls, path: Path, *inside: str) -> Self:
        """Opens the folder at a path, or a folder in it: Folder.open(run, "checkpoints",
        "step-00000120")."""
        folder = cls(path, os.open(path, _FOLDER))
        for name in inside:
            with folder:
                folder = folder.folder(name)
        return folder

    @classmethod
    def make(cls, path: Path, *inside: str) -> Self:
        """Opens a folder; creates it and the folders on its path if they do not exist."""
        path.mkdir(parents=True, exist_ok=True)
        folder = cls.open(path)
        for name in inside:
            with folder:
                folder = folder.make_folder(name)
        return folder

    def again(self) -> Self:
        """Returns a second handle of this folder, wherever its path leads now."""
        return type(self)(self.path, os.open(".", _FOLDER, dir_fd=self._handle))

    def folder(self, name: str) -> Self:
        self._check(name, stat.S_IFDIR)
        return type(self)(
            self.path / name, os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=self._handle)
        )

    def make_folder(self, name: str, *, new: bool = False) -> Self:
        """Opens the folder of this name, and creates it if it does not exist. new: raises
        FileExistsError if it exists."""
        try:
            os.mkdir(_one_part(name), dir_fd=self._handle)
        except FileExistsError:
            if new:
                raise
        return self.folder(name)

    def names(self) -> list[str]:
        return sorted(os.listdir(self._handle))

    def status(self, name: str) -> os.stat_result | None:
        """Returns the status of a name, not of a link's target; None if it does not exist."""
        try:
            return os.stat(_one_part(name), dir_fd=self._handle, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def open_file(self, name: str) -> io.BufferedReader:
        """Opens a file for reading. It reads the current file, even if another one takes its name
        later."""
        # checked before it is opened, because opening may affect a device
        self._check(name, stat.S_IFREG)
        return io.BufferedReader(self._regular(name, os.O_RDONLY, "rb"))

    def read(self, name: str, most_bytes: int) -> bytes:
        """Reads the whole file. Raises ValueError if it is larger than most_bytes."""
        # in pieces, because a file object allocates everything that is requested
        data = bytearray()
        with self.open_file(name) as file:
            while len(data) <= most_bytes and (
                piece := file.read(min(_PIECE_BYTES, most_bytes + 1 - len(data)))
            ):
                data += piece
        if len(data) > most_bytes:
            raise ValueError(f"more than {most_bytes} bytes")
        return bytes(data)

    def create(self, name: str) -> io.BufferedWriter:
        """Creates a file for writing. Raises FileExistsError."""
        return io.BufferedWriter(self._regular(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, "wb"))

    def append(self, name: str) -> io.FileIO:
        """Opens a file for appending, unbuffered; creates it if it does not exist. A file with a
        second name (a hard link) is copied first."""
        status = self.status(name)
        if status is not None:
            self._check(name, stat.S_IFREG)
            if status.st_nlink > 1:
                with self.open_file(name) as old, self.replacing(name) as new:
                    shutil.copyfileobj(old, new, 2**20)
        return self._regular(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, "ab")

    def update(self, name: str) -> io.FileIO:
        """Opens a file for reading and writing in place, unbuffered."""
        self._check(name, stat.S_IFREG)
        return self._regular(name, os.O_RDWR, "r+b")

    def overwrite(self, name: str) -> io.FileIO:
        """Opens a file only for writing in place, unbuffered, so that an NFS client does not read a
        page before it writes a part of it."""
        self._check(name, stat.S_IFREG)
        return self._regular(name, os.O_WRONLY, "wb")

    def try_to_write(self) -> None:
        """Raises OSError if no file can be created here."""
        name = f".try.{secrets.token_hex(8)}{UNFINISHED}"
        self.create(name).close()
        self.remove(name)

    @contextmanager
    def replacing(self, name: str) -> Iterator[io.BufferedWriter]:
        """Creates a new file, which takes the name once the block ends and it is on disk. If the
        block raises, nothing changes."""
        self.status(name)  # raises before anything is written, if the file system rejects the name
        unfinished = f".{name[:100]}.{secrets.token_hex(8)}{UNFINISHED}"
        file = self.create(unfinished)
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            self.rename(unfinished, name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished, dir_fd=self._handle)
            raise
        self.sync()

    def replace(self, name: str, data: bytes) -> None:
        with self.replacing(name) as file:
            file.write(data)

    def rename(self, name: str, new_name: str) -> None:
        """Renames a name; links themselves are renamed and replaced, not their targets."""
        os.rename(
            _one_part(name), _one_part(new_name), src_dir_fd=self._handle, dst_dir_fd=self._handle
        )

    def remove(self, name: str) -> None:
        """Removes a file, or a link itself. Raises IsADirectoryError for a folder."""
        os.unlink(_one_part(name), dir_fd=self._handle)

    def remove_tree(self, name: str) -> None:
        """Removes a file, a folder with its content, or a link itself."""
        status = os.stat(_one_part(name), dir_fd=self._handle, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            shutil.rmtree(name, dir_fd=self._handle)
        else:
            os.unlink(name, dir_fd=self._handle)

    def refuse_links(self, *, below: bool = True) -> None:
        """Raises WrongKind for a link that leads out of this folder, a pipe or a device, here and
        `below`: before a library writes here."""
        top = os.path.realpath(self.path)
        for where, folders, files in os.walk(self.path):
            for name in (*folders, *files):
                path = os.path.join(where, name)
                mode = os.lstat(path).st_mode
                leads_out = stat.S_ISLNK(mode) and not os.path.realpath(path).startswith(f"{top}/")
                if leads_out or not (
                    stat.S_ISLNK(mode) or stat.S_ISREG(mode) or stat.S_ISDIR(mode)
                ):
                    raise WrongKind(
                        errno.EINVAL,
                        f"{_KINDS.get(stat.S_IFMT(mode), 'of an unknown kind')}, not a file or "
                        "folder",
                        path,
                    )
            if not below:
                break

    def is_at(self, path: Path) -> bool:
        """Whether the path now leads to this folder."""
        return os.path.samestat(os.stat(path), os.fstat(self._handle))

    def path_now(self) -> Path | None:
        """Returns the current path of this folder, as the system reports it; None if it was deleted
        or is unknown."""
        with contextlib.suppress(OSError):
            path = Path(os.readlink(f"/proc/self/fd/{self._handle}"))
            return path if self.is_at(path) else None
        return None

    def sync(self) -> None:
        """Waits until the names in this folder are on disk."""
        os.fsync(self._handle)

    def close(self) -> None:
        handle = self._handle
        self._handle = -1
        if handle >= 0:
            os.close(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check(self, name: str, kind: int) -> None:
        """Raises WrongKind if a name is not of this kind, and FileNotFoundError."""
        _check_kind(
            os.stat(_one_part(name), dir_fd=self._handle, follow_symlinks=False).st_mode, kind, name
        )

    def _regular(self, name: str, flags: int, mode: str) -> io.FileIO:
        handle = os.open(_one_part(name), flags | _FILE, 0o666, dir_fd=self._handle)
        try:
            _check_kind(os.fstat(handle).st_mode, stat.S_IFREG, name)
            return io.FileIO(handle, mode)
        except BaseException:
            os.close(handle)
            raise


def check_regular(path: Path) -> os.stat_result:
    """Returns the status of a file; links are followed. Raises OSError, and WrongKind for a pipe or
    a device, which may never end."""
    status = path.stat()
    _check_kind(status.st_mode, stat.S_IFREG, str(path))
    return status


def _check_kind(mode: int, kind: int, name: str) -> None:
    if stat.S_IFMT(mode) != kind:
        found = _KINDS.get(stat.S_IFMT(mode), "of an unknown kind")
        raise WrongKind(errno.EINVAL, f"{found}, not {_KINDS[kind]}", name)


def _one_part(name: str) -> str:
    """Returns the name. Raises ValueError if it leads to another folder."""
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise ValueError(f"{name!r:.100} is not a name in a folder")
    return name


def put_in_place(unfinished: Path, to: Path) -> None:
    """Renames a complete file or folder to its name. What has the name is removed afterwards; after
    an error it still has it. Raises OSError."""
    if not os.path.isdir(to) or os.path.islink(to):
        unfinished.replace(to)
        return
    former = to.with_name(f".{to.name}.former-{os.getpid()}")
    to.rename(former)
    try:
        unfinished.rename(to)
    except OSError:
        former.rename(to)
        raise
    shutil.rmtree(former)
