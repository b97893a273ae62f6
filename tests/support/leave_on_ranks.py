"""Four torchdist ranks, of which rank 0 is lost.

Rank 1 waits for rank 3 in a collective that rank 3 does not begin; rank 3 waits for rank 1 in a
collective that rank 1 has given up. Each line of OUT has the rank before and after, the lost ranks,
the seconds until training continues, and a sum over the remaining ranks.
"""

from __future__ import annotations

import json
import os
import signal
import time

import numpy as np

from hvdtrain.comm import torchdist
from hvdtrain.comm.launcher_variables import placement


def main(out: str) -> None:
    ranks = torchdist.connect(placement(os.environ))
    ranks.be_ready_to_shrink(gpu=False)
    first = ranks.rank
    x = np.ones(9)
    y = np.ones(9)
    if first == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if first == 2:
        time.sleep(1)
    began_s = time.monotonic()
    try:
        under_way = [ranks.start_broadcast(x, "x", root=0)]
        if first == 1:
            under_way.append(ranks.start_broadcast(y, "y", root=3))
        under_way[0].wait()
    except RuntimeError as error:
        assert ranks.is_loss(error), error
    lost = ranks.shrink()
    took_s = time.monotonic() - began_s
    total = ranks.allreduce(np.array([10.0**first]), "total")
    with open(out, "a") as file:
        file.write(json.dumps([first, ranks.rank, lost, took_s, total.tolist()]) + "\n")
    ranks.close()
