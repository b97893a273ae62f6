"""CUDA_VISIBLE_DEVICES as CUDA reads it, and which part of a divided GPU (MIG) a rank takes of it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from hvdtrain.comm.placement import Placement

VARIABLE = "CUDA_VISIBLE_DEVICES"


def listed_devices(environ: Mapping[str, str]) -> list[str] | None:
    """The numbers and UUIDs that are listed, up to the first that names no device, where CUDA stops reading; None: all are visible."""
    listed = environ.get(VARIABLE)
    if listed is None:
        return None
    found: list[str] = []
    for name in (each.strip() for each in listed.split(",")):
        if not name or name.startswith("-"):
            break
        found.append(name)
    return found


def take_part_of_gpu(place: Placement, environ: MutableMapping[str, str]) -> None:
    """Leaves in the list the part of this rank's local rank, where several parts of divided GPUs are listed: "MIG-...".

    CUDA shows a process one part alone, the first that is listed: without this all ranks would train on it. Called before CUDA starts.
    """
    names = listed_devices(environ) or []
    if len(names) > 1 and any(name.startswith("MIG-") for name in names):
        environ[VARIABLE] = names[place.local_rank % len(names)]
