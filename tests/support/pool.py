"""Ranks that a test session starts once for an engine and a size, and calls functions of
tests/support on.

    on_ranks("mpi", 2, "norms_on_ranks:apart_by_case", "mpi")        what the function returned on
    each rank, through JSON

A call that fails or hangs, and one after which a rank's environment is another, ends the ranks; the
next call gets new ones. A call that has failed is not made again: a hundred tests that ask for one
result do not wait a hundred times for what hangs. Tests whose ranks are signalled or ended start
their own, by `alone()`.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from ranks import HANG_S, Job

# kinds of ranks that wait at a time in a process of pytest: each rank has torch in its memory
AT_MOST = 2
START_S = 300.0
OTHERS_S = 2.0  # for the errors of other ranks, after the first one

Kind = tuple[Any, ...]


def on_ranks(
    engine: str,
    size: int,
    function: str,
    *arguments: Any,
    env: dict[str, str] | None = None,
    hosts: int = 1,
    limit_s: float = HANG_S,
) -> list[Any]:
    """Returns the results of `module:function(communicator, *arguments)` on all ranks. Raises
    AssertionError with the tracebacks of ranks.

    env: environment of new ranks, used if the waiting ranks have another; hosts: number of hosts
    that the ranks assume.
    """
    kind = (engine, size, hosts, tuple(sorted((env or {}).items())))
    asked = (kind, function, json.dumps(arguments))
    if asked in _FAILED:
        raise AssertionError(f"as before: {_FAILED[asked]}")
    if kind not in _WAITING:
        while len(_WAITING) >= AT_MOST:
            _end(next(iter(_WAITING)))
        _WAITING[kind] = WaitingRanks(engine, size, hosts, env or {})
    ranks = _WAITING[kind] = _WAITING.pop(kind)  # the last one used is the last one ended
    try:
        results, is_as_before = ranks.call(function, arguments, limit_s)
    except BaseException as error:
        _FAILED[asked] = str(error)
        _end(kind)
        raise
    if not is_as_before:
        _end(kind)
    return results


def alone(function: str, *arguments: Any) -> list[str]:
    """The arguments of Python for ranks of a test's own, which call `module:function(*arguments)`
    once; its result is the exit code."""
    return ["tests/support/on_ranks.py", function, json.dumps(arguments)]


def end_all() -> None:
    """Ends the ranks that wait."""
    for kind in list(_WAITING):
        _end(kind)


class WaitingRanks:
    """Ranks of one kind."""

    def __init__(self, engine: str, size: int, hosts: int, env: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hvd")
        # Horovod's thread looks for work each millisecond, for a fifth of a core on each rank
        self._sleeps = engine == "horovod"
        self._pids: list[int] = []
        address = str(Path(self._folder.name, "calls"))
        program = alone("waiting_rank:wait", engine, hosts, address)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(size)
            listener.settimeout(0.2)
            self._job = Job(
                0 if engine == "single" else size,
                program,
                timeout_s=24 * 3600,
                env=env,
                is_warm=True,
            )
            self._connections: dict[
                int, tuple[socket.socket, Any]
            ] = {}  # with the file that its answers are read from
            try:
                self._accept(listener, size)
            except BaseException:
                self.end()
                raise

    def _accept(self, listener: socket.socket, size: int) -> None:
        end_s = time.monotonic() + START_S
        while len(self._connections) < size:
            assert time.monotonic() < end_s and self._job.is_running(), (
                f"ranks that do not start: {self._job.errors()}"
            )
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            connection.setblocking(True)
            lines = connection.makefile("rb")
            hello = json.loads(lines.readline())
            self._connections[hello["rank"]] = connection, lines
            self._pids.append(hello["pid"])

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids if self._sleeps else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def call(
        self, function: str, arguments: tuple[Any, ...], limit_s: float
    ) -> tuple[list[Any], bool]:
        """The results, and whether each rank's process is as it was before."""
        self._signal(signal.SIGCONT)
        message = (
            json.dumps(
                {"function": function, "arguments": arguments, "limit_s": limit_s - 5}
            ).encode()
            + b"\n"
        )
        for connection, _ in self._connections.values():
            connection.sendall(message)
        answers = self._answers(time.monotonic() + limit_s)
        failed = {rank: answer["error"] for rank, answer in answers.items() if "error" in answer}
        missing = sorted(set(self._connections) - set(answers))
        if failed or missing:
            errors = [f"rank {rank}:\n{error}" for rank, error in sorted(failed.items())]
            silent = [f"without an answer: ranks {missing}"] if missing else []
            raise AssertionError(
                "\n".join([f"{function}{arguments}", *errors, *silent, self._job.errors()[-6000:]])
            )
        self._signal(signal.SIGSTOP)
        return [answers[rank]["result"] for rank in sorted(answers)], not any(
            answer["changed"] for answer in answers.values()
        )

    def _answers(self, end_s: float) -> dict[int, dict[str, Any]]:
        """Returns the answers of all ranks; after an error, of the ranks that answer soon."""
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, (connection, lines) in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, (rank, lines))
            while selector.get_map() and (left_s := end_s - time.monotonic()) > 0:
                for key, _ in selector.select(left_s):
                    selector.unregister(key.fileobj)
                    rank, lines = key.data
                    line = lines.readline()
                    answers[rank] = json.loads(line) if line else {"error": "ended"}
                    if "error" in answers[rank]:
                        end_s = min(end_s, time.monotonic() + OTHERS_S)
        return answers

    def end(self) -> None:
        self._job.__exit__()
        for connection, lines in self._connections.values():
            lines.close()
            connection.close()
        self._folder.cleanup()


_WAITING: dict[Kind, WaitingRanks] = {}  # in the order of their last call
_FAILED: dict[tuple[Kind, str, str], str] = {}  # what a call failed with


def _end(kind: Kind) -> None:
    _WAITING.pop(kind).end()
