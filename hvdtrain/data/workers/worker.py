"""A worker process: reads samples into shared memory until the rank that it works for ends."""

from __future__ import annotations

import contextlib
import importlib.util
import mmap
import os
import pickle  # of the rank's process, through a pipe
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import NoReturn

from hvdtrain.core.own_line import own_line
from hvdtrain.data.workers.worker_pool import Readable, shared_arrays
from hvdtrain.errors import UserError, first_line

_is_worker = False
_SOFT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # a rank acts on them, and ends its workers


class EndOfScript(BaseException):
    """Raised where the user's script starts training: a worker needs what is defined before."""


def end_script_of_worker() -> None:
    """Called where training starts. Raises EndOfScript in a worker process, whose script has no `if __name__ == "__main__"`."""
    if _is_worker:
        raise EndOfScript


def work() -> NoReturn:
    """The whole of a worker: it has the numbers of its two pipes and of its memory from the command line."""
    global _is_worker  # noqa: PLW0603 (of this process, for its whole life)
    _is_worker = True
    for number in _SOFT:
        signal.signal(number, signal.SIG_IGN)
    commands, answers, memory, at_once = map(int, sys.argv[2:6])
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(Connection(commands, writable=False), inbox), daemon=True).start()
    outbox = Connection(answers, readable=False)
    try:
        samples = _unpack(inbox.get())
    except BaseException as error:
        outbox.send_bytes(pickle.dumps(_for_the_rank(error, "imports the code of its Dataset")))
        os._exit(0)
    arrays = shared_arrays(mmap.mmap(memory, 0), samples.fields, at_once)
    os.close(memory)
    outbox.send_bytes(pickle.dumps(None))
    while True:
        indices, seeds = pickle.loads(inbox.get())
        failed = None
        try:
            samples.read_into(arrays, indices, seeds)
        except BaseException as error:
            failed = _for_the_rank(error, "reads")
        outbox.send_bytes(pickle.dumps(failed))


def _receive(commands: Connection, inbox: queue.SimpleQueue[bytes]) -> None:
    """Ends this process, whatever it does, when the rank has gone: its end of the pipe closes then."""
    try:
        while True:
            inbox.put(commands.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def _unpack(message: bytes) -> Readable:
    program, arguments, packed = pickle.loads(message)
    sys.argv = arguments
    if program is not None:
        _define(program)
    samples: Readable = pickle.loads(packed)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    return samples


def _define(program: str) -> None:
    """Runs the rank's script as a module, up to where it starts training; it is __main__ here, as it is there."""
    spec = importlib.util.spec_from_file_location("__mp_main__", program)  # as multiprocessing names it
    assert spec is not None and spec.loader is not None, program
    module = importlib.util.module_from_spec(spec)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    with contextlib.suppress(EndOfScript):
        spec.loader.exec_module(module)


def _for_the_rank(error: BaseException, doing: str) -> UserError:
    if isinstance(error, UserError):
        return UserError(error.what, error.where, error.fix)
    what = f"a worker process that {doing}: {type(error).__name__}: {first_line(Exception(error))}"
    return UserError(what, own_line(error), "correct it there; or data.workers=0")
