"""Ghost norms against a loop over chunks, and sync norms against one process with the joined
batch."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Literal, NoReturn

import norms_on_ranks
import pytest
import ranks
import torch
from host_reads import NoReading
from pool import on_ranks
from ranks import needs_horovod, needs_mpirun
from torch import nn

from hvdtrain.comm.communicator import Buffer, CompletedHandle, Handle, SingleProcessCommunicator
from hvdtrain.errors import UserError
from hvdtrain.extras.batch_norms.ghost import GhostBatchNorm, deinterleave, interleave
from hvdtrain.extras.batch_norms.sync import SyncBatchNorm
from hvdtrain.extras.batch_norms.use_norm import use_norm
from hvdtrain.frameworks.torch.models import convnet
from hvdtrain.horovod.sync_batch_norm import SyncBatchNorm as HorovodsNorm

Statistics = Literal["averaged", "sequential"]
MARKS = {"mpi": [needs_mpirun], "horovod": [needs_mpirun, needs_horovod]}


@functools.cache
def apart_on(engine: str, size: int) -> list[dict[str, float]]:
    """Each rank's."""
    return on_ranks(engine, size, "norms_on_ranks:apart_by_case", engine)


def pairs() -> list[object]:
    return [
        pytest.param(
            communicator,
            size,
            case,
            id=f"{communicator}-x{size}-{case}",
            marks=[
                *marks,
                *[pytest.mark.ranks4] * (size == 4),
                *[pytest.mark.slow] * (size > 2 or communicator == "horovod"),
            ],
        )
        for communicator, marks in MARKS.items()
        for size in ((2, 3, 4) if ranks.FULL else (2,))
        for case in norms_on_ranks.cases(communicator)
    ]


@pytest.mark.parametrize(("engine", "size", "case"), pairs())
def test_many_ranks_compute_what_one_does(engine: str, size: int, case: str) -> None:
    """fp32: gradients add up hundreds of numbers in another order; an input around 1000 comes
    rounded by up to 3e-5."""
    limit = 1e-12 if case.endswith("fp64") else 1e-4 if case.startswith("far_from_zero") else 3e-6
    assert max(one[case] for one in apart_on(engine, size)) < limit


class Idle(SingleProcessCommunicator):
    """Two ranks that never hear each other; a host that asked one for the lengths of rows would
    wait for its device."""

    name = "idle"
    size = 2

    def allgather(self, x: Buffer, name: str) -> NoReturn:
        raise AssertionError("lengths that every rank knows are asked for")

    def start_spread(self, x: Buffer, name: str) -> Handle:
        return CompletedHandle(x[:1].expand_as(x))


@pytest.mark.parametrize(
    "case", ["layer-2d-even-fp64", "net-buckets-even-fp64", "far_from_zero-fp32"]
)
def test_the_comparison_notices_ranks_that_do_not_hear_each_other(case: str) -> None:
    assert norms_on_ranks.cases("idle")[case](Idle()) > 1e-3


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
            ],
        ),
    ],
)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_the_host_waits_for_no_device(device: str, momentum: float | None) -> None:
    norm = nn.BatchNorm2d(3, momentum=momentum, device=device)
    model = use_norm(norm, "sync", 1, "averaged", Idle())
    x = torch.ones(4, 3, 5, 5, device=device, requires_grad=True)
    own = HorovodsNorm(3, momentum=momentum, device=device)
    with contextlib.ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(NoReading())
        else:
            torch.cuda.set_sync_debug_mode("error")
            stack.callback(torch.cuda.set_sync_debug_mode, "default")
        model(x).sum().backward()
        own._update(torch.ones_like(norm.bias), torch.ones_like(norm.bias))
    assert x.grad is not None and x.grad.device.type == own.running_mean.device.type == device


def looped(
    norm: nn.Module, x: torch.Tensor, ghost: int, statistics: Statistics
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The plain norm on one chunk after the other, and the buffers after all."""
    if statistics == "sequential":
        return torch.cat([norm(chunk) for chunk in x.split(ghost)]), list(norm.buffers())
    copies = [copy.deepcopy(norm) for _ in x.split(ghost)]
    for one in copies:
        one.weight = norm.weight
        one.bias = norm.bias
    y = torch.cat([one(chunk) for one, chunk in zip(copies, x.split(ghost), strict=True)])
    for buffer, *same in zip(norm.buffers(), *(one.buffers() for one in copies), strict=True):
        buffer.copy_(torch.stack([b.double() for b in same]).mean(0))
    return y, list(norm.buffers())


@pytest.mark.parametrize("statistics", ["averaged", "sequential"])
@pytest.mark.parametrize(
    ("samples", "ghost"), [(12, 4), (14, 4), (6, 4), (4, 4), (3, 4), (6, 2), (5, 1)]
)
@pytest.mark.parametrize(
    "layer", ["1d_length", "2d", "3d", "cumulative", "without_affine", "without_running"]
)
def test_ghosts_are_chunks_of_the_batch(
    layer: str, samples: int, ghost: int, statistics: Statistics
) -> None:
    torch.manual_seed(0)
    plain, shape = norms_on_ranks.LAYERS[layer]()
    plain.double()
    for p in plain.parameters():
        nn.init.uniform_(p, 0.5, 2)
    model = use_norm(copy.deepcopy(plain), "ghost", ghost, statistics, SingleProcessCommunicator())
    assert isinstance(model, GhostBatchNorm)
    for _ in range(2):
        x = (2 * torch.randn(samples, *shape, dtype=torch.float64) + 1).requires_grad_()
        slope = torch.randn_like(x)
        other = x.detach().clone().requires_grad_()
        y = model(x)
        (y * slope).sum().backward()
        expected, buffers = looped(plain, other, ghost, statistics)
        (expected * slope).sum().backward()
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(x.grad, other.grad, rtol=0, atol=1e-12)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-12)
        for b, c in zip(model.buffers(), buffers, strict=True):
            torch.testing.assert_close(b, c, rtol=0, atol=1e-12)
    # in evaluation it is the plain one
    torch.testing.assert_close(model.eval()(x), plain.eval()(x))


def test_sequential_forgets_as_hoffers_code_and_averaged_as_one_update() -> None:
    """32 ghosts of zeros, momentum 0.1: 0.9^32 = 0.0343 of the old mean is left, or 0.9."""
    for statistics, left in (("sequential", 0.9**32), ("averaged", 0.9)):
        model = use_norm(nn.BatchNorm1d(2), "ghost", 2, statistics, SingleProcessCommunicator())
        model.running_mean.fill_(1.0)
        model(torch.zeros(64, 2))
        torch.testing.assert_close(model.running_mean, torch.full((2,), left))
        torch.testing.assert_close(model.running_var, torch.full((2,), left))
        assert model.num_batches_tracked == (32 if statistics == "sequential" else 1)


def test_the_order_within_the_model() -> None:
    """Ghosts 0..3, 4..7 and the smaller 8, 9."""
    x = torch.arange(10)
    assert interleave(x, 4).tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 9]
    assert interleave(x[:6], 4).tolist() == [0, 1, 2, 3, 4, 5]
    for samples in range(11):
        for ghost in range(1, 12):
            assert deinterleave(interleave(x[:samples], ghost), ghost).tolist() == list(
                range(samples)
            )


def chunked_net(samples: int, ghost: int, memory: torch.memory_format) -> float:
    """A whole network in ghosts, and the plain one on each chunk: the largest difference of logits
    and gradients."""
    net = convnet.build("convnet", (8, 8, 1), 5, widths=(4, 6, 8)).double()
    model = use_norm(
        copy.deepcopy(net).to(memory_format=memory),
        "ghost",
        ghost,
        "averaged",
        SingleProcessCommunicator(),
    )
    x = torch.randn(samples, 1, 8, 8, dtype=torch.float64)
    slope = torch.randn(samples, 5, dtype=torch.float64)
    y = model(x.contiguous(memory_format=memory))
    expected = torch.cat([net(chunk) for chunk in x.split(ghost)])
    (y * slope).sum().backward()
    (expected * slope).sum().backward()
    return norms_on_ranks.apart(
        [y, *[p.grad for p in model.parameters()]], [expected, *[p.grad for p in net.parameters()]]
    )


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("samples", "ghost"), [(12, 4), (14, 4)])
def test_a_network_gives_its_logits_in_the_order_of_the_batch(
    samples: int, ghost: int, memory: torch.memory_format
) -> None:
    torch.manual_seed(1)
    assert chunked_net(samples, ghost, memory) < 1e-12


class Tokens(nn.Module):
    """Three rows of a norm for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.split: Callable[[torch.Tensor], torch.Tensor] = lambda x: x.flatten(0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # (n, 3, 4) -> (3 n, 4) -> (n, 4)
        return self.norm(self.split(x)).reshape(len(x), 3, 4).sum(1)


def test_rows_of_a_sample_stay_in_its_ghost() -> None:
    torch.manual_seed(2)
    plain = Tokens().double()
    x = torch.randn(14, 3, 4, dtype=torch.float64)
    model = use_norm(copy.deepcopy(plain), "ghost", 4, "averaged", SingleProcessCommunicator())
    torch.testing.assert_close(model(x), torch.cat([plain(chunk) for chunk in x.split(4)]))


def test_sync_of_one_rank_is_the_plain_norm() -> None:
    torch.manual_seed(4)
    plain = nn.BatchNorm2d(3)
    x = torch.randn(5, 3, 4, 4)
    model = use_norm(copy.deepcopy(plain), "sync", 1, "averaged", SingleProcessCommunicator())
    assert isinstance(model, SyncBatchNorm)
    assert torch.equal(model(x), plain(x))
    assert all(torch.equal(b, c) for b, c in zip(model.buffers(), plain.buffers(), strict=True))


def test_a_ghost_of_one_value_is_refused() -> None:
    """As torch refuses such a batch; images of more than one pixel have values enough."""
    model = use_norm(nn.BatchNorm1d(3), "ghost", 4, "averaged", SingleProcessCommunicator())
    for samples, ghost in ((9, 4), (3, 1)):
        model.ghosts.ghost = ghost
        with pytest.raises(UserError) as error:
            model(torch.randn(samples, 3))
        assert "a ghost batch of 1 sample has one value per channel" in str(error.value)
        assert "where: norm.ghost" in str(error.value)
        assert "fix: a norm.ghost that divides the samples of a rank's forward pass" in str(
            error.value
        )
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        model(torch.randn(1, 3))  # a batch of one sample is torch's own matter


def test_rows_that_belong_to_no_sample_are_refused() -> None:
    model = use_norm(Tokens(), "ghost", 2, "averaged", SingleProcessCommunicator())
    model.split = lambda x: x.flatten(0, 1)[1:]
    with pytest.raises(UserError) as error:
        model(torch.randn(5, 3, 4))
    assert "a batch norm gets 14 rows from 5 samples" in str(error.value)
    assert "norm.kind=ghost" in str(error.value)
    assert "fix: norm.kind=sync or norm.kind=batch" in str(error.value)
