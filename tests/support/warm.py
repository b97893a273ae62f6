"""Pythons that start with torch imported: one process imports it, and a fork of that process runs
`python ARGUMENTS`.

Importing torch takes 3 s of a core, nine tenths of a tiny job, and the tests start a thousand of
them. `command(argv, env)` stands for `python *argv`: it is a small client (warm_client.py) in the
place where a launcher starts a rank, with that rank's environment, folder and standard streams. It
hands them to the server, which forks. It forwards signals, and ends with the fork's exit status. If
the client is killed, so is the fork. The fork imports hvdtrain itself, like any Python, and MPI
starts in it at the earliest.

It differs from a Python that starts by itself. The hash seed is the server's. /proc has the
server's command and environment. Memory shared with the server is counted. Modules are not torn
down at the end, and files that they left open are not flushed. Tests of these say is_warm=False.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, NoReturn

from record import note

ADDRESS = "HVDTRAIN_TEST_WARM"  # the variable with the server's socket
# What Python and libraries read once, at their start: a process for which it differs starts by
# itself.
AT_START = (
    "PYTHON",
    "OMP_",
    "OPENBLAS_",
    "MKL_",
    "LD_",
    "MALLOC_",
    "TORCH_",
    "CUDA_",
    "LC_",
    "LANG",
    "TZ",
)
PATH = "PYTHONPATH"  # of these, the fork can set it
# What each job imports besides torch and hvdtrain: 0.2 of its 0.6 s of a core.
LIBRARIES = (
    "numpy.ma",
    "pydantic.json_schema",
    "pydantic.main",
    "pydantic.plugin._loader",
    "pydantic.type_adapter",
    "pydantic.types",
    "xxhash",
    "yaml",
    "zoneinfo",
)
# a folder next to the socket: a link for each running fork, from its client's process number to the
# fork's
FORKS = "forks"

_servers: list[
    tuple[subprocess.Popen[bytes], tempfile.TemporaryDirectory[str]]
] = []  # of this process: none or one


def start(env: dict[str, str]) -> None:
    """Starts the server with `env` if this process and its parent have none. It ends with end() or
    with this process."""
    if ADDRESS in os.environ:
        return
    folder = tempfile.TemporaryDirectory(prefix="hvd")
    address = Path(folder.name, "python")
    address.with_suffix(".json").write_text(json.dumps(env))
    (address.parent / FORKS).mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen(512)  # who comes while torch is imported waits
        program = (
            f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import warm; "
            f"warm.serve({listener.fileno()})"
        )
        server = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            env={name: value for name, value in env.items() if name != PATH},
            pass_fds=[listener.fileno()],
            process_group=0,
        )
    _servers.append((server, folder))
    os.environ[ADDRESS] = str(address)


def end() -> None:
    """Ends the server that this process has started, and what it has forked."""
    while _servers:
        server, folder = _servers.pop()
        server.communicate(timeout=60)
        folder.cleanup()
        del os.environ[ADDRESS]


def command(argv: Sequence[str], env: dict[str, str]) -> list[str]:
    """Returns the command that runs `python *argv` under `env`, in a fork of the server if
    possible."""
    is_known = bool(argv) and (argv[0] in ("-m", "-c") or argv[0].endswith(".py"))
    if not is_known or not os.environ.get(ADDRESS):
        return [sys.executable, *argv]
    servers = json.loads(Path(os.environ[ADDRESS]).with_suffix(".json").read_text())
    differing = {
        name for name in env.keys() | servers.keys() if env.get(name) != servers.get(name)
    } - {PATH}
    if any(name.startswith(AT_START) for name in differing):
        return [sys.executable, *argv]
    return [
        sys.executable,
        "-I",
        "-S",
        str(Path(__file__).with_name("warm_client.py")),
        os.environ[ADDRESS],
        *argv,
    ]


def forks() -> dict[int, int]:
    """{fork: client}, both as numbers of processes, of the forks that run."""
    folder = Path(os.environ.get(ADDRESS, "/nowhere")).parent / FORKS
    found = {}
    for link in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(
            FileNotFoundError
        ):  # this one has ended, and its link is gone, since the folder was read
            found[int(os.readlink(link))] = int(link.name)
    return found


class Request(NamedTuple):
    """What a client asks for."""

    argv: list[str]
    env: dict[str, str]
    folder: str
    streams: list[int]  # descriptors of the standard input, output and error


class Fork(NamedTuple):
    """A process that runs what a client asked for."""

    pid: int
    client: socket.socket
    link: Path  # in FORKS
    test: str


def serve(listener_fd: int) -> None:
    """Forks for each client until the standard input ends; a fork returns when what it was to run
    has ended."""
    import torch

    sys.modules["torchvision"] = None  # type: ignore[assignment]  # what follows would import it, where it is there
    import torch._dynamo  # noqa: F401  # an optimizer imports it: 2 s of a core more

    del sys.modules["torchvision"]
    for name in LIBRARIES:
        importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libraries = sys.path[2:]  # without the folders of this file and of -c
    gc.collect()
    gc.freeze()  # a search for garbage in a fork copies none of these pages
    with socket.socket(fileno=listener_fd) as listener:
        request = Server(listener).serve()
    if request:
        _leave(_code_of(request, libraries))


class Server:
    """Forks, and watches its forks and their clients."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._forks: dict[int, Fork] = {}  # by a descriptor that is ready when the fork has ended
        self._selector = selectors.PollSelector()
        self._selector.register(0, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)

    def serve(self) -> Request | None:
        """Until the standard input ends, which ends all forks; in a fork, what it is to run."""
        while True:
            for key, _ in self._selector.select():
                if self._selector.get_map().get(key.fd) is not key:  # it was closed since
                    continue
                if key.fileobj == 0:
                    for fork in self._forks.values():
                        os.kill(fork.pid, signal.SIGKILL)
                    return None
                if key.fileobj is self._listener:
                    if request := self._fork():
                        return request
                elif key.fd in self._forks:
                    self._tell_that_it_ended(key.fd)
                else:
                    self._end_fork_of(key)

    def _fork(self) -> Request | None:
        """What the fork of a new client is to run: in that fork alone."""
        client, _ = self._listener.accept()
        try:
            _, streams, _, _ = socket.recv_fds(client, 1, 3)
            with client.makefile("rb") as lines:
                request = Request(**json.loads(lines.readline()), streams=streams)
        except (OSError, ValueError):  # it was ended meanwhile
            client.close()
            return None
        # its pid, uid and gid
        (of_client,) = struct.unpack(
            "i8x", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        link = Path(self._listener.getsockname()).parent / FORKS / str(of_client)
        if not (pid := os.fork()):
            link.symlink_to(str(os.getpid()))  # before it runs anything that is waited for
            for descriptor in [*self._selector.get_map(), client.fileno()]:
                if descriptor:
                    os.close(descriptor)
            client.detach(), self._listener.detach()
            return request
        for stream in streams:
            os.close(stream)
        descriptor = os.pidfd_open(pid)
        self._forks[descriptor] = Fork(
            pid, client, link, request.env.get("PYTEST_CURRENT_TEST", "")
        )
        self._selector.register(descriptor, selectors.EVENT_READ)
        self._selector.register(client, selectors.EVENT_READ, pid)
        with contextlib.suppress(OSError):
            client.sendall(b"%d\n" % pid)
        return None

    def _tell_that_it_ended(self, descriptor: int) -> None:
        fork = self._forks.pop(descriptor)
        fork.link.unlink(missing_ok=True)  # the folder goes with the tests
        _, status, used = os.wait4(fork.pid, 0)
        note({"test": fork.test.rpartition(" (")[0], "cpu_s": used.ru_utime + used.ru_stime})
        with contextlib.suppress(OSError):
            fork.client.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
        with contextlib.suppress(KeyError):
            self._selector.unregister(fork.client)
        self._selector.unregister(descriptor)
        fork.client.close()
        os.close(descriptor)

    def _end_fork_of(self, key: selectors.SelectorKey) -> None:
        """A client that is ready to be read was killed: it never says more."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(key.data, signal.SIGKILL)
        self._selector.unregister(key.fileobj)


def _code_of(request: Request, libraries: list[str]) -> int:
    """Runs what `python *argv` does, in this process, and returns its exit code."""
    os.setpgid(0, 0)  # signals to the client's group come by the client alone
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ |= request.env
    os.chdir(request.folder)
    tempfile.tempdir = None  # it was looked up under another environment
    kind, *rest = request.argv if request.argv[0] in ("-m", "-c") else ("", *request.argv)
    first = {"-m": request.folder, "-c": ""}.get(kind, os.path.dirname(os.path.realpath(rest[0])))
    of_env = [os.path.abspath(path) for path in request.env.get(PATH, "").split(os.pathsep) if path]
    sys.path[:] = [first, *dict.fromkeys([*of_env, *libraries])]
    sys.orig_argv = [sys.executable, *request.argv]
    for module in ("warm", "record"):
        del sys.modules[module]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    try:
        _run_main(kind, rest)
    except SystemExit as leaves:
        if isinstance(leaves.code, str):
            print(leaves.code, file=sys.stderr)
        return leaves.code if isinstance(leaves.code, int) else bool(leaves.code)
    except BaseException as error:
        error = error.with_traceback(_from_main_on(error))
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _leave(code: int) -> NoReturn:
    """Ends this process like Python does, but without tearing down its modules, which takes 0.5 s
    of a core for torch's."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    mpi = sys.modules.get("mpi4py.MPI")
    # mpi4py does so after the modules, unless that is turned off; hvdtrain finalizes MPI itself,
    # except on ranks that have lost others
    if (
        mpi
        and sys.modules["mpi4py"].rc.finalize is not False
        and mpi.Is_initialized()
        and not mpi.Is_finalized()
    ):
        mpi.Finalize()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    # with the ends of C libraries, while no other thread runs Python
    ctypes.PyDLL(None).exit(code & 0xFF)
    raise AssertionError


def _run_main(kind: str, rest: list[str]) -> None:
    main = sys.modules["__main__"].__dict__
    for name in ("sys", "warm"):  # of the server's own program
        del main[name]
    if kind == "-m":
        sys.argv = ["-m", *rest[1:]]
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]  # what `python -m` calls
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), main)
    else:
        sys.argv = rest
        main["__file__"] = rest[0]
        exec(compile(Path(rest[0]).read_bytes(), rest[0], "exec"), main)


def _from_main_on(error: BaseException) -> TracebackType | None:
    """The traceback without the frames of this file and of runpy."""
    step = error.__traceback__
    while step and step.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        step = step.tb_next
    return step
