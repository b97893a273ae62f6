"""Time limits: a check ends even where something hangs. A rank that exceeds the limit of a phase prints the phase and exits."""

from __future__ import annotations

import socket
import threading

from hvdtrain.core.exit import exit_now
from hvdtrain.core.stderr import print_stderr
from hvdtrain.errors import USER

_GRACE_S = 1.5  # for the messages of other ranks: some launchers end the job at the first exit
_NETWORK_FIX = (
    "look for the message of another rank; a host without this job, a firewall, or a network interface that other hosts cannot reach "
    "(--mca btl_tcp_if_include eth0, HOROVOD_GLOO_IFACE, NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"
)


class TimeLimit:
    """A limit for each phase of a check; the next phase ends the one before it."""

    def __init__(self, rank: int, limit_s: float) -> None:
        self._rank = rank
        self._limit_s = limit_s
        self._phase_over = threading.Event()

    def start_waiting(self, purpose: str) -> None:
        """This rank waits for others, as in `purpose="to connect"`. Rank 0 reports for all ranks that wait."""
        message = f"rank {self._rank} waited {self._limit_s:g} s for other ranks {purpose}"
        self._start_phase(message if self._rank == 0 else None, _NETWORK_FIX)

    def start_work(self, activity: str) -> None:
        """This rank works alone, as in `activity="reading the data"`. Where it does not end, the others wait for this rank."""
        message = f"rank {self._rank} is still {activity} after {self._limit_s:g} s"
        self._start_phase(message, "look at this host, or give a longer --limit SECONDS")

    def cancel(self) -> None:
        """The check is over."""
        self._phase_over.set()

    def _start_phase(self, message: str | None, fix: str) -> None:
        self._phase_over.set()
        self._phase_over = threading.Event()
        threading.Thread(target=self._end_late_phase, args=(self._phase_over, message, fix), daemon=True).start()

    def _end_late_phase(self, phase_over: threading.Event, message: str | None, fix: str) -> None:
        if phase_over.wait(self._limit_s):
            return
        if message is not None:
            report = f"hvdtrain check: error: {message}\n  where: {socket.gethostname()}\n  fix: {fix}"
            print_stderr(report)
        if not phase_over.wait(_GRACE_S):
            exit_now(USER)
