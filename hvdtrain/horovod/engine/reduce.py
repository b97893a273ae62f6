"""Reductions over ranks, for every dtype that torch can add, by collectives or from the blocks of a
round; and Adasum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hvdtrain.comm.communicator import NUMBER_TYPES, Communicator, part_of, point_to_point
from hvdtrain.horovod.engine.agree import INLINE_BYTES, INLINE_RANKS, NegotiationBlock, TensorViews
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.engine.requests import ANY, Request, Signature, name_of

SWAP_TAG = 22  # tag of the messages of swap()
GATHER_BYTES = 4 << 20  # size of a piece that every rank receives from every other, on a device
# up to this size, a tensor is sent to every rank in one exchange instead of two
WHOLE_BYTES = 64 << 10
# above it, each rank reduces a part of each piece of this size, which bounds the memory
PIECE_BYTES = 16 << 20
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WHOLE = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
_COMPUTED = frozenset({*_FLOATS, *_WHOLE, *_REAL, torch.bool})
_OPS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


def check_op(op: str, dtype: torch.dtype, has_factors: bool, where: str) -> None:
    """Raises BadCall for a reduction that is undefined or that torch does not support, because
    within a round it would end the job."""
    wrong = ""
    if dtype not in _COMPUTED:
        wrong = "torch does not compute with it"
    elif dtype == torch.bool and (op == "average" or has_factors):
        wrong = (
            "an average of bool is not bool"
            if op == "average"
            else "bool times a factor is not bool"
        )
    elif dtype.is_complex and op in ("min", "max", "adasum"):
        wrong = "complex numbers have no order" if op != "adasum" else "Adasum is for real numbers"
    elif op == "adasum" and not dtype.is_floating_point:
        wrong = "Adasum is for floating-point numbers"
    if wrong:
        fix = (
            "hvd.Sum or hvd.Max (or), hvd.Min or hvd.Product (and)"
            if dtype == torch.bool
            else "another op, or convert it first"
        )
        raise BadCall(f"{op} of {name_of(dtype)} is not supported: {wrong}", where, fix)


def check_moved(dtype: torch.dtype, where: str) -> None:
    """Raises BadCall for quantized numbers, and for numbers of less than a byte."""
    if dtype not in _COMPUTED and not name_of(dtype).startswith("float8_"):
        raise BadCall(
            f"{name_of(dtype)} cannot be sent",
            where,
            "tensor.dequantize(), or a view as torch.uint8",
        )


def start_reduce_(
    communicator: Communicator, flat: torch.Tensor, op: str, name: str
) -> Callable[[], None]:
    """Starts to replace a contiguous one-dimensional tensor by its reduction over ranks; the
    returned function waits for the result.

    op: sum, min, max, product, adasum. For bools, sum and max mean "any", min and product mean
    "all".
    """
    if flat.numel() == 0 or communicator.size == 1:
        return lambda: None
    if op == "adasum":
        return lambda: adasum_(communicator, flat, name)
    if flat.dtype in _REAL and op == "sum":
        return start_reduce_(communicator, torch.view_as_real(flat).view(-1), op, name)
    if flat.dtype == torch.bool:
        return start_reduce_(
            communicator, flat.view(torch.uint8), "max" if op in ("sum", "max") else "min", name
        )
    if is_for_engine(communicator, flat, op):
        handle = communicator.start_allreduce(flat, name, op)  # type: ignore[arg-type]  # one of sum, min, max here
        return lambda: _take(flat, handle.wait())
    reduce_ = _reduce_in_order_ if flat.device.type == "cpu" else _reduce_gathered_
    return lambda: reduce_(communicator, flat, op, name)


def is_for_engine(communicator: Communicator, flat: torch.Tensor, op: str) -> bool:
    """Whether the engine reduces the tensor, in an order that depends on the buffer's size.

    It is not used for minima and maxima of floating-point numbers, because MPI and Gloo lose a nan.
    It is not used for sums that fit into a round's blocks, either. Blocks are summed in rank order,
    and the bits must not depend on whether a sum is sent in a block.
    """
    dtype = name_of(flat.dtype)
    if op == "product" or not (
        dtype in NUMBER_TYPES
        or (dtype == "bfloat16" and op == "sum" and "bfloat16_sums" in communicator.features)
    ):
        return False
    if flat.device.type != "cpu" or not flat.is_floating_point():
        return True
    return op == "sum" and (
        flat.nbytes > INLINE_BYTES or communicator.size == 2 or communicator.size > INLINE_RANKS
    )


def scattered_sums(
    communicator: Communicator, tensors: Sequence[torch.Tensor], name: str
) -> list[torch.Tensor]:
    """Returns this rank's rows of each tensor's sum over ranks, using the engine's reduce-scatter:
    one call for all tensors whose rows divide evenly.

    tensors: of one dtype, contiguous, with at least one dimension; they may be overwritten. For
    other tensors, the first ranks have one more row.
    """
    size = communicator.size
    rows = [
        tensor.view(size, tensor.numel() // size) for tensor in tensors if len(tensor) % size == 0
    ]
    parts: Iterator[torch.Tensor] = iter(())
    if rows:
        joined = rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
        parts = iter(
            communicator.start_reduce_scatter(joined, name)
            .wait()
            .split([row.shape[1] for row in rows], dim=1)
        )
    sums = []
    for tensor in tensors:
        if len(tensor) % size == 0:
            own = next(parts).reshape(len(tensor) // size, *tensor.shape[1:])
        else:
            own = communicator.start_reduce_scatter(tensor, name).wait()
        # a copy, because the engine may return a view of the whole
        sums.append(own.clone())
    return sums


def _take(flat: torch.Tensor, found: torch.Tensor) -> None:
    if found.data_ptr() != flat.data_ptr():
        flat.copy_(found)


def _reduce_in_order_(communicator: Communicator, flat: torch.Tensor, op: str, name: str) -> None:
    """Reduces in rank order, rounding to the dtype at each step."""
    size = communicator.size
    rank = communicator.rank
    if flat.nbytes <= WHOLE_BYTES:
        flat.copy_(_reduced_of_all(communicator, [flat] * size, op, name))
        return
    step = max(size, PIECE_BYTES // flat.element_size())
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step]
        parts = [piece[part_of(len(piece), other, size)] for other in range(size)]
        parts[rank].copy_(_reduced_of_all(communicator, parts, op, name))
        swap(communicator, [parts[rank]] * size, parts, name)


def _reduced_of_all(
    communicator: Communicator, mine: Sequence[torch.Tensor], op: str, name: str
) -> torch.Tensor:
    """Reduces the parts that all ranks have for this one. mine: this rank's parts for each rank."""
    rank = communicator.rank
    theirs = [
        part if other == rank else torch.empty_like(mine[rank]) for other, part in enumerate(mine)
    ]
    swap(communicator, mine, theirs, name)
    return reduced(op, theirs, rank)


def _reduce_gathered_(communicator: Communicator, flat: torch.Tensor, op: str, name: str) -> None:
    """Gathers all ranks' tensors on every rank and reduces them in rank order, because there are no
    messages between devices."""
    step = max(1, GATHER_BYTES // flat.element_size())
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step]
        parts = (
            communicator.allgather(as_bytes(piece), name)
            .view(flat.dtype)
            .view(communicator.size, -1)
        )
        total = parts[0].clone()
        for part in parts[1:]:
            combine(op, total, part, total)
        piece.copy_(total)


def reduced(op: str, parts: Sequence[torch.Tensor], own: int) -> torch.Tensor:
    """Reduces in rank order. parts: of each rank; all except rank `own`'s may be overwritten."""
    if len(parts) == 1:
        return parts[0].clone()
    total = combine(op, parts[0], parts[1], parts[1] if own == 0 else parts[0])
    for part in parts[2:]:
        combine(op, total, part, total)
    return total


def combine(
    op: str, one: torch.Tensor, other: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Combines two tensors elementwise, into `out` or new memory. Uses NumPy for unsigned integers
    that torch does not support."""
    if name_of(one.dtype) in ("uint16", "uint32", "uint64"):
        function = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}[op]
        total = torch.from_numpy(function(one.cpu().numpy(), other.cpu().numpy())).to(one.device)
        return total if out is None else out.copy_(total)
    return _OPS[op](one, other, out=out)


def scale_(tensor: torch.Tensor, factor: float) -> None:
    """Multiplies in place. Integers are multiplied in float64 and truncated towards zero, as
    Horovod does."""
    if factor == 1.0:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.to(torch.float64).mul_(factor).trunc_())


def average_(tensor: torch.Tensor, ranks: int, factor: float) -> None:
    """Divides the sum by the number of ranks and multiplies it by `factor`, in place. Integers are
    divided exactly, then truncated."""
    if factor != 1.0 or tensor.is_floating_point() or tensor.is_complex():
        scale_(tensor, factor / ranks)
    elif tensor.dtype in (
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ):  # in host memory: torch does not divide them
        array = tensor.numpy()
        array //= ranks
    else:
        tensor.div_(ranks, rounding_mode="trunc")


def finish_reduction_(flat: torch.Tensor, op: str, ranks: int, postscale: float) -> None:
    """ranks: the number of ranks that contributed."""
    if op == "average":
        average_(flat, ranks, postscale)
    else:
        scale_(flat, postscale)


def neutral(op: str, dtype: torch.dtype) -> float | bool:
    """Returns the neutral element, which a joined rank contributes."""
    if op not in ("min", "max", "product"):
        return 0
    if op == "product":
        return 1
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("inf") if op == "min" else float("-inf")
    limits = torch.iinfo(dtype)
    return limits.max if op == "min" else limits.min


def stand_in(signature: Signature, size: int) -> Request:
    """Returns a joined rank's stand-in for a request of other ranks, which does not change their
    results. size: number of ranks in the set."""
    inputs = []
    for dtype_name, shape, device in zip(
        signature.dtypes, signature.shapes, signature.devices, strict=True
    ):
        dtype = getattr(torch, dtype_name)
        lengths = [0 if length == ANY else length for length in shape]
        value = (
            neutral(signature.op, dtype) if signature.kind in ("allreduce", "reducescatter") else 0
        )
        inputs.append(torch.full(lengths, value, dtype=dtype, device=device))
    request = Request(signature, inputs, splits=[0] * size if signature.kind == "alltoall" else ())
    request.is_stand_in = True
    return request


def finish_inline(
    block: NegotiationBlock, requests: Sequence[Request], ranks: Sequence[int]
) -> None:
    """Results of small tensors that came with a round's blocks: every rank computes them from all
    ranks' values, in rank order.

    ranks: the set's, numbered in the job.
    """
    places = iter(block.places_of(requests))
    for request in requests:
        results = []
        for index, tensor in enumerate(request.inputs):
            value = _result(request, next(places), ranks).view(tensor.shape)
            results.append(request.outputs[index].copy_(value) if request.outputs else value)
        request.finish(results)


def _result(request: Request, place: TensorViews, ranks: Sequence[int]) -> torch.Tensor:
    """Returns the result in new memory."""
    signature = request.signature
    if signature.kind == "broadcast":
        return place.of_ranks[ranks.index(signature.root)].clone()
    parts = place.of_ranks
    if signature.prescale != 1.0:
        parts = [part.clone() for part in parts]
        for part in parts:
            scale_(part, signature.prescale)
    op = "sum" if signature.op == "average" else signature.op
    total = parts[0].clone() if len(parts) == 1 else combine(op, parts[0], parts[1])
    for part in parts[2:]:
        combine(op, total, part, total)
    finish_reduction_(total, signature.op, len(parts), signature.postscale)
    return total


def swap(
    communicator: Communicator,
    mine: Sequence[torch.Tensor],
    theirs: Sequence[torch.Tensor],
    name: str,
) -> None:
    """Exchanges tensors in host memory: mine[r] is sent to rank r; theirs[r], which must be
    contiguous, receives rank r's tensor.

    For this rank, both may be the same memory.
    """
    rank = communicator.rank
    if theirs[rank].data_ptr() != mine[rank].data_ptr():
        theirs[rank].copy_(mine[rank])
    others = [other for other in range(communicator.size) if other != rank]
    if not others:
        return
    wire = point_to_point(communicator, f"messages of {name!r}")
    handles = [
        wire.start_recv(as_bytes(theirs[other].view(-1)), other, name, SWAP_TAG)
        for other in others
        if theirs[other].numel()
    ]
    handles += [
        wire.start_send(as_bytes(mine[other].reshape(-1)), other, name, SWAP_TAG)
        for other in others
        if mine[other].numel()
    ]
    for handle in handles:
        handle.wait()


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous one-dimensional tensor as a view of bytes."""
    if not flat.numel():
        return flat.new_empty(0, dtype=torch.uint8)
    if (
        flat.stride(0) != 1
    ):  # for a single number, such as a row of a transposed tensor, any stride is contiguous
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)


ADASUM_TAG = 21  # tag of its messages


def adasum_of_two(
    a: torch.Tensor, b: torch.Tensor, aa: float, bb: float, ab: float
) -> torch.Tensor:
    """Computes Adasum of two vectors (section 3.1: (1 - ab / 2 aa) a + (1 - ab / 2 bb) b), or of a
    part of each; aa, bb, ab are products of the whole vectors."""
    of_a = 1.0 - ab / (2.0 * aa) if aa else 1.0
    of_b = 1.0 - ab / (2.0 * bb) if bb else 1.0
    return a * of_a + b * of_b


def adasum_(communicator: Communicator, flat: torch.Tensor, name: str) -> None:
    """Combines one vector of each rank in place: orthogonal ones are added, parallel ones averaged
    (Maleki et al. 2020, arXiv:2006.02924).

    Pairs of ranks, then pairs of pairs (section 4.2: halves of the vector, twice the distance).

    Ranks beyond the largest power of two are combined first: each adds its vector to a lower
    rank's. Products are float64.
    """
    if communicator.size == 1:
        return
    power = 1 << (communicator.size.bit_length() - 1)
    wire = _Wire(point_to_point(communicator, f"Adasum {name!r}"), name)
    rank = communicator.rank
    beyond = communicator.size - power
    if rank >= power:
        wire.send(flat, rank - power)
        flat.copy_(wire.receive(flat, rank - power))
        return
    if rank < beyond:
        other = wire.receive(flat, rank + power)
        flat.copy_(adasum_of_two(flat, other, *_products(flat, other)))
    _halve_and_double_(wire, flat, rank, power)
    if rank < beyond:
        wire.send(flat, rank + power)


def _halve_and_double_(wire: _Wire, flat: torch.Tensor, rank: int, power: int) -> None:
    part = flat.clone()
    kept = [(0, flat.numel())]
    distance = 1
    while distance < power:
        partner = rank ^ distance
        is_lower = not rank & distance
        middle = part.numel() // 2
        mine, theirs = (
            (part[:middle], part[middle:]) if is_lower else (part[middle:], part[:middle])
        )
        other = wire.swap(theirs, mine, partner)
        a, b = (mine, other) if is_lower else (other, mine)
        products = torch.tensor(_products(a, b), dtype=torch.float64, device="cpu")
        step = 1
        while step <= distance:  # over the ranks that hold the other parts of these two vectors
            products += wire.swap(products, products, rank ^ step)
            step *= 2
        part = adasum_of_two(a, b, *products.tolist())
        start, end = kept[-1]
        kept.append((start, start + middle) if is_lower else (start + middle, end))
        distance *= 2
    _spread_(wire, flat, part, kept, rank)


def _spread_(
    wire: _Wire, flat: torch.Tensor, part: torch.Tensor, kept: list[tuple[int, int]], rank: int
) -> None:
    """Gathers the parts of all ranks on every rank, in reverse order. kept: the ranges that this
    rank has had, the whole first."""
    start, end = kept[-1]
    flat[start:end] = part
    for level in range(len(kept) - 2, -1, -1):
        (outer_start, outer_end), (start, end) = kept[level], kept[level + 1]
        missing = flat[end:outer_end] if start == outer_start else flat[outer_start:start]
        missing.copy_(wire.swap(flat[start:end], missing, rank ^ (1 << level)))


def _products(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float, float]:
    x = a.to(torch.float64)
    y = b.to(torch.float64)
    return float(x @ x), float(y @ y), float(x @ y)


class _Wire:
    """Messages between two ranks, through host memory: engines have no messages between devices."""

    def __init__(self, communicator: Any, name: str) -> None:
        self._communicator = communicator
        self._name = name

    def send(self, x: torch.Tensor, to: int) -> None:
        self._communicator.start_send(x.cpu().contiguous(), to, self._name, ADASUM_TAG).wait()

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        found: torch.Tensor = self._communicator.start_recv(
            _on_host(like), source, self._name, ADASUM_TAG
        ).wait()
        return found.to(like.device)

    def swap(self, mine: torch.Tensor, like: torch.Tensor, partner: int) -> torch.Tensor:
        """Returns the partner's tensor, which has the shape of `like`."""
        receiving = self._communicator.start_recv(_on_host(like), partner, self._name, ADASUM_TAG)
        self._communicator.start_send(
            mine.cpu().contiguous(), partner, self._name, ADASUM_TAG
        ).wait()
        found: torch.Tensor = receiving.wait()
        return found.to(like.device)


def _on_host(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu")
