"""A rank's requests to an engine, and the engine's interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

import torch
import xxhash

Kind = Literal[
    "allreduce",
    "allgather",
    "broadcast",
    "alltoall",
    "reducescatter",
    "barrier",
    "add_process_set",
    "remove_process_set",
]
ReduceOp = Literal["average", "sum", "adasum", "min", "max", "product"]
ANY = -1  # a length that may differ over ranks
# identifies a pending request: kind, name, whether it has several tensors
Key = tuple[str, str, bool]
_DTYPE_NAMES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_digests: dict[Signature, int] = {}
_MOST_DIGESTS = 100_000


class Signature(NamedTuple):
    """The description of a request. It must be equal on every participating rank; otherwise an
    error names the ranks and the difference."""

    name: str
    kind: str
    op: str = ""
    dtypes: tuple[str, ...] = ()  # dtype of each tensor: "float32"
    shapes: tuple[tuple[int, ...], ...] = ()
    root: int = ANY  # a rank of the job
    prescale: float = 1.0
    postscale: float = 1.0
    ranks: tuple[int, ...] = ()  # ranks of a process set that is added or removed
    devices: tuple[str, ...] = ()  # device of each tensor: "cpu"

    @property
    def where(self) -> str:
        return f"{self.kind} {self.name!r}" + f" of {len(self.shapes)} tensors" * (
            len(self.shapes) > 1
        )

    @property
    def key(self) -> Key:
        """Calls of several kinds may share a name, as in Horovod."""
        return self.kind, self.name, len(self.shapes) > 1


class Request:
    """A requested collective, with its result or error once it is done."""

    __slots__ = (
        *("asked", "bucket", "done", "error", "inputs", "is_stand_in", "key", "made"),
        *("outputs", "polled_s", "result", "signature", "splits"),
    )

    def __init__(
        self,
        signature: Signature,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor] = (),
        splits: Sequence[int] = (),
    ) -> None:
        """inputs: contiguous, not changed unless they are also outputs. outputs: receive the
        results; if empty, new memory is used.

        splits: for alltoall, the rows for each rank of the set.
        """
        self.signature = signature
        self.inputs = inputs
        self.outputs = outputs
        self.splits = splits
        self.key = signature.key
        self.bucket = 0  # requests of one bucket may be fused
        self.is_stand_in = False  # the rank has joined, so its tensors do not affect the results
        self.polled_s: float | None = None  # time.monotonic() of the first poll()
        self.asked: Sequence[Any] = ()  # GPU stream events after which the inputs are ready
        self.made: Sequence[Any] = ()  # GPU stream events after which the results are ready
        self.done = False
        self.result: Any = None  # a list: of each tensor
        self.error: BaseException | None = None

    def finish(self, result: Any, made: Sequence[Any] = ()) -> None:
        """Completes the request. made: stream events after which result tensors on a GPU are
        ready."""
        self.result = result
        self.made = made
        self.done = True  # set last, because another thread may check it

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.done = True

    @property
    def size_bytes(self) -> int:
        return sum([tensor.nbytes for tensor in self.inputs])


def name_of(dtype: torch.dtype) -> str:
    """Returns the name of a dtype: "float32"."""
    return _DTYPE_NAMES[dtype]


def digest(signature: Signature) -> int:
    """Returns a 64-bit digest of a signature, the same in every process."""
    number = _digests.get(signature)
    if number is None:
        if len(_digests) > _MOST_DIGESTS:
            _digests.clear()
        number = _digests[signature] = xxhash.xxh64_intdigest(repr(tuple(signature)).encode()) >> 2
    return number


def combined(digests: Sequence[int]) -> int:
    """Combines several digests in this order into 63 bits."""
    return digests[0] if len(digests) == 1 else xxhash.xxh64_intdigest(repr(digests).encode()) >> 1


GLOBAL = 0  # id of the process set of all ranks


class Engine(Protocol):
    """An engine: either hvdtrain's, whose ranks negotiate and use a communicator, or Horovod
    itself."""

    name: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool

    @property
    def secret(self) -> str | None:
        """See Communicator.secret."""

    def submit(self, set_id: int, request: Request) -> int:
        """Submits a request and returns a handle. Raises BadCall if this rank is not in the set, or
        if a request with this name is pending."""

    def poll(self, handle: int) -> bool:
        """Whether wait() would return immediately."""

    def wait(self, handle: int) -> Any:
        """Waits and returns the result of a request, once for each handle. Raises the error of the
        request."""

    def join(self) -> int:
        """Takes part in other ranks' requests until all have joined; returns the rank that joined
        last."""

    def add_set(self, ranks: Sequence[int]) -> int:
        """Adds a process set and returns its id. Every rank of the job calls it. Raises BadCall if
        there is one of these ranks."""

    def remove_set(self, set_id: int) -> bool:
        """Removes a process set; returns whether it existed. Every rank of the job calls it."""

    def ranks_of(self, set_id: int) -> list[int]:
        """Returns the ranks of a set. Raises BadCall if it does not exist."""

    def be_ready_to_shrink(self) -> None:
        """Prepares for recover(), if the engine can exclude ranks. A collective."""

    def confirm(self) -> None:
        """Called before results are kept. Raises HorovodInternalError on every surviving rank if a
        rank died. A collective."""

    def recover(self, error: BaseException) -> None:
        """Called after an error on every surviving rank; excludes dead ranks. Raises the error if
        no rank died, or if the engine cannot recover."""

    def start_timeline(self, path: str, *, mark_cycles: bool) -> None:
        """Traces requests from now on, on rank 0, or on every rank if the path has "{rank}"."""

    def stop_timeline(self) -> None:
        """Completes the trace file; does nothing if no trace is being written."""

    def leave(self) -> None:
        """Ends pending requests and every process set except the global one, when every rank has
        called it."""

    def abort(self, code: int) -> NoReturn:
        """Ends every rank immediately."""
