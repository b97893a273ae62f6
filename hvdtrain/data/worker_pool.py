"""Processes that read samples for a rank. They are started without fork, get commands through
pipes, and leave samples in shared memory.

Nothing of a worker outlives its rank: it ends when the rank's end of its pipe closes, and its
shared memory has no name.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import mmap
import os
import pickle  # only unpickles what our own processes send through a pipe
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NoReturn, Protocol

import numpy as np

from hvdtrain.core.arrays import Batch
from hvdtrain.core.import_torchvision import define_missing_operators
from hvdtrain.core.own_line import own_line
from hvdtrain.data.field import Field
from hvdtrain.errors import UserError, first_line

_SHARED_BYTES = 2**23  # shared memory for the samples of a worker
_MOST_AT_ONCE = 256  # samples requested from a worker at a time
# not `python -m`, because __main__ of a worker is the rank's program. sys.path is set first, to
# import hvdtrain
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from hvdtrain.data.worker_pool "
    "import work; work()"
)
# removed from a worker's environment: it is not a rank, whatever MPI user code imports
_LAUNCHERS = (
    "OMPI_COMM_",
    "OMPI_UNIVERSE_",
    "PMIX_",
    "PMI_",
    "PRTE_",
    "HYDRA_",
    "MPI_LOCAL",
    "HOROVOD_",
)


class Readable(Protocol):
    """The interface of what a worker reads from; each worker gets a pickled copy."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """Fields of each sample that read_into() reads."""

    @property
    def name(self) -> str:
        """The name of the data, for messages."""

    @property
    def defined_at(self) -> str:
        """Returns the file and line of its class, for the error if it cannot be pickled."""

    def read_into(
        self, arrays: Mapping[str, np.ndarray], indices: np.ndarray, seeds: np.ndarray | None
    ) -> None:
        """Writes the samples into the first rows of the arrays: each with its seed, or as for
        evaluation without seeds. Raises UserError."""


class WorkerPool:
    """Workers that the first read() starts. Raises UserError if the samples cannot be sent to them.

    of: the setting of their number, for messages.
    """

    def __init__(self, samples: Readable, workers: int, of: str = "data.workers") -> None:
        self._samples = samples
        self._count = workers
        self._of = of
        self.workers: list[_Worker] = []  # empty until they are started
        self._packed: bytes | None = _pack(samples)
        self._at_once = max(1, min(_MOST_AT_ONCE, _SHARED_BYTES // max(1, _bytes(samples.fields))))
        self._lock = threading.Lock()
        weakref.finalize(self, _end, self.workers)
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        # one thread for each worker, waiting for it
        self._threads: ThreadPoolExecutor | None = None

    def read(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """Reads samples into new arrays, divided among the workers. seeds: as for
        Readable.read_into(), uint64 (n,).

        Raises UserError if a worker raised one, or if a worker ended.
        """
        threads = self._start()
        batch = {
            name: np.empty((len(indices), *field.shape), field.dtype)
            for name, field in self._samples.fields.items()
        }
        pieces = max(1, -(-len(indices) // self._at_once), min(self._count, len(indices)))
        edges = [len(indices) * piece // pieces for piece in range(pieces + 1)]
        futures = []
        for piece in map(slice, edges, edges[1:]):
            out = {name: array[piece] for name, array in batch.items()}
            futures.append(
                threads.submit(
                    self._read_piece, out, indices[piece], None if seeds is None else seeds[piece]
                )
            )
        for future in futures:
            future.result()
        return batch

    def close(self) -> None:
        """Ends the workers; no thread may be reading."""
        if self._threads is not None:
            self._threads.shutdown()
        _end(self.workers)

    def _read_piece(self, out: Batch, indices: np.ndarray, seeds: np.ndarray | None) -> None:
        worker = self._idle.get()
        try:
            worker.read_into(out, indices, seeds)
        finally:
            self._idle.put(worker)

    def _start(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                assert self._packed is not None
                try:
                    self._start_workers(self._packed)
                except BaseException:
                    _end(self.workers)
                    raise
                self._packed = None
                self._threads = ThreadPoolExecutor(self._count, "hvdtrain-worker")
            return self._threads

    def _start_workers(self, packed: bytes) -> None:
        """Starts all workers at once, since each takes a while. Raises UserError if one cannot be
        started, or if the samples cannot be sent."""
        for _ in range(self._count):
            try:
                self.workers.append(_Worker(self._samples, self._at_once, self._of))
            except OSError as error:
                what = f"cannot start {self._count} worker processes of {self._of}: {error}"
                raise UserError(
                    what,
                    f"process {os.getpid()}",
                    "fewer of them, or more memory, processes and open files",
                ) from error
        for worker in self.workers:
            worker.send(packed)
        for worker in self.workers:
            worker.answer("it started")
        for worker in self.workers:
            self._idle.put(worker)


class _Worker:
    """A worker process and its shared memory for samples."""

    def __init__(self, samples: Readable, at_once: int, of: str) -> None:
        self._of = of
        memory = os.memfd_create("hvdtrain-samples")
        with contextlib.ExitStack() as ours:
            ours.callback(os.close, memory)
            size = max(1, at_once * _bytes(samples.fields))
            os.ftruncate(memory, size)
            self.arrays = shared_arrays(mmap.mmap(memory, size), samples.fields, at_once)
            inputs, commands = os.pipe()
            answers, outputs = os.pipe()
            ours.callback(os.close, inputs)
            ours.callback(os.close, outputs)
            self._commands = Connection(commands, readable=False)
            self._answers = Connection(answers, writable=False)
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    _PROGRAM,
                    json.dumps(sys.path),
                    str(inputs),
                    str(outputs),
                    str(memory),
                    str(at_once),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(inputs, outputs, memory),
                env={
                    key: value
                    for key, value in os.environ.items()
                    if not key.startswith(_LAUNCHERS)
                }
                | {"OMP_NUM_THREADS": "1"},
            )

    def read_into(self, out: Batch, indices: np.ndarray, seeds: np.ndarray | None) -> None:
        what = (
            f"it read samples {indices.tolist()}"
            if len(indices) < 6
            else f"it read sample {indices[0]} and {len(indices) - 1} more"
        )
        with contextlib.suppress(OSError):  # it ended; answer() reports that
            self.send(pickle.dumps((indices, seeds)))
        self.answer(what)
        for name, array in self.arrays.items():
            out[name][:] = array[: len(indices)]

    def send(self, message: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._commands.send_bytes(message)

    def answer(self, what: str) -> None:
        """Waits until the worker has done `what`. Raises the UserError that it sent, or a UserError
        if it ended."""
        try:
            error = pickle.loads(self._answers.recv_bytes())
        except (EOFError, OSError):
            raise self._ended(what) from None
        if error is not None:
            raise error

    def _ended(self, what: str) -> UserError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        code = self.process.poll()
        if code is None:
            return UserError(
                f"worker process {self.process.pid} of {self._of} closed its pipe while {what}",
                f"process {os.getpid()}",
                "",
            )
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        fix = (
            (
                "look for its message above; signal 9 often means too little memory: use fewer "
                "workers"
            )
            if code < 0
            else "see its own message above"
        )
        return UserError(
            f"worker process {self.process.pid} of {self._of} ended by {how} while {what}",
            f"process {os.getpid()}",
            fix,
        )

    def end(self) -> None:
        self._commands.close()
        self.process.kill()
        self.process.wait()
        self._answers.close()


def _end(workers: list[_Worker]) -> None:
    """Ends workers and removes them from the list, so that none is ended twice."""
    while workers:
        workers.pop().end()


def shared_arrays(
    memory: mmap.mmap, fields: Mapping[str, Field], rows: int
) -> dict[str, np.ndarray]:
    """Returns arrays (rows, *shape) of the fields, one after the other in memory."""
    arrays = {}
    start = 0
    for name, field in fields.items():
        count = rows * math.prod(field.shape)
        arrays[name] = np.frombuffer(memory, field.dtype, count, start).reshape(rows, *field.shape)
        start += _padded(field) * rows
    return arrays


def _bytes(fields: Mapping[str, Field]) -> int:
    """Returns the number of bytes of one sample."""
    return sum(_padded(field) for field in fields.values())


def _padded(field: Field) -> int:
    return -(-math.prod(field.shape) * np.dtype(field.dtype).itemsize // 8) * 8


def _pack(samples: Readable) -> bytes:
    """Pickles what a worker needs: the samples, and the rank's program if it defines their
    classes."""
    fix = (
        "define class, transforms and collate function at the top of a module, no lambda; open "
        "files in __getitem__; or data.workers=0"
    )
    try:
        packed = pickle.dumps(samples)
    except Exception as error:  # pickle passes on the exceptions of user objects
        what = (
            f"{samples.name} cannot be sent to a worker process: {type(error).__name__}: "
            f"{first_line(error)}"
        )
        raise UserError(what, samples.defined_at, fix) from None
    program = _program() if b"__main__" in packed else None
    if b"__main__" in packed and program is None:
        what = (
            f"{samples.name} is defined in a notebook or on a command line, where a worker "
            "process cannot import it"
        )
        raise UserError(
            what,
            samples.defined_at,
            "define it in a module: a file beside the notebook; or data.workers=0",
        )
    return pickle.dumps((program, sys.argv, "torchvision" in sys.modules, packed))


def _program() -> str | None:
    """Returns the path of the script that this process runs."""
    main: Any = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    return os.path.abspath(path) if path is not None and os.path.isfile(path) else None


_is_worker = False
# signals that a rank handles, and then ends its workers
_SOFT = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class EndOfScript(BaseException):
    """Raised where the user's script starts training, because a worker only needs the definitions
    before."""


def end_script_of_worker() -> None:
    """Called where training starts. Raises EndOfScript in a worker process, if its script has no
    `if __name__ == "__main__"`."""
    if _is_worker:
        raise EndOfScript


def work() -> NoReturn:
    """Runs a worker process. The command line has the file descriptors of its two pipes and of its
    memory."""
    global _is_worker  # noqa: PLW0603 (of this process, for its whole life)
    _is_worker = True
    for number in _SOFT:
        signal.signal(number, signal.SIG_IGN)
    commands, answers, memory, at_once = map(int, sys.argv[2:6])
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(
        target=_receive, args=(Connection(commands, writable=False), inbox), daemon=True
    ).start()
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
    """Receives commands. Ends this process, whatever it is doing, when the rank's end of the pipe
    closes."""
    try:
        while True:
            inbox.put(commands.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def _unpack(message: bytes) -> Readable:
    program, arguments, needs_torchvision, packed = pickle.loads(message)
    sys.argv = arguments
    if needs_torchvision:
        define_missing_operators()
    if program is not None:
        _define(program)
    samples: Readable = pickle.loads(packed)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    return samples


def _define(program: str) -> None:
    """Runs the rank's script as __main__, as on the rank, up to where training starts."""
    # the name that multiprocessing uses
    spec = importlib.util.spec_from_file_location("__mp_main__", program)
    assert spec is not None and spec.loader is not None, program
    module = importlib.util.module_from_spec(spec)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    with contextlib.suppress(EndOfScript):
        spec.loader.exec_module(module)


def _for_the_rank(error: BaseException, doing: str) -> UserError:
    if isinstance(error, UserError):
        return UserError(error.what, error.where, error.fix)
    what = (
        f"in a worker process that {doing}: {type(error).__name__}: {first_line(Exception(error))}"
    )
    return UserError(what, own_line(error), "correct it there; or data.workers=0")
