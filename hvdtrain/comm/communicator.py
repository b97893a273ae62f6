"""The single engine: one process, which has nothing to communicate; and the protocol of every
communicator, whose reference it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, NoReturn, Protocol, cast

from hvdtrain.comm.engines import Feature
from hvdtrain.comm.launcher_variables import Placement
from hvdtrain.config.sections.comm import CommConfig
from hvdtrain.core.process import exit_now
from hvdtrain.errors import UserError

# a numpy array or a torch tensor, C-contiguous; check_buffer() refuses what an engine cannot take
Buffer = Any
Op = Literal["sum", "min", "max", "adasum"]  # adasum only with the feature "adasum"

# every engine reduces and moves them
NUMBER_TYPES = (
    "float16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
)
FEATURES: set[Feature] = {"device_memory", "bfloat16_sums"}  # of comm.engine=single


class Handle(Protocol):
    """A collective that has been started."""

    def wait(self) -> Buffer:
        """The result; called once. Handles may be waited for in any order."""


class Communicator(Protocol):
    """The collectives between `size` ranks.

    Every rank calls the same collectives in the same order. `name` identifies a collective and
    repeats at every step: Horovod caches by it, and its stall warnings print it. The result may be
    the memory of x, overwritten: use the returned buffer. Type (array or tensor), dtype and device
    of the result are those of x. All engines reduce and move NUMBER_TYPES and move bool; integers
    that overflow wrap around. Collectives raise UserError for a buffer that the engine cannot take.
    """

    name: str  # as in comm.engine=NAME
    rank: int
    size: int
    local_rank: int  # among the ranks of this host
    local_size: int
    features: frozenset[Feature]  # what this engine can do beyond the protocol: comm/engines.py

    @property
    def secret(self) -> str | None:
        """The job's, which signs what ranks pickle for each other; "" where it has none, so that
        they do not pickle. None where no stranger reaches the connection: MPI, one process."""

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        """Elementwise over all ranks; x has the same shape and dtype on every rank."""

    def start_allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Handle:
        """An allreduce() that is not waited for where the engine is "asynchronous"; x must not be
        used until wait() has returned."""

    def broadcast(self, x: Buffer, name: str, root: int = 0) -> Buffer:
        """x of rank `root` on every rank; x has the same shape and dtype on every rank."""

    def start_broadcast(self, x: Buffer, name: str, root: int = 0) -> Handle:
        """A broadcast() that is not waited for where the engine is "asynchronous"; x must not be
        used until wait() has returned."""

    def start_reduce(self, x: Buffer, name: str, root: int = 0) -> Handle:
        """The sum over ranks on rank `root`, of what start_allreduce() takes; the result of other
        ranks is unspecified.

        x must not be used again: it may be overwritten.
        """

    def reduce_scatter(self, x: Buffer, name: str) -> Buffer:
        """The sum over ranks, split along axis 0 as numpy.array_split does (the first ranks get one
        more): this rank's part."""

    def start_reduce_scatter(self, x: Buffer, name: str) -> Handle:
        """A reduce_scatter() that is not waited for where the engine is "asynchronous".

        x must not be used again: it may be overwritten, and the result may be a view of it.
        """

    def start_spread(self, x: Buffer, name: str) -> Handle:
        """The opposite: of x, split along axis 0 as reduce_scatter() does, each rank's own part
        reaches all ranks; the result is x.

        Each rank gives an x of the same shape and dtype, of which only its own part counts.
        """

    def allgather(self, x: Buffer, name: str) -> Buffer:
        """Every rank's x along axis 0, in rank order; the lengths of axis 0 may differ."""

    def allgather_object(self, thing: Any) -> list[Any]:
        """One small object of each rank, in rank order: plain values, arrays, paths and value
        classes of hvdtrain (comm/signed.py)."""

    def broadcast_object(self, thing: Any, root: int = 0) -> Any:
        """An object of rank `root`, as allgather_object() takes, on every rank; those that other
        ranks give are not sent."""

    def side_channel_gather(self, message: str, wait_s: float) -> list[str | None] | None:
        """Gathers a message of each rank on rank 0, from any thread, also while main threads hang
        in a collective.

        On rank 0 the messages in rank order, with None for each that did not come within wait_s; on
        the others an empty list, once rank 0 has the message or wait_s is over. None where the
        engine cannot do it: Horovod on Gloo, MPI without MPI_THREAD_MULTIPLE, a group of split().
        """

    def split(self, color: int | None) -> Communicator | None:
        """The communicator of the ranks that give the same color, in the order of their ranks; None
        gives a rank none. A collective.

        Of the communicator of all ranks alone. The collectives of a group are apart from those of
        others; it has no side channel, its abort() ends every rank of the job, and it is closed
        with the job. Raises UserError where the engine cannot do it.
        """

    def abort(self, code: int) -> NoReturn:
        """Ends every rank at once, this one with exit code `code`."""

    def close(self) -> None:
        """Releases the engine. Every rank calls it once, last."""


class PointToPoint(Communicator, Protocol):
    """A communicator with the feature "p2p": one rank sends, another one receives. point_to_point()
    gives it.

    A message is received by the receive of the same tag from its sender; those of one tag in the
    order in which they were sent. The two buffers have the same number of bytes, in host memory, of
    any of NUMBER_TYPES, bool or bfloat16. `name` is for error messages alone.
    """

    def start_send(self, x: Buffer, to: int, name: str, tag: int = 0) -> Handle:
        """Without waiting for the receiver; x must not change until wait() has returned. tag: 0 to
        32767, as MPI guarantees."""

    def start_recv(self, x: Buffer, source: int, name: str, tag: int = 0) -> Handle:
        """Into the memory of x, which wait() returns."""

    def recv_from_any(self, x: Buffer, name: str, tag: int) -> int:
        """Waits for the first message of this tag, from any rank, which goes into the memory of x;
        returns its sender."""


class Elastic(Communicator, Protocol):
    """A communicator with the feature "shrink": the living ranks go on without those that are lost.
    elastic() gives it.

    A loss is found by the collective that needs the lost rank. Ranks are numbered anew then, in the
    order that they had.
    """

    def be_ready_to_shrink(self, gpu: bool) -> None:
        """Once, before a loss. A collective. gpu: whether what is reduced may be in a GPU's memory.

        Raises UserError, on all ranks, where this job cannot go on after a loss.
        """

    def is_loss(self, error: BaseException) -> bool:
        """Whether a collective raised this error because a rank is gone, or because another rank
        has found that out."""

    def confirm(self) -> None:
        """A collective that fails on every living rank where a rank was lost before it.

        The collective that a rank is lost in need not fail, and may give any numbers: until
        confirm() returns they are not to be relied on.
        """

    def shrink(self) -> list[int]:
        """Leaves out the ranks that are gone, once every living one calls it; each does so after a
        collective that failed.

        This object has another rank, size, local_rank and local_size then; what was under way is
        void, and so are the groups of split(), which are made again. Returns the ranks that are
        left out since the last shrink() that returned on this rank, as the launcher numbered them.
        Fails as a collective does where another rank is lost meanwhile: it is called again then.
        """


class Interruptible(Elastic, Protocol):
    """An elastic communicator whose groups of split() outlive a rank that is in none of them.
    interruptible() gives it."""

    def interrupt(self) -> None:
        """After a loss: what ranks wait for fails on every one, here but not in the groups, until
        shrink()."""


def interruptible(communicator: Communicator, where: str) -> Interruptible:
    """The communicator itself. Raises UserError where the loss of a rank ends the groups of
    split(), too."""
    elastic(communicator, where)
    if not hasattr(communicator, "interrupt"):
        what = (
            f"groups of ranks of the {communicator.name} engine do not go on without a rank that "
            "is lost"
        )
        raise UserError(what, where, "comm.engine=mpi (mpirun --with-ft ulfm); or guard.lost=stop")
    return cast(Interruptible, communicator)


def elastic(communicator: Communicator, where: str) -> Elastic:
    """The communicator itself. Raises UserError where its engine ends with the first rank that is
    lost."""
    if "shrink" not in communicator.features:
        what = f"the {communicator.name} engine does not go on without a rank that is lost"
        raise UserError(
            what,
            where,
            "comm.engine=mpi (mpirun --with-ft ulfm) or comm.engine=torchdist; or guard.lost=stop",
        )
    return cast(Elastic, communicator)


def point_to_point(communicator: Communicator, where: str) -> PointToPoint:
    """The communicator itself. Raises UserError where its engine sends nothing from one rank to
    another."""
    if "p2p" not in communicator.features:
        what = f"the {communicator.name} engine has no messages from one rank to another"
        raise UserError(what, where, "comm.engine=mpi or comm.engine=torchdist")
    return cast(PointToPoint, communicator)


class CompletedHandle:
    """The handle of a collective that is already done."""

    def __init__(self, result: Buffer) -> None:
        self._result = result

    def wait(self) -> Buffer:
        return self._result


class SingleProcessCommunicator:
    """The communicator of one process: every collective is the identity, on any buffer."""

    name = "single"
    rank = 0
    size = 1
    local_rank = 0
    local_size = 1
    features: frozenset[Feature] = frozenset(FEATURES)
    secret: str | None = None

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        return x

    def start_allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Handle:
        return CompletedHandle(x)

    def broadcast(self, x: Buffer, name: str, root: int = 0) -> Buffer:
        return x

    def start_broadcast(self, x: Buffer, name: str, root: int = 0) -> Handle:
        return CompletedHandle(x)

    def start_reduce(self, x: Buffer, name: str, root: int = 0) -> Handle:
        return CompletedHandle(x)

    def reduce_scatter(self, x: Buffer, name: str) -> Buffer:
        return x

    def start_reduce_scatter(self, x: Buffer, name: str) -> Handle:
        return CompletedHandle(x)

    def start_spread(self, x: Buffer, name: str) -> Handle:
        return CompletedHandle(x)

    def allgather(self, x: Buffer, name: str) -> Buffer:
        return x

    def allgather_object(self, thing: Any) -> list[Any]:
        return [thing]

    def broadcast_object(self, thing: Any, root: int = 0) -> Any:
        return self.allgather_object(thing)[root]

    def side_channel_gather(self, message: str, wait_s: float) -> list[str | None] | None:
        return [message]

    def split(self, color: int | None) -> Communicator | None:
        return None if color is None else self

    def abort(self, code: int) -> NoReturn:
        exit_now(code)

    def close(self) -> None:
        pass


class StartedCollectives(ABC):
    """Blocking collectives of an engine that are its started ones, waited for at once."""

    @abstractmethod
    def start_allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Handle:
        """Communicator.start_allreduce()"""

    @abstractmethod
    def start_broadcast(self, x: Buffer, name: str, root: int = 0) -> Handle:
        """Communicator.start_broadcast()"""

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        return self.start_allreduce(x, name, op).wait()

    def broadcast(self, x: Buffer, name: str, root: int = 0) -> Buffer:
        return self.start_broadcast(x, name, root).wait()


class AroundCommunicator:
    """A communicator around another one, which does the work. Its collectives go through pass_on(),
    which a subclass overrides."""

    def __init__(self, within: Any) -> None:
        """within: a communicator."""
        self.within = within

    def __getattr__(self, name: str) -> Any:
        return getattr(self.within, name)

    def pass_on(self, collective: str, x: Buffer, name: str, *more: Any) -> Any:
        """The result of the collective inside: a buffer, or of one that is started a Handle. more:
        op or root, where it has one."""
        return getattr(self.within, collective)(x, name, *more)

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        return self.pass_on("allreduce", x, name, op)

    def start_allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Handle:
        return self.pass_on("start_allreduce", x, name, op)

    def broadcast(self, x: Buffer, name: str, root: int = 0) -> Buffer:
        return self.pass_on("broadcast", x, name, root)

    def start_broadcast(self, x: Buffer, name: str, root: int = 0) -> Handle:
        return self.pass_on("start_broadcast", x, name, root)

    def start_reduce(self, x: Buffer, name: str, root: int = 0) -> Handle:
        return self.pass_on("start_reduce", x, name, root)

    def reduce_scatter(self, x: Buffer, name: str) -> Buffer:
        return self.pass_on("reduce_scatter", x, name)

    def start_reduce_scatter(self, x: Buffer, name: str) -> Handle:
        return self.pass_on("start_reduce_scatter", x, name)

    def start_spread(self, x: Buffer, name: str) -> Handle:
        return self.pass_on("start_spread", x, name)

    def allgather(self, x: Buffer, name: str) -> Buffer:
        return self.pass_on("allgather", x, name)


def part_of(length: int, rank: int, size: int) -> slice:
    """The part of a rank where `length` elements are split as reduce_scatter() does: the first
    ranks get one more."""
    least, more = divmod(length, size)
    start = rank * least + min(rank, more)
    return slice(start, start + least + (rank < more))


def connect(place: Placement, comm: CommConfig | None = None) -> Communicator:
    """The communicator of comm.engine=single. Raises UserError where a launcher started several
    processes."""
    if place.size > 1:
        what = f"{place.launcher} started {place.size} processes, but the single engine is for one"
        raise UserError(
            what, "comm.engine=single", "comm.engine=auto, or start it without a launcher"
        )
    return SingleProcessCommunicator()


def check_buffer(communicator: Communicator, x: Buffer, collective: str, name: str) -> None:
    """Raises UserError, in one wording for all engines, where a collective cannot take x: its
    dtype, its memory layout or its shape."""
    engine = communicator.name
    dtype = str(x.dtype).removeprefix("torch.")
    where = f"comm.engine={engine}, {collective} {name!r}"
    extra: tuple[str, ...] = ("bool",) if collective in ("broadcast", "allgather") else ()
    if (
        collective in ("allreduce", "start_reduce_scatter")
        and "bfloat16_sums" in communicator.features
    ):
        extra = ("bfloat16",)
    if collective in ("send", "recv"):
        extra = ("bool", "bfloat16")
    if dtype not in (*NUMBER_TYPES, *extra):
        raise UserError(
            f"the {engine} engine has no {collective} of {dtype}",
            where,
            f"convert it to one of {', '.join(NUMBER_TYPES)}",
        )
    if not (x.flags.c_contiguous if hasattr(x, "flags") else x.is_contiguous()):
        what = (
            f"{collective} of {dtype} {tuple(x.shape)}: the {engine} engine takes contiguous "
            "memory only"
        )
        raise UserError(what, where, "copy it first")
    if collective in ("reduce_scatter", "start_reduce_scatter", "allgather") and not x.ndim:
        raise UserError(
            f"{collective} of {dtype} (): the {engine} engine needs an axis 0",
            where,
            "reshape it to (1,)",
        )


def writable(x: Buffer) -> Buffer:
    """x itself, or a copy of an array that is read-only, as numpy's view of a JAX array is."""
    return x if not hasattr(x, "flags") or x.flags.writeable else x.copy()
