"""Tensors of torch, NumPy and JAX as torch tensors, and back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hvdtrain.horovod.engine.errors import BadCall

Back = Callable[[torch.Tensor], Any]  # a result as a tensor of the caller's library


def as_torch(x: Any, where: str, *, in_place: bool = False) -> tuple[torch.Tensor, Back]:
    """A view of x where it can be one, without its gradient. Raises BadCall for what is none, and for memory that cannot be changed."""
    if isinstance(x, torch.Tensor):
        if x.layout != torch.strided:
            raise BadCall("a sparse tensor", where, "tensor.to_dense(); or hvd.sparse_allreduce_async()")
        return (x.detach() if x.requires_grad else x), _same
    if isinstance(x, np.ndarray):
        if in_place and not x.flags.writeable:
            raise BadCall("this array is read-only", where, "a copy of it, or the call without _")
        return _of_array(x, where), _to_numpy
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.Array):
        if in_place:
            raise BadCall("a JAX array does not change", where, "the call without _, which returns a new one")
        return _of_array(np.asarray(x), where), lambda tensor: jax.numpy.asarray(_to_numpy(tensor))
    raise BadCall(f"{type(x).__module__}.{type(x).__qualname__} is no tensor", where, "a tensor of torch, an array of NumPy or JAX")


def is_target(x: Any, tensor: torch.Tensor) -> bool:
    """Whether results that are written to `tensor`, which as_torch() has made of x, are in x."""
    if isinstance(x, np.ndarray):
        return tensor.data_ptr() == x.ctypes.data
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())


def put(result: torch.Tensor, x: Any) -> None:
    """Writes a result to x, a tensor of torch or an array of NumPy."""
    if isinstance(x, np.ndarray):
        x[...] = _to_numpy(result)
        return
    with torch.no_grad(), torch.inference_mode(x.is_inference()):  # outside of that mode nothing may change what was made in it
        x.copy_(result)


def own(tensor: torch.Tensor) -> torch.Tensor:
    """This memory as a tensor that is no view: what an autograd function returns may be changed in place only then."""
    if not tensor._is_view():
        return tensor
    return tensor.new_empty(0).set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _of_array(array: np.ndarray, where: str) -> torch.Tensor:
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    if array.dtype.name == "bfloat16":  # of JAX: numpy itself has none
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:  # of objects, texts, or the bytes of another kind of machine
        raise BadCall(f"an array of dtype {array.dtype}: {error}", where, "an array of numbers, array.astype(...)") from None


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.dtype("bfloat16"))  # known to numpy where JAX is loaded
    return tensor.numpy()
