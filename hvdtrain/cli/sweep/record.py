"""The files of a sweep: sweep.json, what it is and its trials, written before the first starts; exits.jsonl, how each ended."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hvdtrain.cli.sweep.space import Point
from hvdtrain.cli.sweep.trial import State
from hvdtrain.config.yaml_reader import compose, leaves, value_of
from hvdtrain.core.folder import Folder
from hvdtrain.errors import UserError, short

FILE, EXITS, LOCK = "sweep.json", "exits.jsonl", ".sweep.lock"
_MOST_BYTES = 2**26
_VERSION = 1
_OPTIONS = {"sampler": "--sampler", "seed": "--seed", "grid": "--grid", "random": "--random", "ranks_per_trial": "--ranks-per-trial"}


@dataclass
class Sweep:
    """What a sweep is; trials are added where they are proposed one by one."""

    sampler: str
    seed: int
    grid: list[str]
    random: list[str]
    ranks_per_trial: int
    config: list[str]  # the lines of the configuration that all trials share, resolved
    trials: list[Point] = field(default_factory=list)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes the folder, and holds it for this process. Raises UserError where another one sweeps in it, or it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a")
    except OSError as error:
        raise UserError(f"cannot write in {folder}: {error.strerror}", "--out", "give a folder that can be written") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another sweep runs in {folder}", "--out", "wait for its end, or another --out") from None
        except OSError:  # a file system without locks: each run folder has a lock of its own
            pass
        yield


def write(folder: Path, sweep: Sweep) -> None:
    text = json.dumps({"version": _VERSION, **asdict(sweep)}, indent=1)
    with Folder.open(folder) as opened:
        opened.replace(FILE, f"{text}\n".encode())


def take_up(folder: Path, sweep: Sweep, command: str) -> Sweep:
    """The sweep that is recorded in the folder, if it is this one, with further trials of this one behind its own; or this one.

    Raises UserError where it is another.
    """
    try:
        with Folder.open(folder) as opened:
            found = json.loads(opened.read(FILE, _MOST_BYTES))
    except FileNotFoundError:
        others = sorted(path.name for path in folder.iterdir() if path.name != LOCK)
        if others:
            what = f"{folder} has other files, and no {FILE}: {short(', '.join(others[:3]))}"
            raise UserError(what, "--out", "an empty folder, or a new one") from None
        return sweep
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {folder / FILE}: {error}", "--out", "another --out") from None
    former = _former(found, folder)
    _refuse_another(former, sweep, folder, command)
    return sweep if len(sweep.trials) > len(former.trials) else former


def _former(found: Any, folder: Path) -> Sweep:
    try:
        if found.pop("version") != _VERSION:
            raise ValueError("of another version")
        trials = [tuple(map(str, point)) for point in found.pop("trials")]
        return Sweep(**found, trials=trials)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / FILE} is no record of a sweep: {error}", "--out", "another --out") from None


def _refuse_another(former: Sweep, sweep: Sweep, folder: Path, command: str) -> None:
    for name, option in _OPTIONS.items():
        before, now = getattr(former, name), getattr(sweep, name)
        if before != now:
            raise _another(folder, f"{option} {_shown(now)}, there it is {_shown(before)}", command)
    try:
        there, here = _values(former.config), _values(sweep.config)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{folder / FILE} is no record of a sweep: {error}", "--out", "another --out") from None
    for key in {**there, **here}:
        before, now = (str(values.get(key, "not set")) for values in (there, here))
        if before != now:
            raise _another(folder, f"their configurations differ: {key} is {short(now)} here, there it is {short(before)}", command)
    shared = min(len(former.trials), len(sweep.trials))
    if former.trials[:shared] != sweep.trials[:shared]:
        raise _another(folder, "its trials are others", command)


def _values(config: list[str]) -> dict[str, Any]:
    """{"batch.size": 8, ...}, of the lines of a configuration."""
    return {leaf.key: value_of(leaf.node, as_text=False) for leaf in leaves(compose("\n".join(config)), ())}


def _shown(value: Any) -> str:
    return short(" ".join(map(str, value)) or "(none)") if isinstance(value, list) else str(value)


def _another(folder: Path, difference: str, command: str) -> UserError:
    return UserError(f"{folder} holds another sweep: {difference}", command, "another --out; or that sweep's command, to go on with it")


def append_exit(folder: Path, name: str, code: int, state: State, error: str) -> None:
    with Folder.open(folder) as opened, opened.append(EXITS) as file:
        file.write(f"{json.dumps({'trial': name, 'code': code, 'state': state, 'error': error})}\n".encode())


def read_exits(folder: Path) -> dict[str, tuple[State, str]]:
    """{name of a trial: (its state, its error)}, of those that ended; the last line of each counts."""
    found: dict[str, tuple[State, str]] = {}
    with contextlib.suppress(FileNotFoundError), Folder.open(folder) as opened:
        for line in opened.read(EXITS, _MOST_BYTES).splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # cut off by a crash
                ended = json.loads(line)
                found[ended["trial"]] = (ended["state"], str(ended["error"]))
    return found
