"""A child process that gives readers one hostile input after another, monitored, with limits of
memory and time."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.errors import UserError

PROJECT = Path(__file__).parents[2]
LIMIT_S = 20.0  # of one input, its making included: the slowest took 3 s on a busy core
LIMIT_BYTES = 2**30  # of address space above what the process had before the first input
LIMIT_TEXT = 4000  # characters of a message
CANARY = "8c1f-canary-of-the-environment"  # the value of $SECRET: no configuration may hold it

STARTS = (
    "os.system",
    "subprocess.Popen",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.forkpty",
    "pty.spawn",
    "ctypes.dlopen",
)
TALKS = (
    "socket.connect",
    "socket.bind",
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "urllib.Request",
    "webbrowser.open",
)
LINKS = ("os.symlink", "os.link")  # whose first path may be anywhere
TWO = (*LINKS, "os.rename")
CHANGES = (
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.symlink",
    "os.link",
    "os.truncate",
    "os.chmod",
    "os.chown",
    "shutil.rmtree",
)
# lays an input into a folder; what it returns reads it, and checks
Reader = Callable[[np.random.Generator, Path], Callable[[], object]]


class Forbidden(BaseException):
    """Something that no input may bring a reader to do; no reader can catch it by mistake."""


@dataclass
class Tally:
    """What became of the inputs of one reader."""

    tried: int = 0
    read: int = 0
    refused: int = 0
    spent_s: float = 0.0
    slowest_s: float = 0.0
    slowest: int = 0  # the number of that input


@dataclass
class Report:
    tallies: dict[str, Tally] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(
            f"{name:8} {t.tried:7} inputs: {t.read} read, {t.refused} refused, slowest "
            f"{t.slowest_s:.2f} s (number {t.slowest})"
            for name, t in self.tallies.items()
        )


class Watchdog:
    """An audit hook: while it is on, nothing is started, called over the network, or touched
    outside `home`."""

    def __init__(self, home: Path) -> None:
        self.on = False
        self.inside = (str(home), "/dev/null")
        self.readable = (
            *self.inside,
            str(PROJECT),
            sys.prefix,
            sys.base_prefix,
            "/proc/self",
            "/usr",
            "/etc/ld.so.cache",
            "/sys",
        )

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and self._forbidden(event, arguments):
            self.stop(event, arguments)

    def _forbidden(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "exec":
            return "<string>" in repr(arguments[0]) and not self._of_python()
        if event in CHANGES:
            return not all(
                self._within(path, self.inside)
                for path in arguments[event in LINKS : 1 + (event in TWO)]
            )
        if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
            flags = arguments[2]
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
                return not self._within(
                    arguments[0], self.inside, follow=not flags & (os.O_NOFOLLOW | os.O_EXCL)
                )
            return not self._within(arguments[0], self.readable)
        return event in STARTS or event in TALKS

    def stop(self, event: str, arguments: tuple[Any, ...]) -> None:
        self.on = False
        raise Forbidden(f"{event} {arguments!r:.300}")

    def _within(self, path: Any, places: tuple[str, ...], follow: bool = False) -> bool:
        text = os.fsdecode(path)
        whole = (
            os.path.realpath(text)
            if follow
            else os.path.join(os.path.realpath(os.path.dirname(text)), os.path.basename(text))
        )
        return any(whole == place or whole.startswith(f"{place}/") for place in places)

    def _of_python(self) -> bool:
        """Whether it is Python that writes a method of a dataclass or named tuple, or reads an
        annotation."""
        return sys._getframe(3).f_code.co_filename.endswith(
            ("dataclasses.py", "collections/__init__.py", "typing.py")
        )


def generator(name: str, seed: int, number: int) -> np.random.Generator:
    """What input `number` of a reader is made from."""
    return np.random.default_rng([seed, sum(name.encode()), number])


def one(
    name: str, reader: Reader, seed: int, number: int, watch: Watchdog, scratch: Path
) -> tuple[str, str]:
    """Returns ("read" | "refused" | "finding", description)."""
    home = scratch / "input"
    home.mkdir()
    os.chdir(home)
    captured = io.StringIO()
    read = reader(generator(name, seed, number), home)
    try:
        with contextlib.redirect_stderr(captured), contextlib.redirect_stdout(captured):
            watch.on = True
            try:
                read()
            finally:
                watch.on = False
        return "read", ""
    except UserError as error:
        return check_refusal(error)
    except BaseException as error:
        return "finding", "".join(traceback.format_exception(error, limit=-4))
    finally:
        os.chdir(scratch)
        shutil.rmtree(os.fsencode(home))


def check_refusal(error: UserError) -> tuple[str, str]:
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    if any(isinstance(cause, (MemoryError, Forbidden)) for cause in causes):
        return "finding", f"out of memory, reported as: {error}"
    if not error.what or not error.where or len(str(error)) > LIMIT_TEXT or CANARY in str(error):
        return (
            "finding",
            f"a message of {len(str(error))} characters, or with a secret: {str(error)[:300]!r}",
        )
    return "refused", ""


def child(order: Mapping[str, Any], readers: Mapping[str, Reader]) -> None:
    """Works through its order. Writes the current input to `now`, which the parent reads if this
    process dies."""
    scratch = Path(order["scratch"])
    report = {name: Tally(**tally) for name, tally in order["tallies"].items()}
    watch = Watchdog(scratch / "input")
    seed = order["seed"]
    warnings.simplefilter("default")
    sys.addaudithook(watch)
    limit_memory(order["limit_bytes"])
    now = (scratch / "now").open("r+")
    for name, tally in report.items():
        while tally.spent_s < order["share_s"] or tally.tried < order["least"]:
            number = tally.tried
            tally.tried += 1
            now.seek(0)
            now.write(
                json.dumps([name, number, {key: asdict(value) for key, value in report.items()}])
                + "\n"
            )
            now.flush()
            faulthandler.dump_traceback_later(order["limit_s"], exit=True)
            begun = time.perf_counter()
            result, found = one(name, readers[name], seed, number, watch, scratch)
            elapsed_s = time.perf_counter() - begun
            faulthandler.cancel_dump_traceback_later()
            tally.spent_s += elapsed_s
            if elapsed_s > tally.slowest_s:
                tally.slowest_s = elapsed_s
                tally.slowest = number
            tally.read += result == "read"
            tally.refused += result == "refused"
            if result == "finding":
                print(json.dumps(f"{name} {number}: {found}"), flush=True)
    print(json.dumps({key: asdict(value) for key, value in report.items()}), flush=True)


def limit_memory(more: int) -> None:
    """Limits this process to `more` bytes of additional address space, files of 4 GiB, and no core
    file."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    for what, limit in (
        (resource.RLIMIT_AS, pages * resource.getpagesize() + more),
        (resource.RLIMIT_FSIZE, 2**34),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (limit, limit))


def fuzz(
    script: Path,
    names: tuple[str, ...],
    seed: int,
    seconds: float,
    limit_s: float = LIMIT_S,
    most: int = 20,
    least: int = 0,
) -> Report:
    """Gives each reader of `script` its equal share of the seconds, and `least` inputs on a machine
    however slow; a child that dies is a finding, and another one continues, up to `most`.
    """
    report = Report({name: Tally() for name in names})
    environment = {
        **os.environ,
        "SECRET": CANARY,
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "MALLOC_ARENA_MAX": "2",
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(PROJECT), str(Path(__file__).parent)])
    with tempfile.TemporaryDirectory() as scratch:
        environment["XDG_CACHE_HOME"] = os.path.join(scratch, "input", ".cache")
        while len(report.findings) < most:
            (Path(scratch) / "now").touch()
            tallies = {name: asdict(tally) for name, tally in report.tallies.items()}
            order = {
                "scratch": scratch,
                "seed": seed,
                "share_s": seconds / len(names),
                "limit_s": limit_s,
                "tallies": tallies,
                "least": least,
            }
            order |= {"limit_bytes": LIMIT_BYTES}
            command = [sys.executable, str(script), json.dumps(order)]
            ended = subprocess.run(
                command,
                cwd=PROJECT,
                env=environment,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
            lines = [json.loads(line) for line in ended.stdout.splitlines()]
            report.findings += [line for line in lines if isinstance(line, str)]
            if lines and isinstance(lines[-1], dict):
                report.tallies = {name: Tally(**tally) for name, tally in lines[-1].items()}
                break
            shutil.rmtree(os.path.join(scratch, "input"), ignore_errors=True)
            now = (Path(scratch) / "now").read_text().splitlines()
            assert now, ended.stderr  # the script itself is broken
            name, number, tallies = json.loads(now[0])
            report.tallies = {key: Tally(**tally) for key, tally in tallies.items()}
            report.tallies[name].spent_s += limit_s
            report.findings.append(
                f"{name} {number}: the process ended with {ended.returncode}: "
                f"{ended.stderr[-1500:]}"
            )
    return report
