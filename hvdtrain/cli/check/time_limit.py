"""A check ends, whatever hangs: each rank says in which part it waited too long, and leaves."""

from __future__ import annotations

import socket
import sys
import threading
import time

from hvdtrain.core.exit import exit_now
from hvdtrain.errors import USER

_LAST_WORDS_S = 1.5  # for the others': where the launcher ends the job at the first exit


class Patience:
    """A limit for each part of a check, kept by a thread."""

    def __init__(self, rank: int, limit_s: float) -> None:
        self._rank, self._limit_s, self._number = rank, limit_s, 0

    def meet(self, what: str) -> None:
        """From now on this rank needs the others: rank 0 would tell it."""
        self._begin(f"waited {self._limit_s:g} s for other ranks {what}" if self._rank == 0 else "", _NETWORK)

    def work(self, what: str) -> None:
        """From now on this rank works alone: if it does not end, it is the one that the others wait for."""
        self._begin(f"{what}, for {self._limit_s:g} s until now", "look at this host; or --limit SECONDS")

    def over(self) -> None:
        self._number += 1

    def _begin(self, words: str, fix: str) -> None:
        self._number += 1
        threading.Thread(target=self._watch, args=(self._number, words, fix), daemon=True).start()

    def _watch(self, number: int, words: str, fix: str) -> None:
        time.sleep(self._limit_s)
        if number != self._number:
            return
        if words:
            told = f"hvdtrain check: error: rank {self._rank} {words}\n  where: {socket.gethostname()}\n  fix: {fix}"
            print(told, file=sys.stderr, flush=True)
        time.sleep(_LAST_WORDS_S)
        if number == self._number:
            exit_now(USER)


_NETWORK = (
    "look for the words of another rank; a host without this job, a firewall, or a network interface that other hosts do not reach "
    "(--mca btl_tcp_if_include eth0, HOROVOD_GLOO_IFACE, NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"
)
