"""What a rank asks an engine for: a collective of tensors, and which travel together; the engine,
and its settings from variables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

import torch
import xxhash

from hvdtrain.errors import UserError

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
# what a request is known by among those under way: kind, name, whether it has several tensors
Key = tuple[str, str, bool]
_DTYPE_NAMES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_digests: dict[Signature, int] = {}
_MOST_DIGESTS = 100_000
ALONE_BYTES = (
    1 << 20
)  # a tensor of so many is moved where it is: two copies would cost more than a collective of its own  # noqa: E501
# their sizes differ over ranks, so that nothing may depend on them
_ANY_ROWS = (
    "allgather",
    "alltoall",
)


class Signature(NamedTuple):
    """What describes a request: equal on every rank that takes part, or an error names the ranks
    and what differs."""

    name: str
    kind: str
    op: str = ""
    dtypes: tuple[str, ...] = ()  # of each tensor: "float32"
    shapes: tuple[tuple[int, ...], ...] = ()
    root: int = ANY  # a rank of the job
    prescale: float = 1.0
    postscale: float = 1.0
    ranks: tuple[int, ...] = ()  # of a process set that is added or removed
    devices: tuple[str, ...] = ()  # of each tensor: "cpu"

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
    """A collective that was asked for, with its result or error once it is done."""

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
        """inputs: contiguous, not changed unless they are outputs too. outputs: whose memory takes
        the results; new memory where empty.

        splits: of alltoall, the rows for each rank of the set.
        """
        self.signature = signature
        self.inputs = inputs
        self.outputs = outputs
        self.splits = splits
        self.key = signature.key
        self.bucket = 0  # requests of one bucket may be fused
        self.is_stand_in = (
            False  # of a rank that has joined: its tensors leave the results to the others
        )
        self.polled_s: float | None = None  # time.monotonic() of the first poll()
        self.asked: Sequence[
            Any
        ] = ()  # events of streams of GPUs: the inputs are there behind them
        self.made: Sequence[Any] = ()  # the same, of the results
        self.done = False
        self.result: Any = None  # a list: of each tensor
        self.error: BaseException | None = None

    def finish(self, result: Any, made: Sequence[Any] = ()) -> None:
        """made: events of streams, behind which tensors of the result that are on a GPU are
        there."""
        self.result = result
        self.made = made
        self.done = True  # last: another thread may look

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.done = True

    @property
    def size_bytes(self) -> int:
        return sum([tensor.nbytes for tensor in self.inputs])


def name_of(dtype: torch.dtype) -> str:
    """ "float32" """
    return _DTYPE_NAMES[dtype]


def digest(signature: Signature) -> int:
    """64 bits of a signature, the same in every process."""
    number = _digests.get(signature)
    if number is None:
        if len(_digests) > _MOST_DIGESTS:
            _digests.clear()
        number = _digests[signature] = xxhash.xxh64_intdigest(repr(tuple(signature)).encode()) >> 2
    return number


def combined(digests: Sequence[int]) -> int:
    """One digest of several, in this order: 63 bits."""
    return digests[0] if len(digests) == 1 else xxhash.xxh64_intdigest(repr(digests).encode()) >> 1


class RequestTensor(NamedTuple):
    """One tensor of a request."""

    request: Request
    place: int  # in the request
    source: torch.Tensor

    def target(self) -> torch.Tensor | None:
        """Whose memory takes the result, where the caller has given it."""
        return self.request.outputs[self.place] if self.request.outputs else None


class Batch(NamedTuple):
    """Units that one collective takes."""

    signature: Signature  # of the first; the others have its kind, op, factors and root
    units: list[RequestTensor]
    # ranks that asked for it: an average is over these, and not over those that have joined
    givers: int


def batches(requests: Sequence[tuple[Request, tuple[int, ...]]], fusion_bytes: int) -> list[Batch]:
    """In the order of their first units, which is the same on every rank. requests: each with the
    buckets that it has on the ranks.

    Only requests of one bucket on every rank share a batch: a bucket ends where its rank waits, so
    that batches do not depend on the time at which ranks come to an agreement.
    """
    made: list[Batch] = []
    last: dict[
        tuple[object, ...], tuple[list[RequestTensor], int]
    ] = {}  # what can be fused -> its newest batch, the bytes of that
    for request, buckets in requests:
        signature = request.signature
        kind = signature.kind
        op = signature.op
        key = kind, op, signature.root, signature.prescale, signature.postscale, buckets
        for place, source in enumerate(request.inputs):
            unit = RequestTensor(request, place, source)
            size = 0 if kind in _ANY_ROWS else source.nbytes
            if op == "adasum" or size >= ALONE_BYTES:
                made.append(Batch(signature, [unit], len(buckets)))
                continue
            whole = *key, source.dtype, source.device
            units, so_far = last.get(whole, (None, 0))
            if units is None or so_far + size > fusion_bytes:
                units = []
                so_far = 0
                made.append(Batch(signature, units, len(buckets)))
            units.append(unit)
            last[whole] = units, so_far + size
    return made


def runs(sizes: Sequence[int], fusion_bytes: int) -> list[tuple[int, int]]:
    """First and end of what travels together, of tensors of so many bytes in this order."""
    ranges: list[tuple[int, int]] = []
    so_far = fusion_bytes
    for place, size in enumerate(sizes):
        if size < ALONE_BYTES and so_far + size <= fusion_bytes and ranges:
            ranges[-1] = ranges[-1][0], place + 1
            so_far += size
        else:
            ranges.append((place, place + 1))
            so_far = size if size < ALONE_BYTES else fusion_bytes
    return ranges


GLOBAL = 0  # id of the process set of all ranks
FUSION_BYTES = 4 << 20  # on processors more makes an allreduce slower: docs/performance.md


class Engine(Protocol):
    """Own: agreed on by the ranks, made by a communicator; or Horovod itself."""

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
        """What Communicator.secret is."""

    def submit(self, set_id: int, request: Request) -> int:
        """A handle. Raises BadCall where this rank is not in the set, or a request of this name is
        under way."""

    def poll(self, handle: int) -> bool:
        """Whether wait() would return at once."""

    def wait(self, handle: int) -> Any:
        """The result of a request, once for each handle. Raises the error of the request."""

    def join(self) -> int:
        """Takes part in what other ranks ask for until all have joined; returns the rank that came
        last."""

    def add_set(self, ranks: Sequence[int]) -> int:
        """The id of a new process set. Every rank of the job calls it. Raises BadCall where there
        is one of these ranks."""

    def remove_set(self, set_id: int) -> bool:
        """Whether there was one. Every rank of the job calls it."""

    def ranks_of(self, set_id: int) -> list[int]:
        """Raises BadCall where there is no such set."""

    def be_ready_to_shrink(self) -> None:
        """So that recover() can leave out ranks, where the engine can. A collective."""

    def confirm(self) -> None:
        """Before what was computed is kept: raises HorovodInternalError on every living rank where
        one was lost. A collective."""

    def recover(self, error: BaseException) -> None:
        """After an error on every living rank: leaves out those that are lost. Raises the error
        where no rank is lost, or it cannot."""

    def start_timeline(self, path: str, *, mark_cycles: bool) -> None:
        """Traces the requests from now on, on rank 0, or on every rank where the path has
        "{rank}"."""

    def stop_timeline(self) -> None:
        """The file is complete. Nothing where none is written."""

    def leave(self) -> None:
        """Ends what is under way, and every process set but that of all ranks, once every rank
        does."""

    def abort(self, code: int) -> NoReturn:
        """Ends every rank at once."""


class Settings(NamedTuple):
    """Horovod's environment variables that mean something here. Times in seconds; None: never."""

    fusion_bytes: int = FUSION_BYTES  # HOROVOD_FUSION_THRESHOLD
    warn_s: float | None = 60.0  # HOROVOD_STALL_CHECK_TIME_SECONDS
    end_s: float | None = (
        300.0  # HOROVOD_STALL_SHUTDOWN_TIME_SECONDS; guard.stall_s has the same default
    )
    timeline: str | None = None  # HOROVOD_TIMELINE: a path
    marks_cycles: bool = False  # HOROVOD_TIMELINE_MARK_CYCLES
    deadlock_s: float = 2.0  # without progress while every rank waits: no rank can go on


def settings_of(environ: Mapping[str, str]) -> Settings:
    """Raises UserError for a value that is no number, or one that means nothing."""
    path = environ.get("HOROVOD_TIMELINE") or None
    default = Settings(
        timeline=None if path == "DYNAMIC" else path,  # Horovod's word for: not from the beginning
        marks_cycles=bool(_number(environ, "HOROVOD_TIMELINE_MARK_CYCLES", 0.0)),
    )
    if _number(environ, "HOROVOD_STALL_CHECK_DISABLE", 0.0):
        return default._replace(fusion_bytes=_fusion_bytes(environ), warn_s=None, end_s=None)
    return default._replace(
        fusion_bytes=_fusion_bytes(environ),
        warn_s=_number(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", default.warn_s),
        end_s=_number(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", default.end_s),
    )


def _fusion_bytes(environ: Mapping[str, str]) -> int:
    number = _number(environ, "HOROVOD_FUSION_THRESHOLD", FUSION_BYTES) or 0
    if math.isinf(number):
        raise _unusable(
            environ,
            "HOROVOD_FUSION_THRESHOLD",
            "a number of bytes, as 67108864; 0: nothing is fused",
        )
    return int(number)


def _number(environ: Mapping[str, str], name: str, default: float | None) -> float | None:
    """None for 0, which switches off."""
    text = environ.get(name)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number >= 0:
        raise _unusable(environ, name, "a number; 0 switches it off")
    return number or None


def _unusable(environ: Mapping[str, str], name: str, fix: str) -> UserError:
    return UserError(
        f"{name}={environ[name]!r} is not a number of 0 or more", "the environment", fix
    )
