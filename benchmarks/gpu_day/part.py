"""A part of the day: its folder, data, programs that end with it, and its rows in the file of
results."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = {False: 480.0, True: 3600.0}  # of a part; with --quick it is there for what hangs
_END_S = 10  # for a program that is asked to end
_SHOWN = 3000  # letters of a program's output in an error
# The programs share one machine with each other, on which root may start ranks.
_MACHINE = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_btl": "self,sm,tcp",
}


class Failed(Exception):
    """A part did not do what it is there for."""


class Device(NamedTuple):
    """What the day computes on."""

    name: str
    uuid: str  # "GPU-..."; "" of a CPU
    count: int = 0  # of GPUs

    @property
    def is_gpu(self) -> bool:
        return bool(self.uuid)


class Part:
    """One part. It has LIMIT_S seconds, and with it all programs that it starts."""

    def __init__(
        self, name: str, device: Device, root: Path | None, quick: bool, home: Path, sink: Path
    ) -> None:
        """root: of data sets; None: there are none. home: of the day, empty at its start; sink: the
        file of rows."""
        self.name = name
        self.device = device
        self.root = root
        self.quick = quick
        self.home = home
        self.folder = home / name
        self.folder.mkdir()
        self._sink = sink
        self._limit_s = LIMIT_S[quick]
        self._end_s = time.monotonic() + self._limit_s

    def row(self, **facts: Any) -> None:
        with self._sink.open("a") as out:
            out.write(json.dumps({"part": self.name, "device": self.device.name} | facts) + "\n")

    def copy_rows(self, path: Path, **facts: Any) -> list[dict[str, Any]]:
        """Copies rows that a script has written to a file, as `measured`, and adds facts of this
        part."""
        rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
        for each in rows:
            self.row(**facts, measured=each)
        return rows

    def python(self, *arguments: str, ranks: int = 0) -> str:
        """Returns the standard output of `python ARGUMENTS`, started with mpirun if there are
        ranks. Raises Failed if it fails or takes too long."""
        mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which(
            "mpirun"
        )
        if ranks and mpirun is None:
            raise Failed("no mpirun: python install.py --extras mpi")
        launcher = [str(mpirun), "-np", str(ranks)] if ranks else []
        shown = " ".join([*(["mpirun", *launcher[1:]] if ranks else []), "python", *arguments])
        left_s = self._end_s - time.monotonic()
        if left_s < 1:
            raise Failed(f"it had taken {self._limit_s:g} s before {shown}")
        code, out, err = self._run(
            ["timeout", "-k", str(_END_S), f"{left_s:.1f}", *launcher, sys.executable, *arguments]
        )
        if code:
            what = f"more than {self._limit_s:g} s with" if code == 124 else f"exit code {code} of"
            raise Failed(f"{what} {shown}\n{(out + err)[-_SHOWN:]}")
        return out

    def _run(self, command: list[str]) -> tuple[int, str, str]:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {
            **_MACHINE,
            **os.environ,
            "PYTHONPATH": path,
            "XDG_CACHE_HOME": str(self.home / "cache"),
        }
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        try:
            out, err = process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()  # `timeout`, which passes it on to what it has started
        return process.returncode, out, err

    def train(self, run: str, *words: str, ranks: int = 0, program: str = "-m hvdtrain") -> Job:
        """A job of hvdtrain in the folder `run` of this part, to its end."""
        folder = self.folder / run
        self.python(*program.split(), *words, f"run={folder}", ranks=ranks)
        return Job(folder)

    def bench_step(
        self, *words: str, ranks: int = 0, program: str = "-m hvdtrain"
    ) -> dict[str, Any]:
        """What `bench step` prints as JSON."""
        rounds = (
            ["--rounds", "2", "--steps", "2"] if self.quick else ["--rounds", "5", "--steps", "10"]
        )
        found: dict[str, Any] = json.loads(
            self.python(
                *program.split(), "bench", "step", *rounds, "--json", "-", *words, ranks=ranks
            )
        )
        return found


class Job:
    """A job that has ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._events = [
            json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()
        ]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self._events if event["kind"] == kind]

    @property
    def losses(self) -> list[float]:
        """Returns the losses at each sync point."""
        return [event["loss"] for event in self.events("step")]

    @property
    def memory_mb(self) -> dict[str, Any]:
        """The most that a rank's tensors took, and the prediction; neither counts libraries."""
        end = self.events("end")[-1]
        return {
            "peak_mb": max(end["rank_memory_mb"]),
            "predicted_mb": end.get("memory_predicted_mb"),
        }
