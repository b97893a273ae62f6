"""What a supervisor decides: a line on the standard error, and one in the run folder's launch.jsonl."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvdtrain.cli.launch.job_events import EVENTS
from hvdtrain.cli.launch.launcher_commands import Host
from hvdtrain.core.folder import Folder
from hvdtrain.core.stderr import print_stderr

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
