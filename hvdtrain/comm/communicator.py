"""The Communicator protocol, and the communicator of comm.engine=single, which is its reference."""

from __future__ import annotations

from typing import Any, Literal, NoReturn, Protocol

from hvdtrain.comm.features import Feature
from hvdtrain.comm.placement import Placement
from hvdtrain.config.schema import CommConfig
from hvdtrain.core.exit import exit_now
from hvdtrain.errors import UserError

Buffer = Any  # a numpy array or a torch tensor, C-contiguous; check_buffer() refuses what an engine cannot take
Op = Literal["sum", "min", "max", "adasum"]  # adasum only with the feature "adasum"

NUMBER_TYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8")  # every engine reduces and moves them
FEATURES: set[Feature] = {"device_memory", "bfloat16_sums"}  # of comm.engine=single


class Handle(Protocol):
    """A collective that has been started."""

    def wait(self) -> Buffer:
        """The result; called once. Handles may be waited for in any order."""


class Communicator(Protocol):
    """The collectives between `size` ranks.

    Every rank calls the same collectives in the same order. `name` identifies a collective and repeats at every step: Horovod caches by
    it, and its stall warnings print it. The result may be the memory of x, overwritten: use the returned buffer. Type (array or tensor),
    dtype and device of the result are those of x. All engines reduce and move NUMBER_TYPES and move bool; integers that overflow wrap
    around. Collectives raise UserError for a buffer that the engine cannot take.
    """

    name: str  # as in comm.engine=NAME
    rank: int
    size: int
    local_rank: int  # among the ranks of this host
    local_size: int
    features: frozenset[Feature]  # what this engine can do beyond the protocol: comm/features.py

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        """Elementwise over all ranks; x has the same shape and dtype on every rank."""

    def start_allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Handle:
        """As allreduce(), without waiting for it where the engine is "asynchronous"; x must not be used until wait() has returned."""

    def broadcast(self, x: Buffer, name: str, root: int = 0) -> Buffer:
        """x of rank `root` on every rank; x has the same shape and dtype on every rank."""

    def reduce_scatter(self, x: Buffer, name: str) -> Buffer:
        """The sum over ranks, split along axis 0 as numpy.array_split does (the first ranks get one more): this rank's part."""

    def allgather(self, x: Buffer, name: str) -> Buffer:
        """Every rank's x along axis 0, in rank order; the lengths of axis 0 may differ."""

    def allgather_object(self, thing: Any) -> list[Any]:
        """One small object of each rank, pickled, in rank order."""

    def side_channel_gather(self, message: str, wait_s: float) -> list[str | None] | None:
        """Gathers a message of each rank on rank 0, from any thread, also while main threads hang in a collective.

        On rank 0 the messages in rank order, with None for each that did not come within wait_s; on the others an empty list, once rank
        0 has the message or wait_s is over. None where the engine cannot do it: Horovod on Gloo, or MPI without MPI_THREAD_MULTIPLE.
        """

    def abort(self, code: int) -> NoReturn:
        """Ends every rank at once, this one with exit code `code`."""

    def close(self) -> None:
        """Releases the engine. Every rank calls it once, last."""


class CompletedHandle:
    """The handle of a collective that is already done."""

    def __init__(self, result: Buffer) -> None:
        self._result = result

    def wait(self) -> Buffer:
        return self._result


class SingleProcessCommunicator:
    """The communicator of one process: every collective is the identity, on any buffer."""

    name = "single"
    rank, size, local_rank, local_size = 0, 1, 0, 1
    features: frozenset[Feature] = frozenset(FEATURES)

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        return x

    def start_allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Handle:
        return CompletedHandle(x)

    def broadcast(self, x: Buffer, name: str, root: int = 0) -> Buffer:
        return x

    def reduce_scatter(self, x: Buffer, name: str) -> Buffer:
        return x

    def allgather(self, x: Buffer, name: str) -> Buffer:
        return x

    def allgather_object(self, thing: Any) -> list[Any]:
        return [thing]

    def side_channel_gather(self, message: str, wait_s: float) -> list[str | None] | None:
        return [message]

    def abort(self, code: int) -> NoReturn:
        exit_now(code)

    def close(self) -> None:
        pass


def connect(place: Placement, comm: CommConfig | None = None) -> Communicator:
    """The communicator of comm.engine=single. Raises UserError where a launcher started several processes."""
    if place.size > 1:
        what = f"{place.launcher} started {place.size} processes, but the single engine is for one"
        raise UserError(what, "comm.engine=single", "comm.engine=auto, or start it without a launcher")
    return SingleProcessCommunicator()


def check_buffer(communicator: Communicator, x: Buffer, collective: str, name: str) -> None:
    """Raises UserError, in one wording for all engines, where a collective cannot take x: its dtype, its memory layout or its shape."""
    engine, dtype = communicator.name, str(x.dtype).removeprefix("torch.")
    where = f"comm.engine={engine}, {collective} {name!r}"
    extra = "bool" if collective in ("broadcast", "allgather") else ""
    if collective == "allreduce" and "bfloat16_sums" in communicator.features:
        extra = "bfloat16"
    if dtype not in (*NUMBER_TYPES, extra):
        raise UserError(f"the {engine} engine has no {collective} of {dtype}", where, f"convert it to one of {', '.join(NUMBER_TYPES)}")
    if not (x.flags.c_contiguous if hasattr(x, "flags") else x.is_contiguous()):
        what = f"{collective} of {dtype} {tuple(x.shape)}: the {engine} engine takes contiguous memory only"
        raise UserError(what, where, "copy it first")
    if collective in ("reduce_scatter", "allgather") and not x.ndim:
        raise UserError(f"{collective} of {dtype} (): the {engine} engine needs an axis 0", where, "reshape it to (1,)")


def writable(x: Buffer) -> Buffer:
    """x itself, or a copy of an array that is read-only, as numpy's view of a JAX array is."""
    return x if not hasattr(x, "flags") or x.flags.writeable else x.copy()
