"""The device of a rank, and whether it is another rank's too."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.read import Provenance
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import Gpu


def pick_device(config: Config, provenance: Provenance, communicator: Communicator) -> torch.device:
    """The GPU of this rank's local rank, or the CPU."""
    count = torch.cuda.device_count()
    if config.speed.device == "cuda" and not count:
        raise UserError("no CUDA device is visible", provenance.where("speed.device"), "speed.device=cpu, or a torch built for this GPU")
    if config.speed.device != "cpu" and count:
        device = torch.device("cuda", communicator.local_rank % count)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def gpu(device: torch.device) -> Gpu | None:
    """The device as NVML and the core know it; None for the CPU."""
    if device.type != "cuda":
        return None
    known = torch.cuda.get_device_properties(device)
    uuid = str(getattr(known, "uuid", ""))
    why = "" if uuid else "this torch does not tell which GPU it is"
    return Gpu(f"GPU-{uuid}" * bool(uuid), why, known.name, lambda: torch.cuda.max_memory_allocated(device))


def seed_dropout(seed: int, device: torch.device) -> None:
    """Of the generators that layers draw from: a hundredth of the time of torch.manual_seed(), which looks for devices of every kind."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def check_shared(device: torch.device, communicator: Communicator, provenance: Provenance) -> None:
    """A UserError on every rank where NCCL, which refuses that, would reduce for two ranks on one GPU. Every rank calls it."""
    if communicator.size == 1:
        return
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    everyone = communicator.allgather_object((socket.gethostname(), gpu, "nccl" in communicator.features))
    shared = shared_gpu([place[:2] for place in everyone])
    if shared and any(place[2] for place in everyone):
        fix = "as many ranks on a host as it has GPUs, or comm.engine=mpi, or speed.device=cpu"
        raise UserError(f"{shared}, which NCCL refuses", provenance.where("speed.device"), fix)


def shared_gpu(places: Sequence[tuple[str, str | None]]) -> str:
    """Words for the first GPU that two ranks have, "" where there is none; of each rank its host and its GPU's identity."""
    for host, gpu in dict.fromkeys(places):
        ranks = [rank for rank, place in enumerate(places) if place == (host, gpu)]
        if gpu is not None and len(ranks) > 1:
            return f"ranks {', '.join(map(str, ranks))} on {host} train on one GPU"
    return ""
