"""The command line that starts ranks with srun, in containers and on other machines."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from hvdtrain.errors import UserError, short
from hvdtrain.extras.launch.mpirun import (
    MPI_NAMES,
    Host,
    LaunchRequest,
    MpiKind,
    mpirun_command,
    ranks_per_host,
)

_PMI_PLUGINS: dict[MpiKind, tuple[str, ...]] = {  # srun's plugins, the preferred one first
    "openmpi4": ("pmix", "pmi2"),
    "openmpi5": ("pmix",),
    "mpich": ("pmi2", "cray_shasta"),
    "intel": ("pmi2",),
}


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
