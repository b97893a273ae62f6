"""Three MPI ranks under mpirun --with-ft ulfm; one dies between two collectives.

Rank 0 leaves out the lost rank as if a collective had failed there, while rank 1 waits in
confirm(). OUT gets what each rank saw.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import mpi4py
import numpy as np
import pytest

from hvdtrain.comm import mpi
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.errors import UserError


def main(out: str) -> None:
    ranks = mpi.connect(placement(os.environ))
    MPI = mpi.load()
    mpi4py.rc.finalize = None
    with pytest.raises(UserError, match="the script has loaded mpi4py, whose MPI_Finalize"):
        ranks.be_ready_to_shrink(gpu=False)
    mpi4py.rc.finalize = False  # like mpi.load() if it loads MPI first
    ranks.be_ready_to_shrink(gpu=False)
    first = ranks.rank
    ranks.confirm()  # no rank is lost
    total = ranks.allreduce(np.array([float(first)]), "sum")
    if first == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    seen = ""
    if first == 1:
        try:
            ranks.confirm()
        except Exception as error:
            seen = f"{ranks.is_loss(error)}, {ranks.is_loss(MPI.Exception(MPI.ERR_OTHER))}"
    lost = ranks.shrink()
    ranks.confirm()
    # no other rank is lost
    own_error = ranks.is_loss(ValueError("of this rank")) or ranks.is_loss(
        MPI.Exception(MPI.ERR_OTHER)
    )
    after = ranks.allreduce(np.array([float(ranks.rank + 1)]), "sum")
    found = ranks.allgather_object([first, total.tolist(), seen, lost, own_error, after.tolist()])
    if ranks.rank == 0:
        Path(out).write_text(json.dumps(found))
    ranks.allreduce(np.zeros(1), "end")
