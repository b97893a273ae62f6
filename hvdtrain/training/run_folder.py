"""The run folder that rank 0 writes to: a new one, or the resumed run's; never a folder that
belongs to something else."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Any

from hvdtrain.config.plugins import named
from hvdtrain.config.read import to_record
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.section import class_of_object, is_object
from hvdtrain.core.extras import environment_recorder
from hvdtrain.core.folder import NO_LINKS, Folder, WrongKind
from hvdtrain.errors import UserError, short
from hvdtrain.training.checkpoint import files
from hvdtrain.training.checkpoint.changes import PLACE
from hvdtrain.training.checkpoint.resume import began_from, former_run
from hvdtrain.training.checkpoint.room import cannot_write, check_room
from hvdtrain.training.run_lock import LOCK, RunLock
from hvdtrain.version import __version__

MARKER = ".hvdtrain"  # in every folder that make_run_folder() created
FILES = (
    "config.yaml",
    "environment.json",
    "codebook.json",
    "events.jsonl",
    "report.html",
    "mlflow_run.json",
    "wandb_run.json",
    "launch.jsonl",
    MARKER,
    LOCK,
)
FOLDERS = ("checkpoints", "samples", "ranks", "profile", "tensorboard", "mlflow", "wandb")
_OUTPUT = re.compile(r".+\.(log|out|err)")  # output of a batch system, which may exist first
_FIRST_EVENT = b'{"time":'  # the beginning of every event


def make_run_folder(config: Config, resumed: Path | None = None) -> Path:
    """Creates the folder, or returns the resumed run's.

    Raises UserError if it contains another run or is not a run folder, if a name in it is a link,
    or if it cannot be written.
    """
    where = config.where("resume" if config.run is None and resumed else "run")
    try:
        if config.run is None:
            run = resumed or _new_folder(config)
        else:
            run = Path(config.run).expanduser()
            if (
                config.resume != "auto"
                and _holds_a_run(run)
                and not _is_of_this_command(run, config, resumed)
            ):
                fix = f"resume=auto or resume={run} resumes it; or give another run="
                raise UserError(f"{run} contains another run", where, fix)
            run.mkdir(parents=True, exist_ok=True)
        with Folder.open(run) as folder:
            _refuse_links(folder, where)
            _mark(folder, where)
        return run
    except OSError as error:
        raise cannot_write(error, where) from None


def open_run_folder(config: Config, lock: RunLock) -> tuple[Path, list[str]]:
    """Creates the folder, or opens the resumed run's, and locks it. Returns it with lines for the
    user. Raises UserError."""
    run = make_run_folder(config, former_run(config))
    try:
        return run, lock.acquire(run)
    except OSError as error:
        raise cannot_write(error, config.where("run")) from None


def check_run_folder(run: Path, needed_bytes: int) -> None:
    """Raises UserError if a resumed run's files cannot be written, or if a checkpoint of
    `needed_bytes` does not fit."""
    files.remove_leftovers(run)
    try:
        with Folder.open(run) as folder:
            if folder.status("events.jsonl") is not None:
                folder.append("events.jsonl").close()
            if folder.status("checkpoints") is not None:
                with folder.folder("checkpoints") as checkpoints:
                    checkpoints.try_to_write()
    except OSError as error:
        what = f"cannot write in the run folder {run}: {error.strerror or error}"
        raise UserError(
            what, f"{error.filename or run}", "make it writable, or give another run="
        ) from None
    check_room(run, needed_bytes)


def remove_if_empty(run: Path) -> None:
    """Removes a folder that was created for a job that does not start."""
    with contextlib.suppress(OSError):
        with Folder.open(run) as folder:
            if folder.names() == [MARKER]:
                folder.remove(MARKER)
        run.rmdir()


def write_config(
    config: Config, run: Path, lock: RunLock, only: dict[str, Any] | None = None
) -> None:
    """Writes config.yaml, whole or not at all, without the keys for the run's location. only: see
    to_record().

    Raises OSError, and what the lock raises.
    """
    with lock.open(run) as folder:
        folder.replace("config.yaml", to_record(config, PLACE, only).encode())


def _is_of_this_command(run: Path, config: Config, resumed: Path | None) -> bool:
    """Whether the run is the resumed one, or was started by this resume= and has no checkpoint
    yet."""
    return resumed is not None and (
        resumed.resolve() == run.resolve()
        or (began_from(run) == config.resume and not files.finished(run))
    )


def _holds_a_run(run: Path) -> bool:
    return any(
        os.path.lexists(run / name) for name in ("config.yaml", "events.jsonl", "checkpoints")
    )


def _refuse_links(folder: Folder, where: str) -> None:
    """Raises UserError if a name that a job writes is a link."""
    for name in (*FILES, *FOLDERS):
        with contextlib.suppress(FileNotFoundError):
            try:
                (folder.open_file(name) if name in FILES else folder.folder(name)).close()
            except WrongKind as error:
                raise UserError(
                    f"{folder.path / name} is {error.strerror}", where, NO_LINKS
                ) from None


def _mark(folder: Folder, where: str) -> None:
    """Marks the folder. Raises UserError if it is neither new nor a run folder."""
    if folder.status(MARKER) is not None:
        return
    foreign = [name for name in folder.names() if not _OUTPUT.fullmatch(name) and name != MARKER]
    shared = os.path.realpath(folder.path) in ("/", os.path.realpath(os.path.expanduser("~")))
    if shared or (foreign and not _has_run_without_marker(folder)):
        what = f"{folder.path} is not a run folder" + (
            f": {short(foreign[0], 100)} in it was not written by hvdtrain" if foreign else ""
        )
        raise UserError(
            what, where, f"give run= a separate folder, such as run={folder.path / 'run-1'}"
        )
    with (
        contextlib.suppress(FileExistsError),
        folder.create(MARKER) as file,
    ):  # another job has just created it
        file.write(f"a run folder of hvdtrain {__version__}\n".encode())


def _has_run_without_marker(folder: Folder) -> bool:
    """Whether the folder contains events or a checkpoint of hvdtrain."""
    with contextlib.suppress(FileNotFoundError), folder.open_file("events.jsonl") as events:
        if events.read(len(_FIRST_EVENT)) == _FIRST_EVENT:
            return True
    with contextlib.suppress(FileNotFoundError), folder.folder("checkpoints") as checkpoints:
        return any(re.fullmatch(r"step-\d+", name) for name in checkpoints.names())
    return False


def _new_folder(config: Config) -> Path:
    """Creates runs/DATA-MODEL-TIME, or with a number appended if another job began in the same
    second."""
    data, model = (
        class_of_object(section.name) if is_object(section.name) else section.name
        for section in (config.data, config.model)
    )
    name = f"{data}-{model.split(':')[-1]}-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
        with contextlib.suppress(FileExistsError):
            run = Path("runs") / f"{name}{suffix}"
            run.mkdir(parents=True)
            return run
    raise FileExistsError(f"runs/{name} and 998 more")


def record_environment(run: Path) -> dict[str, Any]:
    """Records what this process runs with, and returns it for the event "start"; empty if no extra
    does so."""
    name = environment_recorder()
    return named(name)(run) if name else {}
