"""Names of torch that begin with an underscore and have no public equivalent.
tests/frameworks/test_private_torch.py lists all such names that hvdtrain uses, also those that only
one file needs."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "BatchNorm",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "cpu_multiplies_bf16",
    "in_backward",
    "storage_of",
    "tree_leaves",
    "tree_map",
    "unset_fake_temporarily",
]


def in_backward() -> bool:
    """Whether a backward pass is under way in this thread: a forward pass is another one's again,
    then."""
    return torch._C._current_graph_task_id() != -1


def cpu_multiplies_bf16() -> bool:
    """Whether the processor multiplies bfloat16 faster than float32: AVX512-BF16 or AMX."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def storage_of(tensor: torch.Tensor) -> int:
    """Returns a key that is equal for tensors with the same storage, also on the meta device, whose
    storages have no address."""
    return tensor.untyped_storage()._cdata
