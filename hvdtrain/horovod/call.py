"""A call from its beginning to its result: tensors of several libraries, operations by name,
request and wait; casts for the wire."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hvdtrain.horovod.basics import ProcessSet, global_process_set
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.engine.reduce import check_moved, check_op
from hvdtrain.horovod.engine.requests import ANY, ReduceOp, Request, Signature, name_of
from hvdtrain.horovod.job import JOB
from hvdtrain.horovod.libraries import is_of_tensorflow, is_traced_by_jax, value_of

Average, Sum, Adasum, Min, Max, Product = range(6)
Back = Callable[[torch.Tensor], Any]  # a result as a tensor of the caller's library
_NAMES: tuple[ReduceOp, ...] = ("average", "sum", "adasum", "min", "max", "product")


class CollectiveCall:
    """One call of a collective, with one or several tensors."""

    def __init__(
        self,
        kind: str,
        given: Any,
        name: str | None,
        process_set: ProcessSet,
        *,
        grouped: bool = False,
        in_place: bool = False,
    ) -> None:
        """given: a tensor, or a list of tensors if the call is grouped."""
        given = list(given) if grouped else [given]
        self._grouped = grouped
        self.set_id = process_set.process_set_id
        self._kind = kind
        self._given = given
        self._in_place = in_place
        self.name = JOB.name(kind, name, self.set_id)
        self.where = f"{kind} {self.name!r}"
        converted = [as_torch(x, self.where, in_place=in_place) for x in given]
        self.tensors = [tensor for tensor, _ in converted]
        self.backs: list[Back] = [back for _, back in converted]
        for tensor in self.tensors:
            check_moved(tensor.dtype, self.where)
        if in_place and any(
            stride == 0 and n > 1
            for tensor in self.tensors
            for stride, n in zip(tensor.stride(), tensor.shape, strict=True)
        ):
            raise BadCall(
                "elements of this tensor share memory",
                self.where,
                "tensor.contiguous(), or the call without the underscore",
            )
        self._gets_copies = in_place and not all(map(is_target, given, self.tensors))
        if not given:
            raise BadCall(
                "the list of tensors is empty", self.where, "a list of at least one tensor"
            )

    def needs_rows(self) -> None:
        """Raises BadCall if a tensor has no axis 0."""
        if any(tensor.ndim == 0 for tensor in self.tensors):
            raise BadCall(
                f"{self._kind} does not support scalar inputs: there is no axis 0",
                self.where,
                "tensor.reshape(1)",
            )

    def start(
        self,
        *,
        op: str = "",
        root: int = ANY,
        prescale: float = 1.0,
        postscale: float = 1.0,
        any_rows: bool = False,
        splits: Sequence[int] = (),
        finish: Callable[[Any], Any] | None = None,
    ) -> int:
        """Starts the call and returns a handle. any_rows: the lengths of axis 0 may differ. finish:
        applied to the result, or to the list of results if the call is grouped."""
        shapes = tuple(
            (ANY, *tensor.shape[1:]) if any_rows else tuple(tensor.shape) for tensor in self.tensors
        )
        dtypes = tuple(name_of(tensor.dtype) for tensor in self.tensors)
        devices = tuple([tensor.device.type for tensor in self.tensors])
        signature = Signature(
            self.name,
            self._kind,
            op,
            dtypes,
            shapes,
            root,
            float(prescale),
            float(postscale),
            (),
            devices,
        )
        inputs = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in self.tensors]
        request = Request(
            signature,
            inputs,
            self.tensors if self._in_place and not self._gets_copies else (),
            splits,
        )
        return JOB.submit(self.set_id, request, finish or self._finish)

    def start_reduction(self, op: int, prescale: float, postscale: float) -> int:
        """Starts a reduction and returns a handle. op: hvd.Average and so on. Raises BadCall for a
        reduction that the dtypes do not support."""
        reduction = op_name(op, self.where)
        for tensor in self.tensors:
            check_op(reduction, tensor.dtype, not prescale == postscale == 1, self.where)
        return self.start(op=reduction, prescale=prescale, postscale=postscale)

    def _finish(self, results: list[torch.Tensor]) -> Any:
        """Converts results to the caller's libraries; in place, returns the given tensors."""
        if self._gets_copies:
            for given, result in zip(self._given, results, strict=True):
                put(result, given)
        found = (
            self._given
            if self._in_place
            else [back(result) for back, result in zip(self.backs, results, strict=True)]
        )
        return tuple(found) if self._grouped else found[0]


def poll(handle: int) -> bool:
    """Whether synchronize() would return immediately. Also starts and runs collectives that do not
    have to wait for other ranks."""
    return JOB.poll(handle)


def synchronize(handle: int) -> Any:
    """Waits for a started collective and returns its result; None for a handle that was already
    synchronized.

    Raises HorovodInternalError if the ranks' calls do not match, or if a rank does not take part;
    the message names them.
    """
    return JOB.wait(handle)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank of the process set has called it."""
    JOB.barrier(process_set.process_set_id)


def join(device: int = -1) -> int:
    """Declares that this rank has no more data: until every rank has joined, it takes part in the
    others' reductions without contributing.

    Averages are over the ranks that are still active. Returns the rank that joined last. `device`
    is not needed.
    """
    return JOB.join()


def op_name(op: int, where: str) -> ReduceOp:
    """Returns the name of an operation. Raises ValueError for another number."""
    if not isinstance(op, int) or not 0 <= op < len(_NAMES):
        raise BadCall(
            f"op={op!r} is not a reduction", where, "hvd.Average, Sum, Adasum, Min, Max or Product"
        )
    return _NAMES[op]


def given_op(op: int | None, average: bool | None) -> int:
    """Returns the operation. `average` is the deprecated argument for Average and Sum. Raises
    ValueError if both are given."""
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise BadCall(
            "The op parameter supersedes average. Please provide only one of them.",
            "hvd.allreduce()",
            "op=hvd.Average or hvd.Sum",
        )
    warnings.warn(
        "Parameter `average` has been replaced with `op`", DeprecationWarning, stacklevel=4
    )
    return Average if average else Sum


def as_torch(x: Any, where: str, *, in_place: bool = False) -> tuple[torch.Tensor, Back]:
    """Returns x as a torch tensor, a view if possible, without its gradient. Raises BadCall for
    anything but a tensor, and for read-only memory."""
    if isinstance(x, torch.Tensor):
        if x.layout != torch.strided:
            raise BadCall(
                "sparse tensors are not supported here",
                where,
                "tensor.to_dense(); or hvd.sparse_allreduce_async()",
            )
        return (x.detach() if x.requires_grad else x), _same
    if isinstance(x, np.ndarray):
        if in_place and not x.flags.writeable:
            raise BadCall(
                "this array is read-only", where, "a copy of it, or the call without the underscore"
            )
        return _of_array(x, where), _to_numpy
    if isinstance(x, np.generic):
        if in_place:
            raise BadCall(
                "a NumPy scalar cannot be changed in place",
                where,
                "the call without the underscore, which returns a new tensor",
            )
        return _of_array(np.asarray(x), where), lambda tensor: _to_numpy(tensor)[()]
    if _is_of_jax(x):
        return _of_jax(x, where, in_place)
    if (tf := sys.modules.get("tensorflow")) is not None and isinstance(
        x, (tf.Tensor, tf.Variable)
    ):
        return _of_tensorflow(tf, x, where, in_place)
    if (keras := sys.modules.get("keras")) is not None and isinstance(x, keras.Variable):
        return as_torch(x.value, where, in_place=in_place)
    fix = "a tensor of torch or TensorFlow, an array of NumPy or JAX"
    raise BadCall(f"{type(x).__module__}.{type(x).__qualname__} is not a tensor", where, fix)


def _of_jax(x: Any, where: str, in_place: bool) -> tuple[torch.Tensor, Back]:
    if in_place:
        raise BadCall(
            "a JAX array cannot be changed in place",
            where,
            "the call without the underscore, which returns a new tensor",
        )
    if is_traced_by_jax([x]):
        fix = "import hvdtrain.horovod.keras as hvd"
        raise BadCall("called inside a function that JAX compiles or differentiates", where, fix)
    jax = sys.modules["jax"]
    return _of_array(np.asarray(x), where), lambda tensor: jax.numpy.asarray(_to_numpy(tensor))


def _of_tensorflow(tf: Any, x: Any, where: str, in_place: bool) -> tuple[torch.Tensor, Back]:
    if in_place:
        raise BadCall(
            "a TensorFlow tensor cannot be changed in place",
            where,
            "the call without the underscore, which returns a new tensor",
        )
    if not tf.executing_eagerly():
        raise BadCall(
            "called inside a function that TensorFlow compiles",
            where,
            "import hvdtrain.horovod.tensorflow as hvd",
        )
    return _of_array(np.asarray(x.numpy()), where), lambda tensor: tf.convert_to_tensor(
        _to_numpy(tensor)
    )


def is_target(x: Any, tensor: torch.Tensor) -> bool:
    """Whether results written to `tensor`, which as_torch() created from x, appear in x."""
    if isinstance(x, np.ndarray):
        return tensor.data_ptr() == x.ctypes.data
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())


def put(result: torch.Tensor, x: Any) -> None:
    """Writes a result to x, a tensor of torch or an array of NumPy."""
    if isinstance(x, np.ndarray):
        x[...] = _to_numpy(result)
        return
    with (
        torch.no_grad(),
        torch.inference_mode(x.is_inference()),
    ):  # an inference tensor must not be changed outside of inference mode
        x.copy_(result)


def as_non_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this memory as a tensor that is not a view, because the result of an autograd
    function may only be changed in place if it is not a view."""
    if not tensor._is_view():
        return tensor
    return tensor.new_empty(0).set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _of_array(array: np.ndarray, where: str) -> torch.Tensor:
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    if array.dtype.name == "bfloat16":  # from JAX; NumPy does not have bfloat16
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(array)
    except (
        TypeError,
        ValueError,
    ) as error:  # objects, strings, or another byte order
        raise BadCall(
            f"an array of dtype {array.dtype}: {error}",
            where,
            "an array of numbers, array.astype(...)",
        ) from None


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        # known to NumPy if JAX is loaded
        return tensor.view(torch.int16).numpy().view(np.dtype("bfloat16"))
    return tensor.numpy()


class Compressor:
    """Base class: compress() returns the tensor to send, and the context that decompress()
    needs."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        raise NotImplementedError


class NoneCompressor(Compressor):
    """A tensor is sent as it is."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: None) -> torch.Tensor:
        return tensor


class _Cast(Compressor):
    """Casts floating-point tensors and arrays, within their library; others are unchanged."""

    wire: torch.dtype

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        given = value_of(tensor)
        if isinstance(given, torch.Tensor):
            return (given.to(cls.wire) if given.dtype.is_floating_point else given), given.dtype
        if is_of_tensorflow([given]):
            return (
                _cast(given, name_of(cls.wire)) if given.dtype.is_floating else given
            ), given.dtype
        if _is_of_jax(given):
            is_float = sys.modules["jax"].numpy.issubdtype(given.dtype, np.floating)
            return (given.astype(name_of(cls.wire)) if is_float else given), given.dtype
        host, back = as_torch(given, "compression")  # NumPy itself has no bfloat16
        return (
            (host.to(cls.wire), (host.dtype, back))
            if host.dtype.is_floating_point
            else (given, host.dtype)
        )

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        if isinstance(ctx, tuple):
            dtype, back = ctx
            return back(tensor.to(dtype))
        if isinstance(tensor, torch.Tensor):
            return tensor.to(ctx)
        if is_of_tensorflow([tensor]):
            return _cast(tensor, ctx)
        return tensor.astype(ctx) if _is_of_jax(tensor) else tensor


def _cast(tensor: Any, dtype: Any) -> Any:
    return sys.modules["tensorflow"].cast(tensor, dtype)


def _is_of_jax(x: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array)


class FP16Compressor(_Cast):
    """A tensor is sent as float16."""

    wire = torch.float16


class BF16Compressor(_Cast):
    """A tensor is sent as bfloat16: the range of float32 with 8 bits of precision."""

    wire = torch.bfloat16


class Compression:
    """The values of `compression` in allreduce() and DistributedOptimizer()."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
