"""Signals: a flag that the loop reads at sync points, set even while the main thread is inside C
code; a second signal kills."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import weakref
from types import FrameType, TracebackType
from typing import Any, NoReturn

from hvdtrain.core.early_signals import EarlySignals
from hvdtrain.core.process import write_stderr

# SIGUSR2 is the one to send: mpirun and srun pass it on to the ranks and do nothing else. Where
# mpirun itself is sent SIGTERM, SIGINT or SIGHUP, it kills the ranks within a second, whatever they
# have to save. SIGHUP: the terminal is gone, as after an ssh connection broke.
HANDLED = (signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# a launcher and a scheduler may both deliver one signal: a repetition within this time is the same
# one
ECHO_S = 1.0


class Signals:
    """`received` is "", or the name of the first of HANDLED that came ("SIGUSR2").

    A context manager for the main thread; in another thread, no signal is received. The handlers do
    nothing else, so Ctrl-C does not raise KeyboardInterrupt. Python runs handlers only between
    bytecodes of the main thread, never in an MPI call that hangs. So signal numbers also go through
    a socket, which another thread reads with poll(); a second signal there ends this process.
    """

    def __init__(self, rank: int) -> None:
        self.received = ""
        self._rank = rank
        self._first_s = 0.0
        self._former: dict[int, Any] = {}
        self._former_wakeup = -1

    def __enter__(self) -> Signals:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        if threading.current_thread() is threading.main_thread():
            self._install()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()
        self._reader.close()
        self._writer.close()

    def poll(self, timeout_s: float = 0.0) -> None:
        """Waits up to timeout_s for a signal or for wake(), and processes received signals. Only
        one thread at a time may call it."""
        self._reader.settimeout(timeout_s)
        with contextlib.suppress(BlockingIOError, TimeoutError):
            for number in self._reader.recv(4096):
                if number in self._former:
                    self._take(number)

    def wake(self) -> None:
        """Wakes a waiting poll(), from any thread."""
        with contextlib.suppress(BlockingIOError):  # full: it wakes anyway
            self._writer.send(b"\0")

    def _take(self, number: int) -> None:
        now_s = time.monotonic()
        self._receive(number, None)
        self._first_s = self._first_s or now_s
        if now_s - self._first_s > ECHO_S:
            self._kill(number)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """The handler. It runs late if the main thread was inside C code, so only poll() detects a
        second signal."""
        self.received = self.received or signal.Signals(number).name

    def _kill(self, number: int) -> NoReturn:
        name = signal.Signals(number).name
        write_stderr(
            f"hvdtrain: rank {self._rank} on {socket.gethostname()}: second {name}: killed "
            "without a checkpoint"
        )
        os._exit(128 + number)

    def _install(self) -> None:
        for number in HANDLED:
            former = signal.getsignal(number)
            if former is signal.SIG_IGN:
                # the parent process ignores it, as a shell does with SIGINT for background
                # processes
                continue
            if isinstance(former, EarlySignals) and former.received:
                self.received = signal.Signals(former.received).name
                self._first_s = time.monotonic()
            self._former[number] = signal.SIG_DFL if former is None else former
            signal.signal(number, self._receive)
            # calls in C libraries continue: most treat EINTR as a failure
            signal.siginterrupt(number, False)
        self._former_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        myself = weakref.ref(self)  # the hook below is never removed
        os.register_at_fork(after_in_child=lambda: _forget(myself()))

    def _restore(self) -> None:
        if self._former:
            signal.set_wakeup_fd(self._former_wakeup)
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former.clear()


def _forget(signals: Signals | None) -> None:
    """Resets signals in a forked child (a worker that reads data): SIGTERM ends it, as its parent
    expects, and nothing is sent to the parent."""
    if signals is not None:
        signals._restore()
