"""A small network that writes down which rank makes it: what the launcher told the process, into
the folder LAB_RANKS."""

import json
import os
import socket
from pathlib import Path

import torch

from hvdtrain.comm.launcher_variables import placement

VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
)


class Net(torch.nn.Sequential):
    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        height, width, channels = shape
        super().__init__(
            *(torch.nn.Conv2d(channels, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten()),
            torch.nn.Linear(8 * height * width, classes),
        )
        place = placement(os.environ)
        told = {name: os.environ[name] for name in VARIABLES if name in os.environ}
        found = {
            "rank": place.rank,
            "local_rank": place.local_rank,
            "local_size": place.local_size,
            "host": socket.gethostname(),
            **told,
        }
        Path(os.environ["LAB_RANKS"], f"rank-{place.rank}.json").write_text(json.dumps(found))
