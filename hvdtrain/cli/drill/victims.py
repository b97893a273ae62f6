"""The ranks of a running job on this machine: found from its run folder's lock, of the same user, each with the start of its process."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple

from hvdtrain.comm.placement import placement
from hvdtrain.core.folder import Folder
from hvdtrain.errors import UserError
from hvdtrain.training.run_lock.holder import Holder, is_gone
from hvdtrain.training.run_lock.lock import read_holder

What = Literal["rank", "host", "rank0", "random"]
KINDS: tuple[What, ...] = ("rank", "host", "rank0", "random")


class Rank(NamedTuple):
    """A process of the job."""

    rank: int
    pid: int
    start: int  # of the process, in ticks: another process of the same number has another
    parent: int  # mpirun, or its daemon of a host


def find_ranks(run: Path) -> list[Rank]:
    """By rank. Raises UserError where no job runs in the folder, or not here and as this user."""
    holder = _holder(run)
    first = _read(holder.pid)
    environ = _environ(holder.pid)
    if first is None or first.start != holder.process_start or environ is None:
        raise UserError(f"rank 0 of the job in {run} is no process of this user", str(run), "as the user of the job, on its first host")
    job = environ.get("PMIX_NAMESPACE")
    found = []
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()):
        process, theirs = _read(pid), _environ(pid)
        if process is None or theirs is None:
            continue
        if pid == holder.pid or (theirs.get("PMIX_NAMESPACE") == job if job else process.parent == first.parent):
            try:
                place = placement(theirs)
            except UserError:
                continue
            if pid == holder.pid or place.launcher != "none":
                found.append(process._replace(rank=place.rank))
    return sorted(found)


def choose(ranks: list[Rank], what: What, random: Random) -> list[Rank]:
    """The ranks to kill: one rank, any but rank 0 where there is another; all of a host; rank 0; or one of these ways."""
    if what == "random":
        what = random.choice(KINDS[:3])
    if what == "rank0":
        return ranks[:1]
    if what == "rank":
        return [random.choice(ranks[1:] or ranks)]
    parent = random.choice(sorted({rank.parent for rank in ranks}))
    return [rank for rank in ranks if rank.parent == parent]


def send(victim: Rank, number: int) -> bool:
    """A signal to that very process; False where it has ended."""
    try:
        handle = os.pidfd_open(victim.pid)
    except OSError:
        return False
    try:
        now = _read(victim.pid)  # after the handle is there, so that it cannot be another process
        if now is None or now.start != victim.start:
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)


def _holder(run: Path) -> Holder:
    try:
        with Folder.open(run) as folder:
            holder = read_holder(folder)
    except OSError as error:
        raise UserError(f"cannot read the run folder {run}: {error.strerror}", "RUN", "the run folder of a job that runs") from None
    if holder is None or is_gone(holder):
        raise UserError(f"no job runs in {run}", "RUN", "start it first, as with hvdtrain launch --elastic ... -- run=DIR")
    if is_gone(holder) is None:
        raise UserError(f"the job in {run} runs on {holder.host}", "RUN", "drill on that host: it kills processes of its own machine only")
    return holder


def _read(pid: int) -> Rank | None:
    """A process of this user that is alive; its rank is not known yet."""
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return None
        state, parent, *rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else Rank(0, pid, int(rest[17]), int(parent))


def _environ(pid: int) -> Mapping[str, str] | None:
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    return {key: value for key, _, value in (pair.partition("=") for pair in pairs) if value}
