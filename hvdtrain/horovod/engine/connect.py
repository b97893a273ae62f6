"""Which engine HVDTRAIN_ENGINE and the launcher select, and its connection."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.engines import Installed, select_engine
from hvdtrain.comm.placement import Placement, placement, take_part_of_gpu
from hvdtrain.comm.rendezvous import allow_open_files
from hvdtrain.config import plugins
from hvdtrain.errors import UserError, nearest
from hvdtrain.horovod.engine.engine import Engine
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.engine.own import OwnEngine
from hvdtrain.horovod.engine.settings import settings_of

VARIABLE = "HVDTRAIN_ENGINE"
ENGINES = ("auto", "mpi", "torchdist", "horovod", "single")


def connect(comm: Any) -> Engine:
    """comm: None, or of Horovod's init(): a list of ranks of MPI, or an mpi4py communicator. A collective."""
    place, settings = placement(os.environ), settings_of(os.environ)
    allow_open_files(place.size)
    take_part_of_gpu(place, os.environ)
    name = engine_name(os.environ, place)
    if _means_some(comm, place):
        if name != "mpi":
            raise BadCall(f"the {name} engine starts all ranks of the launcher", "hvd.init(comm=...)", f"{VARIABLE}=mpi; or a process set")
        communicator: Communicator = cast(Any, plugins.load("comm", "mpi", VARIABLE)).connect_some(place, comm)
    elif name == "horovod":
        from hvdtrain.horovod.engine.through_horovod import HorovodEngine

        return HorovodEngine(place)
    else:
        communicator = cast(Communicator, plugins.load("comm", name, VARIABLE).connect(place))
    return OwnEngine(communicator, settings)


def engine_name(environ: Mapping[str, str], place: Placement) -> str:
    """auto is what comm.engine=auto selects among our own; Horovod only where horovodrun has started the ranks.

    Raises UserError for another name.
    """
    name = environ.get(VARIABLE, "auto")
    if name not in ENGINES:
        raise UserError(f"{VARIABLE}={name!r} is no engine", "the environment", nearest(name, ENGINES))
    if name != "auto":
        return name
    if place.launcher == "horovodrun":
        return "horovod"
    return select_engine(place, environ, Installed(horovod=lambda: False, horovod_nccl=lambda: False, nccl=_has_nccl)).engine


def _has_nccl() -> bool:
    return bool(plugins.load("comm", "torchdist", VARIABLE).has_nccl())


def _means_some(comm: Any, place: Placement) -> bool:
    """Whether it is an MPI communicator, or a list of some of the ranks."""
    if comm is None or (isinstance(comm, Sequence) and not comm):
        return False
    return not isinstance(comm, Sequence) or sorted(comm) != list(range(place.size))
