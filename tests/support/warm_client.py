"""Stands for `python ARGUMENTS`, which a fork of the server of warm.py runs: python -I -S
warm_client.py ADDRESS ARGUMENTS...

It has the fork's environment, folder and standard streams, passes on the signals that it gets, and
ends as the fork ends.
"""

import contextlib
import json
import os
import signal
import socket
import sys


def main(address: str, argv: list[str]) -> None:
    passed_on = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # until it is known to whom
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [b" "], [0, 1, 2])
        server.sendall(
            json.dumps({"argv": argv, "env": dict(os.environ), "folder": os.getcwd()}).encode()
            + b"\n"
        )
        with server.makefile("rb") as answers:
            pid = int(answers.readline())
            for number in passed_on:
                if number < signal.SIGRTMIN:
                    signal.signal(number, lambda number, _: _pass_on(pid, number))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
            code = int(answers.readline() or -signal.SIGKILL)  # nothing: the server has ended
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _pass_on(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


main(sys.argv[1], sys.argv[2:])
