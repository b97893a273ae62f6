"""Proves an installed Horovod: two ranks under mpirun sum to what a formula says, within a time limit."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.cli.horovod.wheel import running
from hvdtrain.errors import UserError

LIMIT_S = 120  # two ranks read torch for the first time, perhaps from a slow network disk
STARTS = 2  # rarely a start of Open MPI 5.0 never comes up; one that would never sum up does not the second time either

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
found, expected = hvd.allreduce(x + rank, op=hvd.Sum, name="proof"), size * x + size * (size - 1) / 2
if not torch.equal(found, expected):
    raise SystemExit(f"rank {rank}: the allreduce gave {found.tolist()}, expected {expected.tolist()}")
print(f"proved on rank {rank}", flush=True)
"""


def prove(mpirun: Path, mpi_inside: bool, nccl: bool = False) -> str:
    """One line that tells of the proof; a UserError if the two ranks fail, differ from the formula or take too long."""
    command = [str(mpirun), "-np", "2", sys.executable, "-c", PROGRAM, "nccl" if nccl else "any"]
    began = time.monotonic()
    for start in range(1, STARTS + 1):
        try:
            run_proof(command, small_machine(os.environ, mpi_inside), LIMIT_S)
            break
        except Endless as error:
            if start == STARTS:
                raise
            print(f"{error}\nonce more", file=sys.stderr, flush=True)
    return f"proved in {time.monotonic() - began:.0f} s: 2 ranks under {mpirun} summed as expected"


class Endless(UserError):
    """The proof did not end within its limit."""


def run_proof(command: Sequence[str], env: Mapping[str, str], limit_s: float) -> None:
    """A UserError with the last words of a command that fails, or proves not both ranks; Endless where it hangs. Nothing of it lives on."""
    with tempfile.TemporaryFile("w+") as output:
        with running(command, env, output) as process:
            try:
                how = f"exit status {process.wait(limit_s)}"
            except subprocess.TimeoutExpired:
                how = f"no end after {limit_s:g} s"
        output.seek(0)
        said = output.read()
    if how != "exit status 0" or any(f"proved on rank {rank}" not in said for rank in (0, 1)):
        raise (Endless if how.startswith("no end") else UserError)(
            f"two ranks of Horovod under mpirun did not do their sum: {how}\n{said.strip()[-1500:]}",
            command[0],
            "see that `mpirun -np 2 hostname` works and that mpirun and mpicxx are of one MPI; then --rebuild",
        )


def small_machine(env: Mapping[str, str], mpi_inside: bool) -> dict[str, str]:
    """`env` on top of what lets two ranks start anywhere: one core, root, no network. A site's own MPI keeps its own transports."""
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
