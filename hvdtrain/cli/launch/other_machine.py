"""The command line that starts ranks on another machine, with an MPI that is not here: nothing of this machine is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hvdtrain.cli.launch.launcher_commands import Host, LaunchRequest, MpiKind, mpirun_command, ranks_per_host, srun_command
from hvdtrain.errors import UserError

_KINDS: dict[str, MpiKind] = {"openmpi": "openmpi5", "mpich": "mpich", "intel": "intel"}  # one line fits Open MPI 4 too


def command_for(
    mpi: str, ranks: int, hosts: tuple[Host, ...], program: Sequence[str], variables: Sequence[str], oversubscribe: bool
) -> list[str]:
    """The command line for `mpi`, one of MPIS; `variables`: further ones for ranks on other hosts.

    Raises UserError where a launcher that gives each host as many ranks cannot distribute them.
    """
    request = LaunchRequest(
        launcher="mpirun",
        ranks=ranks,
        program=tuple(program),
        hosts=hosts,
        forwarded=("PATH", *variables) if mpi == "openmpi" else (),  # the other ones send all variables
        oversubscribe=oversubscribe,
    )
    return _OTHERS[mpi](request) if mpi in _OTHERS else mpirun_command(_KINDS[mpi], request)


def _srun(request: LaunchRequest) -> list[str]:
    """With --mpi=pmix, which Open MPI needs."""
    return srun_command(replace(request, launcher="srun"), "pmix", None)


def _flux(request: LaunchRequest) -> list[str]:
    """flux-run(1): -n tasks; -N nodes, which share them evenly. Flux gives ranks the environment of the command."""
    names, each = _even(request, "flux")
    places = (
        ["-N", str(len(names)), f"--tasks-per-node={each}", f"--requires=host:{','.join(names)}"] if names else ["-n", str(request.ranks)]
    )
    return ["flux", "run", *places, "-o", "cpu-affinity=off", *request.program]


def _pals(request: LaunchRequest) -> list[str]:
    """mpiexec(1) of HPE PALS, as under PBS on Cray machines."""
    names, each = _even(request, "pals")
    places = ["--ppn", str(each), "--hosts", ",".join(names)] if names else []
    return ["mpiexec", "-n", str(request.ranks), *places, "--cpu-bind", "none", "--envall", *request.program]


def _lsf(request: LaunchRequest) -> list[str]:
    """jsrun(1): a resource set is a host, with all of its cores and GPUs. The allocation says which hosts these are."""
    names, each = _even(request, "lsf")
    if not names:
        raise UserError("how many ranks has each host?", "launch --mpi lsf", "-H n1:4,n2:4: jsrun starts 4 ranks on each of two hosts")
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
    """The names of the hosts that get ranks, and how many each gets. Raises UserError where these numbers differ."""
    shares = ranks_per_host(request.hosts, request.ranks)
    if len({share.slots for share in shares}) > 1:
        uneven = ", ".join(f"{share.slots} to {share.name}" for share in shares)
        raise UserError(f"ranks are distributed evenly, not {uneven}", f"launch --mpi {mpi}, -H", "the same number of ranks on each host")
    return [share.name for share in shares], shares[0].slots if shares else 0


_OTHERS: dict[str, Callable[[LaunchRequest], list[str]]] = {"srun": _srun, "flux": _flux, "pals": _pals, "lsf": _lsf}
MPIS = (*_KINDS, *_OTHERS)  # the values of --mpi
