"""The Communicator protocol that every engine implements, and its reference implementation, the
`single` engine for one process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, NoReturn, Protocol, cast

from hvdtrain.comm.engines import Feature
from hvdtrain.comm.launcher_variables import Placement
from hvdtrain.config.sections.comm import CommConfig
from hvdtrain.core.process import exit_now
from hvdtrain.errors import UserError

# a C-contiguous numpy array or torch tensor; check_buffer() rejects what an engine cannot take
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
FEATURES: set[Feature] = {"device_memory", "bfloat16_sums"}  # features of comm.engine=single


class Handle(Protocol):
    """A collective that has been started."""

    def wait(self) -> Buffer:
        """Waits and returns the result; called once. Handles may be waited for in any order."""


class Communicator(Protocol):
    """The collectives between `size` ranks.

    Every rank calls the same collectives in the same order. `name` identifies a collective and
    repeats at every step: Horovod caches by it, and its stall warnings print it. The result may be
    the memory of x, overwritten: use the returned buffer. The result has the type (array or
    tensor), dtype and device of x. All engines reduce and move NUMBER_TYPES and move bool; integers
    that overflow wrap around. Collectives raise UserError for a buffer that the engine cannot take.
    """

    name: str  # name, as in comm.engine=NAME
    rank: int
    size: int
    local_rank: int  # among the ranks of this host
    local_size: int
    features: frozenset[Feature]  # optional features of this engine, see comm/engines.py

    @property
    def secret(self) -> str | None:
        """The job's secret, which signs what ranks pickle for each other; "" if the job has none,
        and then ranks do not pickle. None if strangers cannot reach the connection (MPI, or one
        process)."""

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        """Reduces x elementwise over all ranks; x has the same shape and dtype on every rank."""

    def start_allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Handle:
        """Starts an allreduce(); returns before it is done if the engine is "asynchronous". x must
        not be used until wait() has returned."""

    def broadcast(self, x: Buffer, name: str, root: int = 0) -> Buffer:
        """Returns x of rank `root` on every rank; x has the same shape and dtype on every rank."""

    def start_broadcast(self, x: Buffer, name: str, root: int = 0) -> Handle:
        """Starts a broadcast(); returns before it is done if the engine is "asynchronous". x must
        not be used until wait() has returned."""

    def start_reduce(self, x: Buffer, name: str, root: int = 0) -> Handle:
        """Starts a sum over ranks whose result only rank `root` receives; on other ranks it is
        unspecified. Takes the same buffers as start_allreduce().

        x must not be used again: it may be overwritten.
        """

    def reduce_scatter(self, x: Buffer, name: str) -> Buffer:
        """Returns this rank's part of the sum over ranks. The sum is split along axis 0 as
        numpy.array_split does: the first ranks get one row more."""

    def start_reduce_scatter(self, x: Buffer, name: str) -> Handle:
        """Starts a reduce_scatter(); returns before it is done if the engine is "asynchronous".

        x must not be used again: it may be overwritten, and the result may be a view of it.
        """

    def start_spread(self, x: Buffer, name: str) -> Handle:
        """Starts the inverse of reduce_scatter(): broadcasts each rank's part of x, split along
        axis 0 in the same way. The result is x.

        x has the same shape and dtype on every rank; only the rank's own part of it is read.
        """

    def allgather(self, x: Buffer, name: str) -> Buffer:
        """Concatenates every rank's x along axis 0, in rank order; the lengths of axis 0 may
        differ."""

    def allgather_object(self, thing: Any) -> list[Any]:
        """Returns one small object from each rank, in rank order: plain values, arrays, paths and
        value classes of hvdtrain (comm/signed.py)."""

    def broadcast_object(self, thing: Any, root: int = 0) -> Any:
        """Returns the object of rank `root` on every rank; objects on other ranks are ignored.
        Takes the same types as allgather_object()."""

    def side_channel_gather(self, message: str, wait_s: float) -> list[str | None] | None:
        """Gathers a message of each rank on rank 0, from any thread, also while main threads hang
        in a collective.

        Returns the messages in rank order on rank 0, with None for each that did not arrive within
        wait_s. On other ranks, returns an empty list when rank 0 has the message or wait_s is over.
        Returns None if the engine does not support it: Horovod on Gloo, MPI without
        MPI_THREAD_MULTIPLE, a group of split().
        """

    def split(self, color: int | None) -> Communicator | None:
        """Returns the communicator of the ranks that pass the same color, in rank order; a rank
        that passes None gets none. A collective.

        Only the communicator of all ranks can be split. The collectives of a group do not interfere
        with other groups. A group has no side channel, its abort() ends every rank of the job, and
        it is closed with the job. Raises UserError if the engine does not support groups.
        """

    def abort(self, code: int) -> NoReturn:
        """Ends every rank immediately, this one with exit code `code`."""

    def close(self) -> None:
        """Releases the engine. Every rank calls it once, last."""


class PointToPoint(Communicator, Protocol):
    """A communicator with the feature "p2p": one rank sends, another receives. See
    point_to_point().

    A receive matches a message from the given sender with the same tag; messages with one tag
    arrive in the order in which they were sent. The two buffers have the same number of bytes, in
    host memory, of any of NUMBER_TYPES, bool or bfloat16. `name` only appears in error messages.
    """

    def start_send(self, x: Buffer, to: int, name: str, tag: int = 0) -> Handle:
        """Starts a send without waiting for the receiver; x must not change until wait() has
        returned. tag: 0 to 32767, as MPI guarantees."""

    def start_recv(self, x: Buffer, source: int, name: str, tag: int = 0) -> Handle:
        """Starts a receive into the memory of x, which wait() returns."""

    def recv_from_any(self, x: Buffer, name: str, tag: int) -> int:
        """Waits for the first message with this tag from any rank, and receives it into x; returns
        its sender."""


class Elastic(Communicator, Protocol):
    """A communicator with the feature "shrink": the surviving ranks continue after others die. See
    elastic().

    The collective that needs a dead rank reports the loss. The survivors are then renumbered in
    their old order.
    """

    def be_ready_to_shrink(self, gpu: bool) -> None:
        """Prepares for the loss of a rank; called once, before any loss. A collective. gpu: whether
        reduced tensors may be in GPU memory.

        Raises UserError, on all ranks, if this job cannot continue after a loss.
        """

    def is_loss(self, error: BaseException) -> bool:
        """Whether a collective raised this error because a rank is gone, or because another rank
        has noticed it."""

    def confirm(self) -> None:
        """A collective that fails on every surviving rank if a rank died before it.

        A collective during which a rank dies may succeed with wrong numbers: do not rely on results
        until confirm() returns.
        """

    def shrink(self) -> list[int]:
        """Removes the dead ranks. Returns when every surviving rank has called it; each calls it
        after a failed collective.

        Afterwards this object has new values of rank, size, local_rank and local_size. Pending
        collectives and the groups of split() become invalid; groups must be created again. Returns
        the ranks, by launcher number, that were removed since the last shrink() that returned on
        this rank. If another rank dies meanwhile, it fails like a collective; call it again.
        """


class Interruptible(Elastic, Protocol):
    """An elastic communicator whose groups of split() survive the loss of a rank outside of them.
    See interruptible()."""

    def interrupt(self) -> None:
        """Called after a loss. Makes every pending collective of this communicator fail on every
        rank, until shrink(). Groups of split() are not affected."""


def interruptible(communicator: Communicator, where: str) -> Interruptible:
    """Returns the communicator itself. Raises UserError if the loss of a rank also ends the groups
    of split()."""
    elastic(communicator, where)
    if not hasattr(communicator, "interrupt"):
        what = (
            f"with the {communicator.name} engine, a group of ranks does not survive the loss of "
            "a rank outside it"
        )
        raise UserError(what, where, "comm.engine=mpi (mpirun --with-ft ulfm); or guard.lost=stop")
    return cast(Interruptible, communicator)


def elastic(communicator: Communicator, where: str) -> Elastic:
    """Returns the communicator itself. Raises UserError if the engine ends when the first rank
    dies."""
    if "shrink" not in communicator.features:
        what = f"the {communicator.name} engine cannot continue after a rank dies"
        raise UserError(
            what,
            where,
            "comm.engine=mpi (mpirun --with-ft ulfm) or comm.engine=torchdist; or guard.lost=stop",
        )
    return cast(Elastic, communicator)


def point_to_point(communicator: Communicator, where: str) -> PointToPoint:
    """Returns the communicator itself. Raises UserError if its engine does not support
    point-to-point messages."""
    if "p2p" not in communicator.features:
        what = f"the {communicator.name} engine cannot send messages from one rank to another"
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
    """Implements an engine's blocking collectives by starting each one and waiting for it."""

    @abstractmethod
    def start_allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Handle:
        """Implements Communicator.start_allreduce()."""

    @abstractmethod
    def start_broadcast(self, x: Buffer, name: str, root: int = 0) -> Handle:
        """Implements Communicator.start_broadcast()."""

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        return self.start_allreduce(x, name, op).wait()

    def broadcast(self, x: Buffer, name: str, root: int = 0) -> Buffer:
        return self.start_broadcast(x, name, root).wait()


class AroundCommunicator:
    """A communicator that wraps another one. Its collectives go through pass_on(), which a subclass
    overrides."""

    def __init__(self, within: Any) -> None:
        """within: the wrapped communicator."""
        self.within = within

    def __getattr__(self, name: str) -> Any:
        return getattr(self.within, name)

    def pass_on(self, collective: str, x: Buffer, name: str, *more: Any) -> Any:
        """Returns the wrapped communicator's result: a buffer, or a Handle from a start_...() call.
        more: op or root, for collectives that take one."""
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
    """Returns the part of a rank if `length` elements are split like in reduce_scatter(): the first
    ranks get one more."""
    least, more = divmod(length, size)
    start = rank * least + min(rank, more)
    return slice(start, start + least + (rank < more))


def connect(place: Placement, comm: CommConfig | None = None) -> Communicator:
    """Returns the communicator of comm.engine=single. Raises UserError if a launcher started
    several processes."""
    if place.size > 1:
        what = (
            f"{place.launcher} started {place.size} processes, but the single engine supports "
            "only one"
        )
        raise UserError(
            what, "comm.engine=single", "comm.engine=auto, or start it without a launcher"
        )
    return SingleProcessCommunicator()


def check_buffer(communicator: Communicator, x: Buffer, collective: str, name: str) -> None:
    """Raises UserError if a collective does not support the dtype, memory layout or shape of x. All
    engines use the same wording."""
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
    """Returns x itself, or a copy if the array is read-only, such as NumPy's view of a JAX
    array."""
    return x if not hasattr(x, "flags") or x.flags.writeable else x.copy()
