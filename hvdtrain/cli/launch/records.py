"""The files of a run that a supervisor uses: it reads events.jsonl as it grows, and writes launch.jsonl."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvdtrain.cli.launch.launcher_commands import Host
from hvdtrain.core.folder import Folder
from hvdtrain.core.process import print_stderr

EVENTS = "events.jsonl"
_READ_BYTES = 2**22  # at a time
_EVENT = b'{"time":'  # as every event begins
_ENDINGS = ("end", "stop", "failed")


class JobEvents:
    """The job that writes to the run folder. begin() forgets what the starts before have told.

    run=None: a script without one, which looks as a job that was over before: its exit code has to tell.
    """

    def __init__(self, run: Path | None) -> None:
        self._run, self._offset, self._rest = run, 0, b""
        self.ending = "" if run else "end"  # as Ended's; of the start before until there is an event of this one
        self._forget()

    def begin(self) -> None:
        """A start of the ranks follows: what is in the file already is not of it."""
        self.poll()
        self._forget()

    def poll(self) -> None:
        """Reads what has come since. A folder that is not there yet, or cannot be read, tells nothing."""
        if self._run is None:
            return
        try:
            with Folder.open(self._run) as folder, folder.open_file(EVENTS) as file:
                file.seek(self._offset)
                while data := file.read(_READ_BYTES):
                    self._offset += len(data)
                    *lines, self._rest = (self._rest + data).split(b"\n")
                    for line in lines:
                        self._take(line)
        except OSError:
            return

    def _forget(self) -> None:
        self.exit_code = 1  # that an ending says
        self.step = -1  # of its last sync point; -1 before it has started
        self.ranks = 0  # that it has
        self.trains = False  # whether it has come to a sync point

    def _take(self, line: bytes) -> None:
        event = _parse(line)
        kind, step = event.get("kind"), event.get("step")
        if kind not in ("start", "step", "lost", *_ENDINGS) or not isinstance(step, int):
            return
        self.ending = kind if kind in _ENDINGS else ""
        self.step = step if kind == "start" else max(self.step, step)
        code = event.get("exit_code")
        self.exit_code = code if isinstance(code, int) else 1
        self.trains = kind == "step" or (self.trains and kind != "start")
        ranks = event.get({"start": "ranks", "lost": "left"}.get(kind, ""))
        self.ranks = ranks if isinstance(ranks, int) else self.ranks


def _parse(line: bytes) -> dict[str, Any]:
    """The last event of a line: a job that was killed may have left half a line before it."""
    try:
        event = json.loads(line[max(0, line.rfind(_EVENT)) :])
    except (ValueError, RecursionError):
        return {}
    return event if isinstance(event, dict) else {}


FILE = "launch.jsonl"


class Record:
    """The run folder is made by the job: lines wait until its first event is there. Without one (None) they are on the standard error."""

    def __init__(self, run: Path | None) -> None:
        self._run, self._waiting = run, list[bytes]()

    def add(self, kind: str, text: str, **fields: Any) -> None:
        print_stderr(f"hvdtrain launch: {text}")
        event = {"time": round(time.time(), 3), "kind": kind, **fields, "text": text}
        self._waiting.append(json.dumps(event).encode() + b"\n")
        self.write()

    def write(self) -> None:
        """What could not be written yet. A disk that is full loses these lines, but not the job."""
        if self._run is None:
            self._waiting.clear()
            return
        with suppress(OSError), Folder.open(self._run) as folder:
            if folder.status(EVENTS) is None:
                return
            with folder.append(FILE) as file:
                while self._waiting:
                    file.write(self._waiting[0])
                    del self._waiting[0]


def hosts_text(hosts: Sequence[Host]) -> str:
    return ", ".join(f"{host.name} x {host.slots}" for host in hosts)


def hosts_field(hosts: Sequence[Host]) -> dict[str, int]:
    return {host.name: host.slots for host in hosts}
