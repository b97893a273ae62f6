"""How much a torch learner computes in a step: floating-point operations, their time, and the most that the device could do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from hvdtrain.core.arrays import Batch
from hvdtrain.core.progress import Hyper
from hvdtrain.frameworks.stopwatch import HostStopwatch

PRODUCTS = 7


def synchronizing_stopwatch(device: torch.device) -> HostStopwatch:
    """A stopwatch that waits for the device at the end of each phase, so that no two phases overlap."""
    return HostStopwatch((lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else None)


class FlopCounter(TorchDispatchMode):
    """Adds up the operations of matrix products, convolutions and attention, and the bytes that all others read and write.

    By torch's own formulas, without its FlopCounterMode, whose hooks on modules a backward pass in two parts does not take.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0  # a multiply-add counts as two
        self.touched_bytes = 0  # of arguments and results, each once

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = _FORMULAS.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        elif not func.is_view and func.overloadpacket not in _WITHOUT_WORK:
            tensors = {id(x): x.nbytes for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor) and not x.is_meta}
            self.touched_bytes += sum(tensors.values())
        return result


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))


_aten: Any = torch.ops.aten
_WITHOUT_WORK = {
    *(_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten._unsafe_view, _aten._local_scalar_dense),
    torch.ops.prim.device,  # which fake tensors ask for
}
_FORMULAS: dict[Any, Any] = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,  # which torch's table has not
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def step_flops(learner: Any, micro: Sequence[Batch], hyper: Hyper) -> int:
    """Operations of the matrix products and convolutions of one step, forward and backward, which this makes; a multiply-add counts as two.

    Every rank calls it. What torch.compile fuses is not counted.
    """
    with FlopCounter() as counter:
        learner.step(micro, hyper, 0)
    return counter.flops


def peak_flops(learner: Any, size: int = 2048) -> float:
    """Operations per second of a square matrix product in the number type of the layers: the median of PRODUCTS, after two to warm up."""
    dtype = learner.forward.precision.layers or learner.dtype
    a, b = (torch.randn(size, size, device=learner.device).to(dtype) for _ in range(2))
    stopwatch = synchronizing_stopwatch(learner.device)
    for _ in range(PRODUCTS + 2):
        stopwatch.enter("data")
        stopwatch.enter("compute")
        torch.mm(a, b)
        stopwatch.enter("")
    seconds = [step["compute"] for step in stopwatch.read()]
    return 2 * size**3 / sorted(seconds[2:])[PRODUCTS // 2]
