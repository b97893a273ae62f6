"""Builds Horovod against the torch and MPI that are here, installs it and proves it: python -m hvdtrain.cli.horovod."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from filelock import FileLock, Timeout

from hvdtrain.cli.horovod.proof import prove
from hvdtrain.cli.horovod.wheel import compiled, corrections, released_source, run_logged, unpacked
from hvdtrain.errors import DONE, USER, UserError

VERSION = "0.28.1"
NEEDED = ("setuptools", "wheel", "packaging", "cffi", "cloudpickle", "psutil", "pyyaml")  # by Horovod's setup.py, and by Horovod

# The variables of Horovod's installation guide that change what is compiled; others (HOROVOD_CYCLE_TIME, ...) act at run time only.
BUILD_VARIABLE = re.compile(r"HOROVOD_(GPU|WITH|BUILD|CUDA|NCCL|NVTX|ROCM|CPU_OP|ALLOW_MIXED|DEBUG|LOCAL|SKIP)|(NCCL|CCL)_ROOT")


class Here(NamedTuple):
    """What Horovod must fit."""

    torch: str  # "2.13.0+cpu"
    mpi: str  # "openmpi-5.0.11"
    mpirun: Path

    @property
    def mpi_inside(self) -> bool:
        """The MPI is a part of this Python environment: a wheel from PyPI, a conda package."""
        return self.mpirun.parent.resolve() == (Path(sys.prefix) / "bin").resolve()


def look() -> Here:
    """The torch and MPI that are here, the path's MPI before the environment's; a UserError says what is missing."""
    mpirun = which("mpirun") or which("mpiexec")
    if mpirun is None:
        raise UserError("no mpirun here", "on the path and beside this Python", "load the site's MPI module, or: pip install openmpi")
    asked = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60, check=False)
    return Here(installed_version("torch") or _missing("torch"), mpi_name(asked.stdout + asked.stderr), mpirun)


def check_build_tools() -> None:
    """A UserError for the first thing that a build needs and that is not here."""
    compiler = os.environ.get("CXX", "").split()[:1] or ["c++", "g++", "clang++"]
    if not any(which(name) for name in compiler):
        where = f"PATH has none of {', '.join(compiler)}"
        raise UserError("no C++ compiler here, Horovod has to be compiled", where, "install g++ 9 or later, or set CXX")
    if which("mpicxx") is None:
        fix = "install the MPI's development files (libopenmpi-dev), or: pip install openmpi"
        raise UserError("no mpicxx here", "on the path and beside this Python", fix)
    for name in NEEDED:
        if installed_version(name) is None:
            _missing(name)
    if which("cmake") is None:
        _missing("cmake")


def which(name: str) -> Path | None:
    """A program on the path, or beside this Python."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    return Path(found) if found else None


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def mpi_name(version_output: str) -> str:
    """Which MPI, from the output of `mpirun --version`: openmpi-5.0.11, intelmpi-2021.11, mpich-4.2.0."""
    makers = (("Open MPI", "openmpi"), ("Open RTE", "openmpi"), ("OpenRTE", "openmpi"), ("Intel", "intelmpi"), ("HYDRA", "mpich"))
    maker = next((name for sign, name in makers if sign in version_output), "mpi")
    number = re.search(r"\d+\.\d+(\.\d+)*\w*", version_output)
    return f"{maker}-{number[0] if number else hashlib.sha256(version_output.encode()).hexdigest()[:8]}"


def build_variables(env: Mapping[str, str], nccl: bool) -> dict[str, str]:
    """The variables that decide what is compiled: ours, and over them the user's."""
    users = {name: value for name, value in env.items() if BUILD_VARIABLE.match(name)}
    ours = {"HOROVOD_WITH_PYTORCH": "1", "HOROVOD_WITHOUT_TENSORFLOW": "1", "HOROVOD_WITHOUT_MXNET": "1"}
    ours |= {"HOROVOD_WITH_MPI": "1", "HOROVOD_WITH_GLOO": "1"} | ({"HOROVOD_GPU_OPERATIONS": "NCCL"} if nccl else {})
    opposite = {"HOROVOD_WITH_": "HOROVOD_WITHOUT_", "HOROVOD_WITHOUT_": "HOROVOD_WITH_"}
    overruled = {re.sub(r"^HOROVOD_WITH(OUT)?_", lambda found: opposite[found[0]], name) for name in users}
    return {name: value for name, value in ours.items() if name not in overruled} | users


def build_environment(env: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of the build: this Python's programs, a compiler for each core that has 2 GiB, no surrounding make's flags."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    jobs = env.get("CMAKE_BUILD_PARALLEL_LEVEL") or max(1, min(len(os.sched_getaffinity(0)), int(memory_gib // 2)))
    path = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    if (mpicxx := which("mpicxx")) is not None:
        path = os.pathsep.join([str(mpicxx.parent), path])
    inherited = {name: value for name, value in env.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    # CMake 4 refuses the minimum versions that the libraries inside Horovod ask for, unless told to take them as 3.5.
    return {"CMAKE_POLICY_VERSION_MINIMUM": "3.5", **inherited, **variables, "PATH": path, "MAKEFLAGS": f"-j{jobs}"}


def wheel_key(version: str, here: Here, variables: Mapping[str, str]) -> str:
    """The name of a cached build: equal only where its wheel can be used."""
    mpi_home = "" if here.mpi_inside else str(here.mpirun.parent)
    rest = repr((mpi_home, platform.machine(), platform.libc_ver(), sorted(variables.items()), corrections(here.mpi_inside)))
    return f"horovod-{version}-{sys.implementation.cache_tag}-torch-{here.torch}-{here.mpi}-{hashlib.sha256(rest.encode()).hexdigest()[:8]}"


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdtrain" / "horovod"


def wheel(version: str, here: Here, variables: Mapping[str, str], rebuild: bool) -> Path:
    """The cached wheel, built first where there is none; a second builder waits for the first one's."""
    folder = cache_folder() / wheel_key(version, here, variables)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{folder}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"another process builds it, waiting: {lock.lock_file}")
        lock.acquire()
    with lock:
        for cached in () if rebuild else folder.glob("horovod-*.whl"):
            say(f"built before: {cached}")
            return cached
        return build(version, here, variables, folder)


def build(version: str, here: Here, variables: Mapping[str, str], folder: Path) -> Path:
    """A new wheel in `folder`, complete or not there; `folder`/build.log tells all."""
    check_build_tools()
    began, log = time.monotonic(), folder / "build.log"
    log.write_text("")
    env = build_environment(os.environ, variables)
    say(f"building Horovod {version} for torch {here.torch} and {here.mpi}, {env['MAKEFLAGS']}, log: {log}")
    archive = released_source(version, folder.parent, log)
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory(dir=folder) as fresh:
        source = unpacked(archive, Path(scratch), corrections(here.mpi_inside))
        made = compiled(source, Path(fresh), env, log, say)
        made = made.replace(folder / made.name)
    say(f"built in {time.monotonic() - began:.0f} s: {made}")
    return made


def install(made: Path) -> None:
    """Puts the wheel into this environment; what Horovod needs is in the extra `horovod`."""
    log = made.parent / "install.log"
    log.write_text("")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--force-reinstall", "--no-index", str(made)]
    if run_logged(command, os.environ, log):
        what = f"pip could not install {made.name}:\n{log.read_text()[-1000:]}"
        raise UserError(what, str(log), "see that this environment is yours to write")


def usable(version: str, here: Here, nccl: bool) -> bool:
    """Whether the installed Horovod is this version, was built for this torch, and proves itself."""
    if installed_version("horovod") != version or built_for_torch() != here.torch:
        return False
    try:
        say(f"Horovod {version} is installed; {prove(here.mpirun, here.mpi_inside, nccl)}")
    except UserError as error:
        say(f"Horovod {version} is installed, but:\n{error}")
        return False
    return True


def built_for_torch() -> str:
    """The version of torch that the installed Horovod was compiled with."""
    path = importlib.metadata.distribution("horovod").locate_file("horovod/metadata.json")
    return str(json.loads(Path(str(path)).read_text()).get("pytorch", "none"))


def make_usable(version: str, nccl: bool, rebuild: bool) -> None:
    """Leaves a Horovod in this environment that proved itself; a UserError says why not."""
    here, variables = look(), build_variables(os.environ, nccl)
    nccl = variables.get("HOROVOD_GPU_OPERATIONS") == "NCCL"
    if not rebuild and usable(version, here, nccl):
        return
    install(wheel(version, here, variables, rebuild))
    say(prove(here.mpirun, here.mpi_inside, nccl))


def say(line: str) -> None:
    print(line, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hvdtrain.cli.horovod", description=__doc__)
    parser.add_argument("--version", default=VERSION, help="the release of Horovod to build (%(default)s)")
    parser.add_argument("--nccl", action="store_true", help="HOROVOD_GPU_OPERATIONS=NCCL; your own HOROVOD_* variables win over it")
    parser.add_argument("--rebuild", action="store_true", help="build and install even if a usable Horovod is installed or cached")
    options = parser.parse_args(argv)
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, lambda number, _: sys.exit(128 + number))  # leaves every block, so that no compiler lives on
    try:
        make_usable(options.version, options.nccl, options.rebuild)
    except UserError as error:
        print(error, file=sys.stderr)
        return USER
    return DONE


def _missing(package: str) -> NoReturn:
    raise UserError(f"{package} is not installed in this Python", sys.prefix, "pip install 'hvdtrain[horovod]'")
