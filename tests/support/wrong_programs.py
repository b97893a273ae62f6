"""Programs whose ranks do not make the same calls: python tests/support/wrong_programs.py CASE."""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from typing import Any

import mpi4py
import torch

import hvdtrain.horovod as hvd
from hvdtrain.horovod.engine.perform import Performer


def fail(*_: Any) -> None:
    raise RuntimeError("no memory for it")


def main(case: str) -> None:  # noqa: PLR0912, PLR0915 (a branch for each case)
    if case == "a process set without threads":
        mpi4py.rc.thread_level = "funneled"
        importlib.import_module("mpi4py.MPI")
    hvd.init()
    rank = hvd.rank()
    one = torch.ones(3)
    hvd.allreduce(one, name="before")
    match case:
        case "a call is missing on a rank":
            if rank != 1:
                hvd.allreduce(one, name="missing")
            hvd.allreduce(one, name="after")
        case "another shape of many":
            handles = [
                hvd.allreduce_async_(torch.ones(2000 + (i == 5) * rank), name=f"grad {i}")
                for i in range(9)
            ]
            for handle in handles:
                hvd.synchronize(handle)
        case "another call":
            (hvd.allgather if rank else hvd.allreduce)(one, name="same")
        case "a rank ends":
            if rank != 1:
                hvd.allreduce(one, name="late")
        case "a rank fails":
            if rank == 1:
                raise ValueError("its own reason")
            hvd.allreduce(one, name="late")
        case "a rank does not come":
            if rank == 1:
                time.sleep(2000)
            hvd.allreduce(one, name="late")
        case "a process set without threads":
            hvd.add_process_set([0])
        case "a rank ends without join":
            if rank != 1:
                hvd.join()
        case "a poll of what does not come":
            handle = hvd.allreduce_async(one, name=f"polled {rank}")
            while not hvd.poll(handle):
                time.sleep(0.01)
        case "poll() in a loop":
            handle = hvd.allreduce_async(one, name=f"polled {rank}")
            while not hvd.poll(handle):
                time.sleep(0.01)
            hvd.synchronize(handle)
        case "a failure that the script catches":
            if rank == 1:
                Performer.perform = fail  # type: ignore[method-assign]
            with contextlib.suppress(hvd.HorovodInternalError if rank else ()):
                hvd.allreduce(torch.ones(5000), name="half made")
        case "a failure in a process set that the script catches":
            pair = hvd.add_process_set([0])
            if rank == 0:
                Performer.perform = fail  # type: ignore[method-assign]
                with contextlib.suppress(hvd.HorovodInternalError):
                    hvd.allreduce(torch.ones(5000), process_set=pair)
        case "roots differ":
            hvd.broadcast_object({"a": 1}, root_rank=rank)
        case "no barrier":
            if rank != 1:
                hvd.barrier()
            hvd.allreduce(one, name="after")
    print("went on", rank)


if __name__ == "__main__":
    main(sys.argv[1])
