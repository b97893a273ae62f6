"""Measures the phases of a start, from the launcher to the end of the first step."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hvdtrain.comm.launcher_variables import SRUN, placement
from hvdtrain.training.health.heartbeat import Heartbeat

LAUNCHERS = (
    "mpirun",
    "mpiexec",
    "prterun",
    "orterun",
    "orted",
    "prted",
    "mpiexec.hydra",
    "hydra_bstrap_proxy",
    "hydra_pmi_proxy",
    "srun",
    "torchrun",
    "pt_elastic",  # torchrun's name for itself
)
_NAMES = {name[:15] for name in LAUNCHERS}  # Linux keeps 15 letters
_STEP = "slurmstepd"
NAMES = {
    "step": "first step",
    "reading samples": "first samples",
    "reading the checkpoint": "state",
}
NAMES |= {
    "connecting the ranks": "ranks",
    "reading the data": "data",
    "building the model": "model",
}
NAMES |= {
    "computing the first weights, begin_with()": "begin_with()",
    "broadcasting the first weights": "broadcast",
}


def phases(heartbeat: Heartbeat, now_s: float | None = None) -> dict[str, float]:
    """Returns seconds of each phase, in order; with "launcher" if /proc shows a launcher's process
    on this host."""
    marks = list(heartbeat.start_marks.items())
    found: dict[str, float] = {}
    began = _age_s(os.getpid())
    if began is not None and marks and heartbeat.owns_process:
        now = time.monotonic() if now_s is None else now_s
        launched = _launcher_age_s()
        if launched is not None and launched >= began:
            found["launcher"] = launched - began
        found["Python"] = began - (now - marks[0][1])
    for (phase, start), (_, end) in itertools.pairwise(marks):
        found[NAMES.get(phase, phase).removeprefix("importing ")] = end - start
    return {name: max(0.0, round(seconds, 3)) for name, seconds in found.items()}


def fields(heartbeat: Heartbeat) -> dict[str, Any]:
    """Returns fields of the event "started"."""
    found = phases(heartbeat)
    return {"start_s": found, "lines": [summary(found)]}


def summary(found: dict[str, float]) -> str:
    """Returns one line: start   3.1 s to the end of the first step: launcher 0.4, Python 0.3, ranks
    0.5, ..."""
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in found.items() if seconds >= 0.05)
    return (
        f"start   {sum(found.values()):.1f} s to the end of the first "
        f"step{': ' * bool(parts)}{parts}"
    )


def _launcher_age_s() -> float | None:
    # a shell of srun --pty runs many commands
    by_srun = placement(os.environ).launcher == SRUN.name and "SLURM_PTY_PORT" not in os.environ
    pid = launcher(_above(os.getppid()), by_srun)
    return None if pid is None else _age_s(pid)


def launcher(above: Iterable[tuple[str, int]], by_srun: bool) -> int | None:
    """Returns the launcher process that began this start. above: (name, id) of our parents, nearest
    first. It is the topmost of the nearest uninterrupted sequence of launchers.

    Wrappers may be below it (mpirun -> sh -> us). Launchers above any other process started other
    commands: bash -> mpirun. slurmstepd runs our step only if srun alone started us; otherwise it
    runs the batch script or another launcher's daemon.
    """
    launcher_pid = None
    for name, pid in above:
        if name in _NAMES or (name == _STEP and by_srun and launcher_pid is None):
            launcher_pid = pid
        elif launcher_pid is not None or name == _STEP:
            break
    return launcher_pid


def _above(pid: int) -> Iterator[tuple[str, int]]:
    """Yields (name, id) of a process and those above it, as far as /proc of this host shows
    them."""
    while pid > 1 and (fields := _stat(pid)) is not None:
        yield fields[0], pid
        pid = int(fields[2])


def _age_s(pid: int) -> float | None:
    """Returns seconds since a process of this host began; None if the host has no /proc or no such
    process."""
    fields = _stat(pid)
    if fields is None or not hasattr(time, "CLOCK_BOOTTIME"):
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[20]) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str] | None:
    """Returns the name, then the fields of /proc/PID/stat from the third on."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    return [name, *rest.split()]
