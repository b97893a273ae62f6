"""The command line that starts ranks on another machine, with an MPI that is not here: nothing of this machine is asked."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.cli.launch.launcher_commands import Host, LaunchRequest, MpiKind, mpirun_command, srun_command

SRUN = "srun"
_KINDS: dict[str, MpiKind] = {"openmpi": "openmpi5", "mpich": "mpich", "intel": "intel"}  # one line fits Open MPI 4 too
MPIS = (*_KINDS, SRUN)  # the values of --mpi


def command_for(
    mpi: str, ranks: int, hosts: tuple[Host, ...], program: Sequence[str], variables: Sequence[str], oversubscribe: bool
) -> list[str]:
    """The command line for `mpi`, one of MPIS; `variables`: further ones for ranks on other hosts.

    srun gets --mpi=pmix, which Open MPI needs. Raises UserError where srun cannot distribute the ranks.
    """
    request = LaunchRequest(
        launcher="srun" if mpi == SRUN else "mpirun",
        ranks=ranks,
        program=tuple(program),
        hosts=hosts,
        forwarded=("PATH", *variables) if mpi == "openmpi" else (),  # Hydra and srun send all variables
        oversubscribe=oversubscribe,
    )
    return srun_command(request, "pmix", None) if mpi == SRUN else mpirun_command(_KINDS[mpi], request)
