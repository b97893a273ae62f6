"""hvdtrain horovod: builds Horovod for the installed torch and MPI, installs it and verifies it."""

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
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from filelock import FileLock, Timeout

from hvdtrain.errors import DONE, USER, UserError
from hvdtrain.extras.build_horovod.wheel import (
    SHA256,
    compile_wheel,
    corrections,
    cxx_of_torch,
    download_source,
    run_logged,
    toolkit_of,
    unpack,
    verify,
)

VERSION = "0.28.1"
# packages that Horovod and its setup.py need
BUILD_PACKAGES = (
    "setuptools",
    "wheel",
    "packaging",
    "cffi",
    "cloudpickle",
    "psutil",
    "pyyaml",
)

# Variables of Horovod's installation guide that change what is compiled; others
# (HOROVOD_CYCLE_TIME, ...) act at run time.
BUILD_VARIABLE = re.compile(
    r"HOROVOD_(GPU|WITH|BUILD|CUDA|NCCL|NVTX|ROCM|CPU_OP|ALLOW_MIXED|DEBUG|LOCAL|SKIP)|(NCCL|CCL)_ROOT"
)


# why Horovod could not be built for this environment
LEFT_OUT = Path(sys.prefix) / ".without-horovod"


class BuildTarget(NamedTuple):
    """The software that a build of Horovod must fit."""

    torch: str  # "2.13.0+cpu"
    mpi: str  # "openmpi-5.0.11"
    mpirun: Path
    cxx: int = 17  # the standard of C++

    @property
    def mpi_inside(self) -> bool:
        """Whether the MPI is a part of this Python environment: a wheel from PyPI, a conda
        package."""
        return self.mpirun.parent.resolve() == (Path(sys.prefix) / "bin").resolve()


def detect_target() -> BuildTarget:
    """Returns the installed torch, and the MPI on the PATH or else in this environment. Raises
    UserError if one is missing."""
    mpirun = which("mpirun") or which("mpiexec")
    if mpirun is None:
        raise UserError(
            "no mpirun found",
            "on the PATH and beside this Python",
            "load the site's MPI module, or: pip install openmpi",
        )
    version = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    torch = torch_version() or _missing("torch")
    include = importlib.metadata.distribution("torch").locate_file("torch/include")
    return BuildTarget(
        torch, mpi_name(version.stdout + version.stderr), mpirun, cxx_of_torch(Path(str(include)))
    )


def check_build_tools() -> None:
    """Raises UserError for the first missing tool or package that a build needs."""
    compiler = os.environ.get("CXX", "").split()[:1] or ["c++", "g++", "clang++"]
    if not any(which(name) for name in compiler):
        where = f"PATH has none of {', '.join(compiler)}"
        raise UserError(
            "no C++ compiler found, and Horovod must be compiled",
            where,
            "install g++ 9 or later, or set CXX",
        )
    if which("mpicxx") is None:
        fix = "install the MPI's development files (libopenmpi-dev), or: pip install openmpi"
        raise UserError("no mpicxx found", "on the PATH and beside this Python", fix)
    for name in BUILD_PACKAGES:
        if installed_version(name) is None:
            _missing(name)
    if which("cmake") is None:
        _missing("cmake")


def which(name: str) -> Path | None:
    """Returns the path of a program on the PATH, or beside this Python."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    return Path(found) if found else None


def installed_version(package: str) -> str | None:
    """Returns a package's version; None if the package is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_version() -> str | None:
    """Returns `torch.__version__` without importing torch: 2.13.0+cu130 for a CUDA build from PyPI,
    whose package version is 2.13.0."""
    try:
        path = importlib.metadata.distribution("torch").locate_file("torch/version.py")
    except importlib.metadata.PackageNotFoundError:
        return None
    text = Path(str(path)).read_text() if Path(str(path)).is_file() else ""
    found = re.search(r"^__version__ = '([^']+)'", text, re.M)
    return found[1] if found else installed_version("torch")


def mpi_name(version_output: str) -> str:
    """Returns name and version of an MPI, from the output of `mpirun --version`: openmpi-5.0.11,
    intelmpi-2021.11, mpich-4.2.0."""
    marks = (
        ("Open MPI", "openmpi"),
        ("Open RTE", "openmpi"),
        ("OpenRTE", "openmpi"),
        ("Intel", "intelmpi"),
        ("HYDRA", "mpich"),
    )
    product = next((name for mark, name in marks if mark in version_output), "mpi")
    number = re.search(r"\d+\.\d+(\.\d+)*\w*", version_output)
    return f"{product}-{number[0] if number else hashlib.sha256(version_output.encode()).hexdigest()[:8]}"  # noqa: E501


def build_variables(env: Mapping[str, str], nccl: bool) -> dict[str, str]:
    """Returns the variables that decide what is compiled: our defaults, overridden by the
    user's."""
    users = {name: value for name, value in env.items() if BUILD_VARIABLE.match(name)}
    ours = {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
    }
    ours |= {"HOROVOD_WITH_MPI": "1", "HOROVOD_WITH_GLOO": "1"} | (
        {"HOROVOD_GPU_OPERATIONS": "NCCL"} if nccl else {}
    )
    opposite = {"HOROVOD_WITH_": "HOROVOD_WITHOUT_", "HOROVOD_WITHOUT_": "HOROVOD_WITH_"}
    overruled = {
        re.sub(r"^HOROVOD_WITH(OUT)?_", lambda found: opposite[found[0]], name) for name in users
    }
    return {name: value for name, value in ours.items() if name not in overruled} | users


def asks_for_gpu(variables: Mapping[str, str]) -> bool:
    """Whether a build has operations on GPUs: HOROVOD_GPU_OPERATIONS, HOROVOD_GPU_ALLREDUCE, ..."""
    return any(name.startswith("HOROVOD_GPU") for name in variables)


def cuda_home() -> Path | None:
    """Returns the CUDA toolkit of the nvcc on the PATH; None without nvcc. Raises UserError for an
    nvcc without a toolkit."""
    nvcc = which("nvcc")
    if nvcc is None:
        return None
    said = subprocess.run(
        [nvcc, "--dryrun", "x.cu"], capture_output=True, text=True, timeout=60, check=False
    )
    return toolkit_of(str(nvcc), said.stdout + said.stderr)


def build_environment(env: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """Returns environment of the build: programs of this Python, a compiler for each core that has
    2 GiB of memory, no flags of an outer make."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    jobs = env.get("CMAKE_BUILD_PARALLEL_LEVEL") or max(
        1, min(len(os.sched_getaffinity(0)), int(memory_gib // 2))
    )
    path = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    if (mpicxx := which("mpicxx")) is not None:
        path = os.pathsep.join([str(mpicxx.parent), path])
    inherited = {
        name: value
        for name, value in env.items()
        if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    }
    # CMake 4 rejects the minimum versions of the libraries in Horovod unless this raises them to
    # 3.5.
    toolkit = {}
    if (
        asks_for_gpu(variables)
        and "HOROVOD_CUDA_HOME" not in env
        and (home := cuda_home()) is not None
    ):
        # the second is for torch
        toolkit = {
            "HOROVOD_CUDA_HOME": str(home),
            "CUDA_HOME": str(home),
        }
    return {
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        **inherited,
        **toolkit,
        **variables,
        "PATH": path,
        "MAKEFLAGS": f"-j{jobs}",
    }


def wheel_key(version: str, target: BuildTarget, variables: Mapping[str, str]) -> str:
    """Returns the name of a cached build: equal only for targets that can share its wheel."""
    mpi_home = "" if target.mpi_inside else str(target.mpirun.parent)
    gpu = asks_for_gpu(variables)
    changes = corrections(target.mpi_inside, gpu, target.cxx)
    rest = repr(
        (mpi_home, platform.machine(), platform.libc_ver(), sorted(variables.items()), changes)
    )
    digest = hashlib.sha256(rest.encode()).hexdigest()[:8]
    return f"horovod-{version}-{sys.implementation.cache_tag}-torch-{target.torch}-{target.mpi}-{digest}"  # noqa: E501


def cached_wheel(
    version: str, target: BuildTarget, variables: Mapping[str, str], rebuild: bool
) -> Path:
    """Returns the wheel in the cache, built before if there is none or `rebuild`; a second process
    waits for the first one's. Raises UserError."""
    folder = cache_folder() / wheel_key(version, target, variables)
    for private in (folder.parent, folder):
        private_folder(private, report)
    lock = FileLock(f"{folder}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(f"waiting for another process that builds it: {lock.lock_file}")
        lock.acquire()
    with lock:
        cached = usable_wheel(folder, report)
        if cached is None or rebuild:
            return build(version, target, variables, folder)
        report(f"from the cache: {cached}")
        return cached


def build(version: str, target: BuildTarget, variables: Mapping[str, str], folder: Path) -> Path:
    """Builds a wheel in `folder`, complete or not at all; its output is in `folder`/build.log.
    Raises UserError."""
    check_build_tools()
    began = time.monotonic()
    log = folder / "build.log"
    log.write_text("")
    env = build_environment(os.environ, variables)
    report(
        f"building Horovod {version} for torch {target.torch} and {target.mpi}, "
        f"{env['MAKEFLAGS']}, log: {log}"
    )
    archive = download_source(version, folder.parent, log)
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory(dir=folder) as fresh:
        source = unpack(
            archive,
            Path(scratch),
            corrections(target.mpi_inside, asks_for_gpu(variables), target.cxx),
        )
        built = compile_wheel(source, Path(fresh), env, log, report)
        wheel = built.replace(folder / built.name)
        record(wheel)
    report(f"built in {time.monotonic() - began:.0f} s: {wheel}")
    return wheel


def install(wheel: Path) -> None:
    """Installs the wheel in this environment, without Horovod's requirements, which the extra
    `horovod` has. Raises UserError."""
    log = wheel.parent / "install.log"
    log.write_text("")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--force-reinstall",
        "--no-index",
        str(wheel),
    ]
    if run_logged(command, os.environ, log):
        what = f"pip could not install {wheel.name}:\n{log.read_text()[-1000:]}"
        raise UserError(what, str(log), "make sure that you may write to this environment")


def is_usable(version: str, target: BuildTarget, nccl: bool) -> bool:
    """Whether the installed Horovod has this version, was built for this torch, and passes
    verification."""
    if installed_version("horovod") != version or built_for_torch() != target.torch:
        return False
    try:
        report(f"Horovod {version} is installed; {verify(target.mpirun, target.mpi_inside, nccl)}")
    except UserError as error:
        report(f"Horovod {version} is installed, but:\n{error}")
        return False
    return True


def built_for_torch() -> str:
    """Returns the version of torch that the installed Horovod was compiled with."""
    path = importlib.metadata.distribution("horovod").locate_file("horovod/metadata.json")
    return str(json.loads(Path(str(path)).read_text()).get("pytorch", "none"))


def ensure_usable(version: str, nccl: bool, rebuild: bool) -> None:
    """Builds and installs Horovod unless the installed one is usable, and verifies it. Raises
    UserError."""
    target = detect_target()
    variables = build_variables(os.environ, nccl)
    # the user's variable wins over the option
    nccl = variables.get("HOROVOD_GPU_OPERATIONS") == "NCCL"
    if not rebuild and is_usable(version, target, nccl):
        return
    install(cached_wheel(version, target, variables, rebuild))
    report(verify(target.mpirun, target.mpi_inside, nccl))


def copy_wheel(version: str, nccl: bool, rebuild: bool, folder: Path) -> None:
    """Puts the wheel for this environment's torch and MPI in a folder. Raises UserError."""
    folder.mkdir(parents=True, exist_ok=True)
    report(
        "copied: "
        f"{shutil.copy(cached_wheel(version, detect_target(), build_variables(os.environ, nccl), rebuild), folder)}"  # noqa: E501
    )


def report(line: str) -> None:
    print(line, flush=True)


def horovod(arguments: Sequence[str], program: str = "hvdtrain horovod") -> int:
    """Runs the command; returns the exit code."""
    what = f"{program}: {(__doc__ or '').partition(': ')[2]}"
    parser = argparse.ArgumentParser(prog=program, description=what)
    parser.add_argument(
        "--version",
        default=VERSION,
        choices=list(SHA256),
        help="the release of Horovod to build (%(default)s)",
    )
    parser.add_argument(
        "--nccl",
        action="store_true",
        help="HOROVOD_GPU_OPERATIONS=NCCL; HOROVOD_* variables of the environment win over it",
    )
    parser.add_argument(
        "--or-without",
        action="store_true",
        help="where it cannot be built: say why, and end with 0; training takes another engine",
    )
    parser.add_argument(
        "--rebuild",
        action="store_true",
        help="build and install even if a usable Horovod is installed or in the cache",
    )
    parser.add_argument(
        "--copy-to",
        type=Path,
        metavar="FOLDER",
        help="build it, and copy the wheel there; nothing is installed",
    )
    if {"-h", "--help"} & set(arguments):
        print(parser.format_help(), end="")
        return DONE
    options = parser.parse_args(arguments)
    for stop in (signal.SIGINT, signal.SIGTERM):
        # SystemExit leaves every block, so that no compiler keeps running
        signal.signal(stop, lambda number, _: sys.exit(128 + number))
    try:
        if options.copy_to is not None:
            copy_wheel(options.version, options.nccl, options.rebuild, options.copy_to)
            return DONE
        ensure_usable(options.version, options.nccl, options.rebuild)
    except UserError as error:
        if not options.or_without:
            print(error, file=sys.stderr)
            return USER
        LEFT_OUT.write_text(f"{error}\n")
        report(
            "Horovod is left out, and training takes the mpi engine. "
            f"{' '.join(error.what.split())[:300]}"
        )
        report(f"  where: {error.where}\n  to try again: make horovod; {error.fix}")
        return DONE
    LEFT_OUT.unlink(missing_ok=True)
    return DONE


def _missing(package: str) -> NoReturn:
    raise UserError(
        f"{package} is not installed in this Python", sys.prefix, "pip install 'hvdtrain[horovod]'"
    )


RECORD = "SHA256SUMS"  # checksum of the wheel beside it, in the format of sha256sum

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """Returns the folder of all wheels that were built here."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdtrain" / "horovod"


def private_folder(folder: Path, report: Callable[[str], None]) -> None:
    """Makes a folder to which only this user can write. If others could, its wheels are removed,
    because anyone may have put them there.

    Raises UserError for a link, for anything but a folder, and for another user's folder.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise UserError(
            "the cache of Horovod's wheels is a link, not a folder",
            str(folder),
            "remove it, or point XDG_CACHE_HOME elsewhere",
        )
    if not _of_this_user_or_root(found):
        what = (
            f"the cache of Horovod's wheels belongs to user {found.st_uid}, who could put any "
            f"program in it; this is user {os.geteuid()}"
        )
        raise UserError(what, str(folder), "point XDG_CACHE_HOME at a folder of your own")
    if found.st_mode & _OTHERS_WRITE:
        report(
            f"others can write in {folder}: its wheels are removed, and only you can write there "
            "now"
        )
        folder.chmod(0o700)
        for wheel in folder.glob("*.whl"):
            wheel.unlink()


def usable_wheel(folder: Path, report: Callable[[str], None]) -> Path | None:
    """Returns the wheel in a private folder; None if there is none. A wheel that differs from the
    one that was built is removed."""
    for wheel in folder.glob("horovod-*.whl"):
        if (reason := _refused_because(wheel)) is None:
            return wheel
        report(f"not used and removed: {wheel}: {reason}")
        wheel.unlink()
    return None


def record(wheel: Path) -> None:
    """Records the sha256 of a wheel that was built just now, for usable_wheel()."""
    wheel.chmod(0o600)
    fresh = wheel.parent / f"{RECORD}.unfinished"
    fresh.write_text(f"{_sha256(wheel)}  {wheel.name}\n")
    fresh.replace(wheel.parent / RECORD)


def _refused_because(wheel: Path) -> str | None:
    found = wheel.lstat()
    if not stat.S_ISREG(found.st_mode):
        return "it is not a regular file"
    if not _of_this_user_or_root(found):
        return f"it belongs to user {found.st_uid}"
    if found.st_mode & _OTHERS_WRITE:
        return "others can write it"
    try:
        recorded = (wheel.parent / RECORD).read_text()
    except OSError:
        return f"there is no {RECORD} beside it"
    return (
        None
        if f"{_sha256(wheel)}  {wheel.name}\n" == recorded
        else f"its sha256 is not that of {RECORD}"
    )


def _of_this_user_or_root(found: os.stat_result) -> bool:
    return found.st_uid in (os.geteuid(), 0)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
