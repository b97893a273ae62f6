"""The job of this process: init() and shutdown(), the choice of its engine, and the handles of
pending requests."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, cast

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.engines import Installed, select_engine
from hvdtrain.comm.launcher_variables import Placement, placement, take_part_of_gpu
from hvdtrain.comm.mpi import abort_world, has_several_ranks
from hvdtrain.comm.rendezvous import allow_open_files
from hvdtrain.config import plugins
from hvdtrain.errors import UserError, exit_code_of, nearest
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.engine.own import OwnEngine
from hvdtrain.horovod.engine.requests import GLOBAL, Engine, Request, Signature
from hvdtrain.horovod.engine.settings import settings_of

ENGINE_VARIABLE = "HVDTRAIN_ENGINE"
ENGINES = ("auto", "mpi", "torchdist", "horovod", "single")
Finish = Callable[[Any], Any]  # converts the result of a request to the caller's result


class HorovodJob:
    """The job of a process. The engine stays connected after shutdown(), for a later init() with
    the same ranks."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._idle: Engine | None = None  # the engine of a job that was shut down
        self._comm: Any = None  # the comm of its init()
        self._under_way: dict[
            int, tuple[int, Finish]
        ] = {}  # handle -> the engine's handle, and the function that finishes its result
        self._handles = itertools.count(1)  # handles of this process, over all its jobs
        self.first_handle = 1  # the first handle of this job; earlier ones are invalid
        self._numbers: dict[tuple[str, int], itertools.count[int]] = defaultdict(itertools.count)
        self._has_failed = self._watches_failure = self._watches_exit = False

    @property
    def engine(self) -> Engine:
        """The engine. Raises ValueError before init(), as in Horovod."""
        if self._engine is None:
            raise BadCall(
                "Horovod has not been initialized; use hvd.init().",
                "hvdtrain.horovod",
                "hvd.init() first",
            )
        return self._engine

    @property
    def is_initialized(self) -> bool:
        return self._engine is not None

    def start(self, comm: Any = None) -> None:
        """Connects the engine; does nothing if it has started."""
        if self._engine is not None:
            return
        if not self._watches_failure:
            self._watches_failure = True
            self._pid = os.getpid()
            self._hook = sys.excepthook
            sys.excepthook = self._fail
        if self._idle is None or comm != self._comm:
            hook = sys.excepthook
            self._idle = connect(comm)
            self._comm = comm
            # torch.distributed wraps it in its own hook, which holds the traceback back until ours
            # returns, after the abort
            sys.excepthook = hook
        self._engine = self._idle
        self._idle = None
        self._numbers.clear()
        if not self._watches_exit:
            self._watches_exit = True
            # runs before the functions that connect() has registered
            atexit.register(self._at_exit)

    def shutdown(self) -> None:
        """Ends the job. A collective: pending requests are finished first."""
        engine = self._engine
        if engine is not None:
            self._forget()
            engine.leave()
            self._engine = None
            self._idle = engine

    def be_elastic(self) -> None:
        """Prepares for a loss, if the engine can survive one. A collective."""
        self.engine.be_ready_to_shrink()

    def recover(self, error: BaseException) -> None:
        """Continues without the lost ranks. Raises the error if no rank is lost, or if the engine
        cannot continue."""
        self._forget()
        self.engine.recover(error)
        self._numbers.clear()  # ranks may have made different numbers of calls before

    def _forget(self) -> None:
        """Makes all earlier handles void."""
        self._under_way.clear()
        self.first_handle = next(self._handles)

    def submit(self, set_id: int | None, request: Request, finish: Finish) -> int:
        """Submits a request; returns a handle for wait(), which returns finish(result)."""
        if set_id is None:
            raise BadCall(
                "this process set was not added",
                request.signature.where,
                "hvd.init(process_sets=[...]) or hvd.add_process_set()",
            )
        in_engine = self.engine.submit(set_id, request)
        handle = next(self._handles)
        self._under_way[handle] = in_engine, finish
        return handle

    def poll(self, handle: int) -> bool:
        """Whether the request is done. Raises BadCall for an unknown handle."""
        engine = self.engine
        self._check(handle, "hvd.poll()")
        if handle not in self._under_way:
            raise BadCall(
                f"handle {handle!r} does not exist, or was already synchronized",
                "hvd.poll()",
                "a handle of an ..._async() call",
            )
        return engine.poll(self._under_way[handle][0])

    def wait(self, handle: int) -> Any:
        """Waits and returns the result of a request; None for an unknown handle. Raises BadCall for
        a former job's handle."""
        engine = self.engine
        if handle not in self._under_way:
            self._check(handle, "hvd.synchronize()")
            return None
        in_engine, finish = self._under_way.pop(handle)
        return finish(engine.wait(in_engine))

    def _check(self, handle: int, where: str) -> None:
        if isinstance(handle, int) and handle < self.first_handle:
            what = (
                f"handle {handle!r} belongs to a call before hvd.shutdown(), or before a rank was "
                "lost: its result is no longer available"
            )
            raise BadCall(what, where, "synchronize() before shutdown()")

    def name(self, kind: str, name: str | None, set_id: int | None) -> str:
        """Returns the name of a request: the caller's, or a number within its kind and process
        set."""
        return (
            name
            if name is not None
            else f"{kind}.noname.{next(self._numbers[kind, set_id or GLOBAL])}"
        )

    def join(self) -> int:
        """Joins. Then restarts the numbering of unnamed calls, because ranks may have made
        different numbers of calls before."""
        last = self.engine.join()
        for kind, set_id in list(self._numbers):
            if set_id == GLOBAL:
                del self._numbers[kind, set_id]
        return last

    def barrier(self, set_id: int | None) -> None:
        signature = Signature(self.name("barrier", None, set_id), "barrier")
        self.wait(self.submit(set_id, Request(signature, list[torch.Tensor]()), lambda _: None))

    def _fail(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        """Called when an exception ends this process; ends the other ranks, which would otherwise
        wait."""
        self._has_failed = True
        self._hook(kind, error, traceback)
        if os.getpid() != self._pid:
            return
        engine = self._engine or self._idle
        if (
            engine is None and has_several_ranks()
        ):  # init() has failed here, while others may still be in it
            abort_world(exit_code_of(error))
        elif engine is not None and engine.size > 1:
            engine.abort(exit_code_of(error))

    def _at_exit(self) -> None:
        engine = self._engine
        if self._has_failed or os.getpid() != self._pid or engine is None:
            return
        try:
            self.shutdown()
        except BaseException as error:
            # from an earlier collective, caught by the script; the others may still be in it
            if engine.size == 1:
                raise
            print(
                f"hvdtrain.horovod: rank {engine.rank} cannot end with the others, so it ends the "
                f"job\n{error}",
                file=sys.stderr,
                flush=True,
            )
            engine.abort(exit_code_of(error))


JOB = HorovodJob()


def connect(comm: Any) -> Engine:
    """Connects the engine that HVDTRAIN_ENGINE and the launcher select. A collective.

    comm: None, or as in Horovod's init(): a list of MPI ranks, or an mpi4py communicator.
    """
    place = placement(os.environ)
    settings = settings_of(os.environ)
    allow_open_files(place.size)
    take_part_of_gpu(place, os.environ)
    name = engine_name(os.environ, place)
    if _means_some(comm, place):
        if name != "mpi":
            raise BadCall(
                f"the {name} engine starts all ranks of the launcher",
                "hvd.init(comm=...)",
                f"{ENGINE_VARIABLE}=mpi; or a process set",
            )
        communicator: Communicator = cast(
            Any, plugins.load("comm", "mpi", ENGINE_VARIABLE)
        ).connect_some(place, comm)
    elif name == "horovod":
        from hvdtrain.horovod.engine.through_horovod import HorovodEngine

        return HorovodEngine(place)
    else:
        communicator = cast(
            Communicator, plugins.load("comm", name, ENGINE_VARIABLE).connect(place)
        )
    return OwnEngine(communicator, settings)


def engine_name(environ: Mapping[str, str], place: Placement) -> str:
    """Returns the engine's name. auto selects among hvdtrain's engines like comm.engine=auto, and
    Horovod only if horovodrun started the ranks.

    Raises UserError for another name.
    """
    name = environ.get(ENGINE_VARIABLE, "auto")
    if name not in ENGINES:
        raise UserError(
            f"{ENGINE_VARIABLE}={name!r} is not an engine",
            "the environment",
            nearest(name, ENGINES),
        )
    if name != "auto":
        return name
    if place.launcher == "horovodrun":
        return "horovod"
    return select_engine(
        place, environ, Installed(horovod=lambda: False, horovod_nccl=lambda: False, nccl=_has_nccl)
    ).engine


def _has_nccl() -> bool:
    return bool(plugins.load("comm", "torchdist", ENGINE_VARIABLE).has_nccl())


def _means_some(comm: Any, place: Placement) -> bool:
    """Whether it is an MPI communicator, or a list of some of the ranks."""
    if comm is None or (isinstance(comm, Sequence) and not comm):
        return False
    return not isinstance(comm, Sequence) or sorted(comm) != list(range(place.size))
