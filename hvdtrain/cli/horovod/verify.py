"""Verifies an installed Horovod: an allreduce of two ranks under mpirun gives the value of a formula within a time limit."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hvdtrain.cli.horovod.wheel import running
from hvdtrain.errors import UserError

LIMIT_S = 120.0  # two ranks import torch for the first time, maybe from a slow network file system
ATTEMPTS = 2  # now and then a start of Open MPI 5.0 hangs; a Horovod that hangs does so the second time too

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
"""


class Outcome(NamedTuple):
    status: int | None  # the exit status; None where the command did not end within its limit
    output: str


class VerificationTimeout(UserError):
    """The two ranks did not end within their limit."""


def verify(mpirun: Path, mpi_inside: bool, nccl: bool = False, limit_s: float = LIMIT_S) -> str:
    """Returns a line for people. Raises UserError if the two ranks fail, differ from the formula or take too long, twice.

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
    return f"verified in {time.monotonic() - began:.0f} s: 2 ranks under {mpirun} summed as expected"


def verify_command(command: Sequence[str], env: Mapping[str, str], limit_s: float) -> None:
    """Runs a command that must verify both ranks; none of its processes is left behind.

    Raises UserError with the end of its output where it does not, VerificationTimeout where it does not end.
    """
    status, output = _run(command, env, limit_s)
    if status == 0 and all(f"verified on rank {rank}" in output for rank in (0, 1)):
        return
    how = f"not finished after {limit_s:g} s" if status is None else f"exit status {status}"
    what = f"the allreduce of two ranks of Horovod under mpirun failed: {how}\n{output.strip()[-1500:]}"
    fix = "check that `mpirun -np 2 hostname` works and that mpirun and mpicxx belong to the same MPI; then --rebuild"
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
    """`env`, with defaults that let two ranks start on any machine: one core, root, no network. A site's own MPI keeps its transports."""
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
