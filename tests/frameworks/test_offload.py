"""shard.offload: gradients in host memory beside a loss scale and a noise scale on the GPU.

What torch lets meet on two devices is asked of tensors without numbers, which need no GPU; the
numbers with `-m gpu`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pool import on_ranks
from ranks import needs_mpirun
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.core.metrics import NOISE_SCALE_KEYS
from hvdtrain.core.progress import Hyper
from hvdtrain.extras.noise_scale.meter import NoiseMeter
from hvdtrain.frameworks.torch.precision import LossScale
from hvdtrain.frameworks.torch.step import any_nonfinite, clip_, zero_where
from hvdtrain.frameworks.torch.strategy import Shard

SCALED = [
    f"speed.precision=fp16 shard.stage={stage} shard.offload={offload}"
    for stage, offload in (
        (1, "none"),
        (1, "optimizer"),
        (2, "optimizer"),
        (3, "optimizer"),
        (3, "parameters"),
    )
]
MEASURED = [
    f"log.noise_scale=true speed.precision=fp32 shard.stage={stage} shard.offload={offload}"
    for stage, offload in ((1, "none"), (1, "optimizer"), (2, "optimizer"))
]


class OneDevice(TorchDispatchMode):
    """Fails where an operation gets tensors of two devices: with a GPU's go single numbers in host
    memory, but not as a mask.

    Fake tensors alone let a list of tensors meet a number of another device, which no kernel of
    torch does.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_mask = func.overloadpacket is torch.ops.aten.masked_fill
        devices = {t.device for t in tensors if is_mask or t.ndim or t.device.type != "cpu"}
        assert len(devices) < 2 or func is torch.ops.aten.copy_.default, (
            f"{func} of tensors on {devices}"
        )
        return func(*args, **(kwargs or {}))


def test_offloaded_gradients_meet_nothing_of_the_gpu() -> None:
    """What an update does to gradients in host memory, of parts of a model on a GPU."""
    gpu = torch.device("cuda", 0)
    with FakeTensorMode(), OneDevice():
        whole = [torch.nn.Parameter(torch.zeros(3, 5, device=gpu)) for _ in range(2)]
        shards = [Shard(torch.nn.Parameter(torch.zeros(7)), p, 0, 7) for p in whole]
        updated = [shard.parameter for shard in shards]
        for p in updated:
            p.grad = torch.ones_like(p)
        meter = NoiseMeter(whole, SingleProcessCommunicator())
        LossScale(gpu).unscale_(updated)
        bad = any_nonfinite(updated)
        sums = zero_where(bad, meter.read(Hyper(0.1, 0.9, 0.0, 8), 4, shards, lambda x: x))
        assert sums.keys() == set(NOISE_SCALE_KEYS)
        assert (sums["excess"].device, sums["big"].device) == (gpu, gpu), (
            "as without offload: adding them up waits for nothing"
        )
        clip_(shards, 1.0, None, lambda x: x)
        assert bad.device.type == "cpu" and all(
            p.grad is not None and p.grad.device.type == "cpu" for p in updated
        )


def check(found: dict[str, Any], exact: bool) -> None:
    """All cases have the numbers of the first; exact: to the last bit."""
    expected, *others = found.values()
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 2e-3, "atol": 1e-4}
    for case in others:
        assert case["scale"] == expected["scale"]
        for here, there in zip(case["sums"], expected["sums"], strict=True):
            assert here.keys() == there.keys()
            np.testing.assert_allclose(
                [here[name] for name in there], list(there.values()), **tolerance
            )
        for name, array in expected["weights"].items():
            np.testing.assert_allclose(case["weights"][name], array, **tolerance, err_msg=name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
@pytest.mark.parametrize("cases", [SCALED, MEASURED], ids=["fp16", "noise scale"])
def test_offloaded_gradients_give_the_numbers_of_those_on_a_gpu(cases: list[str]) -> None:
    check(on_ranks("mpi", 2, "offload_on_ranks:by_case", "cuda", cases)[0], exact=False)


@needs_mpirun
def test_a_step_that_overflows_on_one_rank_halves_the_scale_on_all() -> None:
    """Its infinity is in the parts of one rank alone, of the host's gradients where they are
    offloaded. On a CPU nothing moves."""
    found = on_ranks("mpi", 2, "offload_on_ranks:by_case", "cpu", SCALED[:3])
    for of_rank in found:
        check(of_rank, exact=True)
        case = of_rank[SCALED[1]]
        assert (
            case["scale"] == [2.0**16, 2.0**15, 2.0**15, 2.0**15]
            and [sums["nonfinite"] for sums in case["sums"]] == [0.0] * 4
        )


@needs_mpirun
def test_the_noise_scale_leaves_out_a_bad_step() -> None:
    found = on_ranks("mpi", 2, "offload_on_ranks:by_case", "cpu", MEASURED)
    check(found[0], exact=True)
    sums = found[0][MEASURED[1]]["sums"]
    assert [each["nonfinite"] for each in sums] == [0.0, 1.0, 0.0, 0.0]
    assert [each["steps"] for each in sums] == [1.0, 0.0, 1.0, 1.0] and all(
        sums[0][name] > 0 for name in NOISE_SCALE_KEYS
    )
