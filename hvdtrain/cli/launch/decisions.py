"""What a supervisor does after a launcher has ended, and when it changes the hosts of a running job: pure functions."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from hvdtrain.cli.launch.launcher_commands import Host, ranks_per_host
from hvdtrain.errors import DONE, LOST, REQUEUE, USER

NO_PROGRESS = 5  # failures in a row without a step that was not reached before, after which the job is given up
# mpirun ends with 0 where it has lost a host; SIGKILL and SIGTERM come from outside of a rank, as from a host that runs out of memory
_FROM_OUTSIDE = (DONE, LOST, *(128 + number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)))
_STARTING = 128 + signal.SIGUSR2  # a request to stop that came before the ranks could listen


class Ended(NamedTuple):
    """How a start of the ranks ended."""

    code: int  # of the launcher
    ending: str  # kind of the job's last event, where that ends a job: end, stop, failed; else empty
    step: int  # that it reached; -1 where it did not start
    stopped: bool = False  # by a signal to the supervisor
    asked: bool = False  # to stop, by the supervisor, so that the hosts change

    @property
    def is_of_a_job_that_was_over(self) -> bool:
        """It has nothing to do and writes nothing; so looks a job whose host is lost before its first event, too."""
        return self.code == DONE and self.ending == "end" and self.step < 0


class Failure(NamedTuple):
    """A start that failed while all of its hosts answer."""

    code: int
    step: int  # as Ended's

    @property
    def is_own(self) -> bool:
        """An error of the job, which comes again; not a rank that was killed, or a connection that broke."""
        return self.code not in _FROM_OUTSIDE


class Decision(NamedTuple):
    action: Literal["finish", "change", "failed"]  # end with the code; start on other hosts; find out which host is lost
    code: int = DONE


def decide(ended: Ended) -> Decision:
    """What the end of a start means, before anybody has looked at its hosts."""
    if ended.code == DONE and ended.ending == "end" and ended.step >= 0:
        return Decision("finish")
    if ended.stopped:
        return Decision("finish", ended.code or REQUEUE)
    if ended.asked and ended.code in (REQUEUE, _STARTING):
        return Decision("change")
    if ended.code == REQUEUE:  # its time limit, or a signal to a rank: as without a supervisor
        return Decision("finish", REQUEUE)
    return Decision("failed", ended.code)


def reason_to_give_up(failures: Sequence[Failure], is_first_start: bool) -> str:
    """Why the job is not started again after the last of its failures; empty where it is.

    is_first_start: of this supervisor; an error that the user can fix is then a mistake in the command.
    """
    last = failures[-1]
    own = [failure for failure in failures if failure.is_own]
    if last.code == USER and is_first_start:
        return "it ended by an error that you can fix"
    if last.is_own and len(own) > 1 and own[-2].step == last.step:
        return f"it failed twice {at_step(last.step)} by its own error"
    recent = failures[-NO_PROGRESS:]
    if len(recent) == NO_PROGRESS and max(failure.step for failure in recent) <= recent[0].step:
        return f"it failed {NO_PROGRESS} times without a new step"
    return ""


def at_step(step: int) -> str:
    """Where a job ended whose last event is of this step; -1: it has none."""
    return f"at step {step}" if step >= 0 else "before its first step"


def choose(hosts: Sequence[Host], most: int | None) -> tuple[Host, ...]:
    """The hosts with the ranks that each gets: slots are filled host by host, up to `most` ranks."""
    slots = slots_of(hosts)
    return tuple(ranks_per_host(hosts, slots if most is None else min(most, slots)))


def slots_of(hosts: Sequence[Host]) -> int:
    return sum(host.slots for host in hosts)


def reason_to_change(running: Sequence[Host], ranks: int, offered: Sequence[Host], chosen: Sequence[Host], least: int) -> str:
    """Why a running job is stopped at its next sync point, to go on elsewhere; empty where it is not.

    running: its hosts, of which so many ranks are left; offered: hosts that somebody offers now; chosen: those that a start would get now.
    """
    if slots_of(chosen) < least:
        return ""  # fewer than it may have: it keeps what it has as long as that lives
    names = {host.name for host in offered}
    withdrawn = [host.name for host in running if host.name not in names]
    if withdrawn:
        return f"{', '.join(withdrawn)} {'is' if len(withdrawn) == 1 else 'are'} no longer offered"
    before, now = _slots(running), _slots(chosen)
    if any(now.get(name, 0) < slots for name, slots in before.items() if name in now) and slots_of(chosen) < ranks:
        return f"{slots_of(chosen)} slots are offered"
    return f"{ranks} ranks could be {slots_of(chosen)}" if slots_of(chosen) > ranks else ""


def _slots(hosts: Sequence[Host]) -> Mapping[str, int]:
    return {host.name: host.slots for host in hosts}
