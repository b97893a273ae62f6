"""A rank that arrives after the other rank has given up waiting for it. The script catches the
error, and continues after shutdown()."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

import hvdtrain.horovod as hvd


def main(folder: str) -> None:
    """Writes what rank R has found to FOLDER/R.json: the errors, and a sum after another init()."""
    hvd.init()
    rank = hvd.rank()
    one = torch.ones(3)
    gave_up = Path(folder, "gave up")
    hvd.allreduce(one, name="before")
    while rank == 1 and not gave_up.exists():
        time.sleep(0.01)
    late = error_of_late_call(one)
    gave_up.touch()
    after = error_of_late_call(one)
    hvd.shutdown()
    hvd.init()
    again = hvd.allreduce(one * (rank + 1), op=hvd.Sum, name="again")[0].item()
    Path(folder, f"{rank}.json").write_text(json.dumps([late, after, again]))
    if rank == 0:
        error_of_late_call(one)  # rank 1 makes no call, and neither calls shutdown()


def error_of_late_call(one: torch.Tensor) -> str:
    try:
        hvd.allreduce(one, name="late")
    except hvd.HorovodInternalError as error:
        return str(error).splitlines()[0]
    return "none"
