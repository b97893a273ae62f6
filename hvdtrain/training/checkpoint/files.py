"""The files of a checkpoint: arrays as safetensors, numbers as JSON, a checksum for each; complete
or absent, never a pickle.

An array file that several ranks wrote has a checksum for each chunk in a separate file, whose own
checksum is in SHA256SUMS.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.core.arrays import Arrays
from hvdtrain.core.folder import NO_LINKS, UNFINISHED, Folder, WrongKind
from hvdtrain.errors import UserError
from hvdtrain.training.checkpoint.array_file import (
    MOST_HEADER_BYTES,
    PIECE_BYTES,
    map_arrays,
    write_arrays,
)
from hvdtrain.training.checkpoint.shards import WrittenByAll
from hvdtrain.training.checkpoint.shared_file import SYNC_BYTES
from hvdtrain.training.checkpoint.sums import (
    LINE_BYTES,
    as_text,
    check_chunks,
    count_chunks,
    sums_of,
)
from hvdtrain.training.progress.train_state import TrainState, from_json, to_json

FORMAT = 4
ARRAYS = ("weights.safetensors", "optimizer.safetensors")
# `sha256sum -c SHA256SUMS` in the folder checks it too
PROGRESS = "progress.json"
CHECKSUMS = "SHA256SUMS"
# What reading a damaged or foreign file may raise.
PARSE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
ASIDE = (
    ".replaced"  # suffix of a checkpoint that is about to be replaced by a new one of the same step
)
_WRONG = "its checksum is not the one in SHA256SUMS"
_PROGRESS_BYTES = 2**26  # limit for progress.json, enough for the names of some 500,000 parameters

OpenFolder = Callable[[Path], Folder]  # RunLock.open, or Folder.open without a lock
# values that must not change within a job, as JSON: the seed, and facts about the data set
Identity = dict[str, Any]


class Checkpoint(NamedTuple):
    folder: Path
    train_state: TrainState
    identity: Identity
    # as Learner.state_dict_names(); empty if they differ only by "p." and "b."
    names: dict[str, str]


class Damaged(UserError):
    """Raised if a checkpoint differs from what was written."""


def write(
    run: Path,
    train_state: TrainState,
    arrays: Arrays | WrittenByAll,
    identity: Identity,
    names: dict[str, str] | None = None,
    open_run: OpenFolder = Folder.open,
    moved: Callable[[], None] = lambda: None,
) -> Path:
    """Writes checkpoints/step-00000120/ of an existing run folder; returns it. Raises OSError if
    that fails, and then leaves no files.

    moved: called as more of it reaches the disk. The checkpoint is complete or absent even after a
    power failure, because every file and both folders are synced before and after the rename. Two
    writers of one step never mix their files, because each writes to a separate folder.
    """
    numbers = {
        "format": FORMAT,
        "identity": identity,
        "names": names or {},
        "train_state": to_json(train_state),
    }
    name = name_of(train_state.progress.step)
    unfinished = unfinished_name(train_state.progress.step, secrets.token_hex(8))
    with open_run(run) as folder:
        checkpoints = _checkpoints_to_write(folder)
    with checkpoints:
        remove_leftovers_from(checkpoints)
        try:
            with checkpoints.make_folder(unfinished, new=True) as new:
                if isinstance(arrays, WrittenByAll):
                    arrays.prepare(new)
                    checkpoints.rename(unfinished, arrays.unfinished)
                    unfinished = arrays.unfinished
                _write_files(new, arrays, numbers, moved)
                new.sync()
            _give_name(checkpoints, unfinished, name)
        except BaseException:
            remove_from(checkpoints, unfinished)  # a full disk gets its room back
            raise
        checkpoints.sync()
        remove_from(checkpoints, f"{name}{ASIDE}")
    return run / "checkpoints" / name


def _checkpoints_to_write(folder: Folder) -> Folder:
    new = folder.status("checkpoints") is None
    checkpoints = folder.make_folder("checkpoints")
    if new:
        folder.sync()
        with Folder.open(folder.path.parent) as parent:
            parent.sync()
    return checkpoints


def _give_name(checkpoints: Folder, unfinished: str, name: str) -> None:
    """Renames the new checkpoint. An existing one of this name, damaged or from before the step's
    evaluation, stays valid until the new one is in place."""
    if checkpoints.status(name) is not None:
        remove_from(checkpoints, f"{name}{ASIDE}")
        with contextlib.suppress(FileNotFoundError):  # another job has just moved it
            checkpoints.rename(name, f"{name}{ASIDE}")
    checkpoints.rename(unfinished, name)


def unfinished_name(step: int, token: str) -> str:
    """Returns name of the folder of a checkpoint while it is written."""
    return f".{name_of(step)}.{token}{UNFINISHED}"


def file_of(name: str) -> str:
    """Returns the file that contains an array."""
    return ARRAYS[name.startswith("s.")]


def _write_files(
    folder: Folder,
    arrays: Arrays | WrittenByAll,
    numbers: dict[str, Any],
    moved: Callable[[], None],
) -> None:
    """Writes and syncs each file; its checksum is computed from the bytes in memory."""
    text = (json.dumps(numbers, indent=2, allow_nan=False) + "\n").encode()
    if len(text) > _PROGRESS_BYTES:
        raise ValueError(
            f"{PROGRESS} would have {len(text)} bytes, but at most {_PROGRESS_BYTES} are read"
        )
    small = {PROGRESS: text}
    checksums = dict[str, str]()
    if isinstance(arrays, WrittenByAll):
        small = {
            sums_of(name): as_text(chunks).encode()
            for name, chunks in arrays.fill(folder, moved).items()
        } | small
    else:
        for name in ARRAYS:
            of_file = {n: array for n, array in arrays.items() if file_of(n) == name}
            with folder.create(name) as file:
                checksums[name] = write_arrays(file, of_file, on_piece=_Syncing(file, moved))
                _sync(file)
    checksums |= {name: hashlib.sha256(data).hexdigest() for name, data in small.items()}
    small[CHECKSUMS] = "".join(
        f"{checksum}  {name}\n" for name, checksum in checksums.items()
    ).encode()
    for name, data in small.items():
        with folder.create(name) as file:
            file.write(data)
            _sync(file)


class _Syncing:
    """Syncs a file to disk after every SYNC_BYTES written."""

    def __init__(self, file: BufferedWriter, moved: Callable[[], None]) -> None:
        self._file = file
        self._moved = moved
        self._unsynced_bytes = 0

    def __call__(self, nbytes: int) -> None:
        self._unsynced_bytes += nbytes
        if self._unsynced_bytes >= SYNC_BYTES:
            _sync(self._file)
            self._unsynced_bytes = 0
            self._moved()


def _sync(file: BufferedWriter) -> None:
    file.flush()
    os.fsync(file.fileno())


def read_numbers(folder: Path) -> Checkpoint:
    """Returns the numbers of a checkpoint; its arrays are neither read nor checked. Raises Damaged
    if they cannot be read."""
    try:
        with open_checkpoint(folder) as files:
            tree = json.loads(files.read(PROGRESS, _PROGRESS_BYTES).decode())
        if tree["format"] != FORMAT:
            raise ValueError(f"format {tree['format']!r:.40}, this version reads {FORMAT}")
        if not all(isinstance(tree[key], dict) for key in ("identity", "names")):
            raise TypeError("identity or names are not a mapping")
        if not all(isinstance(name, str) for name in tree["names"].values()):
            raise TypeError("names are not strings")
        return Checkpoint(folder, from_json(tree["train_state"]), tree["identity"], tree["names"])
    except (OSError, *PARSE_ERRORS) as error:
        raise damaged(folder, PROGRESS, error) from None


def read_arrays(
    folder: Path,
    limit_bytes: int,
    names: Sequence[str] = ARRAYS,
    *,
    mapped: bool = False,
    on_piece: Callable[[], None] = lambda: None,
) -> Arrays:
    """Reads the arrays of these files. mapped: maps them from disk, so that each takes memory only
    while it is used.

    on_piece: called after each piece is read and checked.

    Raises Damaged if the checksum of a file is wrong, or if a file has more than limit_bytes.
    """
    name = CHECKSUMS
    arrays: Arrays = {}
    try:
        with open_checkpoint(folder) as files:
            checksums = parse_checksums(read_checksums(files))
            for name in (*ARRAYS, PROGRESS):
                with files.open_file(name) as file:
                    check_length(
                        file,
                        _PROGRESS_BYTES if name == PROGRESS else limit_bytes,
                        has_header=name != PROGRESS,
                    )
                    if name not in checksums and sums_of(name) in checksums:
                        check_chunks(
                            file, read_chunk_sums(files, file, sums_of(name), checksums), on_piece
                        )
                    elif checksums.get(name) != _checksum(file, on_piece):
                        raise ValueError(_WRONG)
                    if name in names:
                        arrays |= map_arrays(file) if mapped else _load(file)
    except (OSError, *PARSE_ERRORS) as error:
        raise damaged(folder, name, error) from None
    return arrays


def read_checksums(files: Folder) -> bytes:
    """Returns the content of SHA256SUMS. Raises OSError, and ValueError if it is too large."""
    return files.read(CHECKSUMS, _PROGRESS_BYTES)


def parse_checksums(text: bytes) -> dict[str, str]:
    """Returns the SHA-256 of each file that SHA256SUMS names."""
    lines = (line.partition("  ") for line in text.decode().splitlines())
    return {file: checksum for checksum, _, file in lines}


def check_progress(files: Folder, checksums: Mapping[str, str]) -> None:
    """Raises ValueError if progress.json has changed since it was written, OSError if it cannot be
    read."""
    if checksums.get(PROGRESS) != hashlib.sha256(files.read(PROGRESS, _PROGRESS_BYTES)).hexdigest():
        raise ValueError(_WRONG)


def read_chunk_sums(
    files: Folder, file: BufferedReader, name: str, checksums: Mapping[str, str]
) -> str:
    """Reads the text file `name`, with a line for each chunk of a file. Raises ValueError if the
    file has changed since it was written."""
    data = files.read(name, LINE_BYTES * count_chunks(os.fstat(file.fileno()).st_size))
    if checksums[name] != hashlib.sha256(data).hexdigest():
        raise ValueError(f"the checksum of {name} is not the one in SHA256SUMS")
    return data.decode()


def _checksum(file: BufferedReader, on_piece: Callable[[], None]) -> str:
    """Returns the checksum of the rest of a file."""
    checksum = hashlib.sha256()
    buffer = memoryview(bytearray(PIECE_BYTES))
    while count := file.readinto(buffer):
        checksum.update(buffer[:count])
        on_piece()
    return checksum.hexdigest()


def _load(file: BufferedReader) -> Arrays:
    """Reads the arrays of the checked file into new memory, even if its name now belongs to another
    file. Uses the open file, which does not need /proc."""
    return {name: np.array(array) for name, array in map_arrays(file).items()}


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def finished(run: Path) -> list[Path]:
    """Returns the folders of complete checkpoints, by step. Raises UserError if they cannot be
    listed."""
    try:
        with Folder.open(run, "checkpoints") as checkpoints:
            found = {
                name
                for name in checkpoints.names()
                if name.startswith("step-") and _number(name).isdecimal()
            }
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        fix = NO_LINKS if isinstance(error, WrongKind) else "give a run folder that can be read"
        raise UserError(
            f"cannot read the checkpoints: {error.strerror or error}", str(run / "checkpoints"), fix
        ) from None
    alone = [
        name for name in found if not name.endswith(ASIDE) or name.removesuffix(ASIDE) not in found
    ]
    return [
        run / "checkpoints" / name for name in sorted(alone, key=lambda name: int(_number(name)))
    ]


def _number(name: str) -> str:
    return name.removeprefix("step-").removesuffix(ASIDE)


def remove_leftovers_from(checkpoints: Folder) -> None:
    """Removes what interrupted writes and removals left. A checkpoint that was about to be replaced
    is kept if there is no new one."""
    names = set(checkpoints.names())
    for name in names:
        if name.startswith(".step-") or (
            name.endswith(ASIDE) and name.removesuffix(ASIDE) in names
        ):
            remove_from(checkpoints, name)


def remove(folder: Path) -> None:
    """Removes a checkpoint. Raises OSError if its run folder cannot be opened."""
    with Folder.open(folder.parent.parent, folder.parent.name) as checkpoints:
        remove_from(checkpoints, folder.name)


def remove_leftovers(run: Path) -> None:
    """Removes what interrupted writes left in this job's run folder."""
    with contextlib.suppress(OSError), Folder.open(run, "checkpoints") as checkpoints:
        remove_leftovers_from(checkpoints)


def remove_from(checkpoints: Folder, name: str) -> None:
    """Removes a folder, renaming it first, because a half-removed checkpoint must not look
    complete. Files that cannot be removed are left for the next time."""
    hidden = f".{name.lstrip('.')}.{secrets.token_hex(8)}.removed"
    with contextlib.suppress(OSError):
        checkpoints.rename(name, hidden)
        checkpoints.remove_tree(hidden)


def open_checkpoint(folder: Path) -> Folder:
    """Opens a checkpoint's folder; only the path of its run may contain links."""
    return Folder.open(folder.parent.parent, folder.parent.name, folder.name)


def check_length(file: BufferedReader, most_bytes: int, has_header: bool) -> None:
    """Raises ValueError for a file that is too large, or whose length contradicts its header,
    before all of it is read."""
    size = os.fstat(file.fileno()).st_size
    if size > most_bytes:
        raise ValueError(
            f"it has {size} bytes, but this model and optimizer have at most {most_bytes}"
        )
    if not has_header:
        return
    length = int.from_bytes(file.read(8), "little")
    # bounded by the file; a parsed header may take 20 times its bytes
    raw_header = file.read(min(length, MOST_HEADER_BYTES))
    file.seek(0)
    try:
        header = json.loads(raw_header)
    except ValueError:
        raise ValueError("it has no safetensors header") from None
    ends = [array["data_offsets"][1] for name, array in header.items() if name != "__metadata__"]
    if size != 8 + length + max(ends, default=0):
        raise ValueError("its length differs from the one in its header")


@contextlib.contextmanager
def naming(folder: Path, name: str) -> Iterator[None]:
    """Converts errors of reading the file `name` of a checkpoint to Damaged."""
    try:
        yield
    except (OSError, *PARSE_ERRORS) as error:
        raise damaged(folder, name, error) from None


def damaged(folder: Path, name: str, error: Exception) -> Damaged:
    kind = (
        ""
        if isinstance(error, (OSError, ValueError)) and str(error)
        else f"{type(error).__name__}: "
    )
    what = error.strerror if isinstance(error, OSError) and error.strerror else f"{kind}{error}"
    return Damaged(
        f"the checkpoint is damaged: {name}: {what}",
        str(folder),
        "use the previous checkpoint, or another run folder",
    )
