"""The files of a checkpoint: arrays as safetensors, numbers as JSON, a checksum for each; complete or absent, never a pickle."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import stat
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.core.arrays import Arrays
from hvdtrain.errors import UserError
from hvdtrain.training.progress.train_state import TrainState, from_json, to_json

FORMAT = 3
ARRAYS = ("weights.safetensors", "optimizer.safetensors")
PROGRESS, CHECKSUMS = "progress.json", "SHA256SUMS"  # `sha256sum -c SHA256SUMS` in the folder checks it too
# What reading a damaged or foreign file may raise.
_PARSE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
_HEADER_BYTES = 10**8  # safetensors' own limit
ASIDE = ".replaced"  # behind the name of a checkpoint that a new one of its step is about to replace
_PROGRESS_BYTES = 2**22  # a progress.json of hvdtrain is smaller

Identity = dict[str, Any]  # what must not change within a job: the seed, and what is known of the data set; JSON


class Checkpoint(NamedTuple):
    folder: Path
    train_state: TrainState
    identity: Identity
    names: dict[str, str]  # as Learner.state_dict_names(); empty where "p." and "b." are all that differs


class Damaged(UserError):
    """A checkpoint is not as it was written."""


def write(run: Path, train_state: TrainState, arrays: Arrays, identity: Identity, names: dict[str, str] | None = None) -> Path:
    """Writes checkpoints/step-00000120/, and returns it. Raises OSError where it cannot; nothing of it stays then.

    Complete or absent, also when the machine loses its power: every file, and both folders, are synced before and after the rename.
    """
    folder = run / "checkpoints" / name_of(train_state.progress.step)
    unfinished, aside = folder.with_name(f".{folder.name}.unfinished"), folder.with_name(f"{folder.name}{ASIDE}")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        if not folder.parent.exists():
            folder.parent.mkdir(parents=True)
            sync(run)
            sync(run.parent)
        unfinished.mkdir()
        numbers = {"format": FORMAT, "identity": identity, "names": names or {}, "train_state": to_json(train_state)}
        _write_files(unfinished, arrays, numbers)
        for name in (*ARRAYS, PROGRESS, CHECKSUMS):
            sync(unfinished / name)
        sync(unfinished)
        if folder.exists():  # damaged, or of the same step before its evaluation: until the new one is there it counts, under this name
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(folder, aside)
        os.rename(unfinished, folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)  # a full disk gets its room back
        raise
    sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)
    return folder


def _write_files(folder: Path, arrays: Arrays, numbers: dict[str, Any]) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    optimizer_state = {name: array for name, array in arrays.items() if name.startswith("s.")}
    try:
        save_file({name: array for name, array in arrays.items() if name not in optimizer_state}, folder / ARRAYS[0])
        save_file(optimizer_state, folder / ARRAYS[1])
    except SafetensorError as error:  # its form of an OSError
        raise OSError(str(error)) from error
    (folder / PROGRESS).write_text(json.dumps(numbers, indent=2, allow_nan=False) + "\n")
    for name in ARRAYS:  # safetensors lets only the owner read them; a group shares its runs
        (folder / name).chmod((folder / PROGRESS).stat().st_mode)
    sums = [f"{_checksum(folder / name)}  {name}\n" for name in (*ARRAYS, PROGRESS)]
    (folder / CHECKSUMS).write_text("".join(sums))


def sync(path: Path) -> None:
    """Returns when a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_numbers(folder: Path) -> Checkpoint:
    """The numbers of a checkpoint; its arrays are neither read nor checked. Raises Damaged where they cannot be read."""
    try:
        tree = json.loads(_read_numbers_text(folder / PROGRESS))
        if tree["format"] != FORMAT:
            raise ValueError(f"format {tree['format']!r:.40}, this version reads {FORMAT}")
        if not all(isinstance(tree[key], dict) for key in ("identity", "names")):
            raise TypeError("identity or names are no mapping")
        if not all(isinstance(name, str) for name in tree["names"].values()):
            raise TypeError("names are no strings")
        return Checkpoint(folder, from_json(tree["train_state"]), tree["identity"], tree["names"])
    except (OSError, *_PARSE_ERRORS) as error:
        raise _damaged(folder, PROGRESS, error) from None


def read_arrays(folder: Path, limit_bytes: int, names: Sequence[str] = ARRAYS) -> Arrays:
    """The arrays of these files. Raises Damaged where the checksum of a file is wrong, or one has more than limit_bytes."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    name = CHECKSUMS
    try:
        lines = (line.partition("  ") for line in _read_numbers_text(folder / CHECKSUMS).splitlines())
        checksums = {file: checksum for checksum, _, file in lines}
        for name in (*ARRAYS, PROGRESS):
            size = (folder / name).stat().st_size
            most = _PROGRESS_BYTES if name == PROGRESS else limit_bytes
            if size > most:
                raise ValueError(f"{size} bytes, where this model and optimizer have at most {most}")
            if name != PROGRESS:
                _check_length(folder / name, size)
            if checksums.get(name) != _checksum(folder / name):
                raise ValueError("its checksum is not the one in SHA256SUMS")
        arrays: Arrays = {}
        for name in names:
            arrays |= load_file(folder / name)
    except (OSError, *_PARSE_ERRORS, SafetensorError) as error:
        raise _damaged(folder, name, error) from None
    return arrays


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def finished(run: Path) -> list[Path]:
    """Folders of checkpoints, by step; each was complete when it was written."""
    found = {path.name: path for path in (run / "checkpoints").glob("step-*") if _number(path.name).isdecimal()}
    alone = [path for name, path in found.items() if not name.endswith(ASIDE) or name.removesuffix(ASIDE) not in found]
    return sorted(alone, key=lambda path: int(_number(path.name)))


def _number(name: str) -> str:
    return name.removeprefix("step-").removesuffix(ASIDE)


def prune(run: Path, keep_last: int, keep_best: int, written: Path) -> None:
    """Removes all but the newest, the best and the one that was just written, and the leftovers of writes that were cut off."""
    folders = finished(run)
    older = folders[: folders.index(written) + 1]  # newer ones are damaged: the job went on from one before them
    keep = {*older[-keep_last:], *_best(folders, keep_best)}
    every = (run / "checkpoints").glob
    for left in {*every(".step-*"), *every(f"step-*{ASIDE}")} - {*folders}:
        shutil.rmtree(left, ignore_errors=True)
    for folder in older:
        if folder not in keep:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Under another name first: a half-removed checkpoint must not look like one."""
    hidden = folder.with_name(f".{folder.name}.removed")
    os.rename(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _best(folders: list[Path], count: int) -> list[Path]:
    """Those with the highest validation accuracies, the earlier first among equals; only where one was just evaluated."""
    rated = []
    for folder in folders if count else ():
        try:
            train_state = read_numbers(folder).train_state
        except Damaged:
            continue
        if train_state.evaluated == train_state.progress.step and not math.isnan(train_state.accuracy):
            rated.append((-train_state.accuracy, train_state.progress.step, folder))
    return [folder for _, _, folder in sorted(rated)[:count]]


def _checksum(path: Path) -> str:
    with _open(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_length(path: Path, size: int) -> None:
    """Raises ValueError for a safetensors file that is longer or shorter than its header says, before all of it is read."""
    with _open(path) as file:
        length = int.from_bytes(file.read(8), "little")
        raw_header = file.read(min(length, _HEADER_BYTES))
    try:
        header = json.loads(raw_header)
    except ValueError:
        raise ValueError("it has no header of safetensors") from None
    ends = [array["data_offsets"][1] for name, array in header.items() if name != "__metadata__"]
    if size != 8 + length + max(ends, default=0):
        raise ValueError("its length is not the one that its header gives")


def _open(path: Path) -> BufferedReader:
    """Opens a plain file; a pipe or a device may have no end. Raises ValueError for these."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("not a plain file")
    return path.open("rb")


def _read_numbers_text(path: Path) -> str:
    with _open(path) as file:
        raw = file.read(_PROGRESS_BYTES + 1)
    if len(raw) > _PROGRESS_BYTES:
        raise ValueError(f"more than {_PROGRESS_BYTES} bytes")
    return raw.decode()


def _damaged(folder: Path, name: str, error: Exception) -> Damaged:
    kind = "" if isinstance(error, (OSError, ValueError)) and str(error) else f"{type(error).__name__}: "
    what = error.strerror if isinstance(error, OSError) and error.strerror else f"{kind}{error}"
    return Damaged(f"the checkpoint is damaged: {name}: {what}", str(folder), "use the checkpoint before it, or another run folder")
