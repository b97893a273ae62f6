"""A rank that waits for the calls of pool.py, each of a function with this rank's communicator."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import random
import signal
import socket
import sys
import traceback
import warnings
from typing import Any

import numpy as np
import torch
from on_ranks import function_of

from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.config import plugins
from hvdtrain.config.sections.comm import CommConfig

# which torch sets when its compiler is first imported: no reason for new ranks
BY_TORCH = "TORCHINDUCTOR_CACHE_DIR"
SEED = torch.initial_seed()  # of a new process


def wait(engine: str, hosts: int, address: str) -> None:
    """Connects this rank; answers each call with {"result": ...} or {"error": traceback}, and with
    what of this process has changed."""
    communicator = connect(engine, hosts)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        lines = connection.makefile("rw")
        send(lines, {"rank": communicator.rank, "pid": os.getpid()})
        for line in lines:
            before = state()
            call = json.loads(line)
            answer = answered(communicator, engine, **call)
            after = state()
            send(
                lines,
                answer
                | {
                    "changed": [
                        name for name in {**before, **after} if before.get(name) != after.get(name)
                    ]
                },
            )
    os._exit(0)  # the tests are over; the other ranks need not be there any more


def connect(engine: str, hosts: int) -> Communicator:
    """hosts: of as many ranks each, by the launcher's variables."""
    if engine == "single":
        return SingleProcessCommunicator()
    os.environ |= {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if hosts > 1:
        rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        of_host = int(os.environ["OMPI_COMM_WORLD_SIZE"]) // hosts
        os.environ |= {
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % of_host),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(of_host),
        }
    communicator: Communicator = plugins.load("comm", engine, "tests").connect(
        placement(os.environ), CommConfig(engine=engine)
    )
    return communicator


def answered(
    communicator: Communicator, engine: str, function: str, arguments: list[Any], limit_s: float
) -> dict[str, Any]:
    torch.manual_seed(SEED)
    random.seed(0)
    np.random.seed(0)
    faulthandler.dump_traceback_later(limit_s)
    try:
        with warnings.catch_warnings():
            result = {"result": function_of(function)(communicator, *arguments)}
    except BaseException:
        result = {"error": traceback.format_exc()}
    faulthandler.cancel_dump_traceback_later()
    if torch.distributed.is_initialized() and engine != "torchdist":
        torch.distributed.destroy_process_group()  # the next one may be over another communicator
    gc.collect()
    return result


def state() -> dict[str, Any]:
    return {
        **{name: value for name, value in os.environ.items() if name != BY_TORCH},
        "folder": os.getcwd(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "path": list(sys.path),
        "signals": [
            signal.getsignal(number)
            for number in (
                signal.SIGINT,
                signal.SIGTERM,
                signal.SIGUSR1,
                signal.SIGUSR2,
                signal.SIGALRM,
            )
        ],
    }


def send(lines: Any, message: dict[str, Any]) -> None:
    lines.write(json.dumps(message) + "\n")
    lines.flush()
