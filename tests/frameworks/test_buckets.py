"""Buckets: their contents, when they start, and that they start in the same order for any order of
backward."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from hvdtrain.comm.communicator import (
    Buffer,
    CompletedHandle,
    Handle,
    Op,
    SingleProcessCommunicator,
)
from hvdtrain.comm.engines import Feature
from hvdtrain.config.read import configure
from hvdtrain.core.metrics import Sums
from hvdtrain.frameworks.stopwatch import HostStopwatch
from hvdtrain.frameworks.torch.parallel.buckets import Buckets
from hvdtrain.frameworks.torch.parallel.by_library import fits_horovod
from hvdtrain.frameworks.torch.strategy import NamedParameters, nccl_ranks, runs_ahead


class Twice(SingleProcessCommunicator):
    """Two equal ranks: every sum doubles. Notes what was started, and gives back another buffer
    than it was given."""

    size = 2

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.sizes: list[tuple[int, torch.dtype]] = []

    def start_allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Handle:
        assert op == "sum"
        self.seen.append(name)
        self.sizes.append((len(x), x.dtype))
        return CompletedHandle(x * 2)


def layers(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])


def named(model: nn.Module) -> NamedParameters:
    return list(model.named_parameters())


def buckets(model: nn.Module, communicator: Twice, bucket_bytes: int) -> Buckets:
    return Buckets(named(model), communicator, bucket_bytes, HostStopwatch())


def backward(
    model: nn.Module, strategy: Buckets, passes: int = 1, x: torch.Tensor | None = None
) -> None:
    """Passes of the same two samples, whose losses are summed."""
    samples = torch.ones(2, next(model.parameters()).shape[1]) if x is None else x

    def one_pass(batch: torch.Tensor, divisor: int, is_last: bool) -> Sums:
        assert divisor == 7
        model(batch).square().sum().backward()
        return {"loss": 1.0, "right": 0.5, "count": len(batch)}

    sums = strategy.run([samples] * passes, 7, one_pass)
    assert sums == {"loss": passes, "right": passes / 2, "count": 2 * passes}
    strategy.reduce()


def test_gradients_are_summed_over_ranks_and_passes() -> None:
    model = layers(3, 4, 5)
    plain = layers(3, 4, 5)
    backward(model, buckets(model, Twice(), bucket_bytes=64), passes=3)
    plain(torch.ones(2, 3)).square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, 6 * q.grad)


def test_buckets_are_cut_by_bytes_from_the_last_layer_on() -> None:
    # 12 + 4 + 20 + 5 numbers of 4 bytes
    model = layers(3, 4, 5)
    communicator = Twice()
    backward(model, buckets(model, communicator, bucket_bytes=100))
    assert communicator.sizes == [(25, torch.float32), (16, torch.float32)]
    assert communicator.seen == ["gradient.0", "gradient.1"]


def test_a_bucket_starts_while_backward_still_runs() -> None:
    model = layers(3, 4, 5)
    communicator = Twice()
    strategy = buckets(model, communicator, bucket_bytes=100)
    next(model.parameters()).register_hook(lambda gradient: communicator.seen.append("first layer"))
    backward(model, strategy)
    assert communicator.seen == ["gradient.0", "first layer", "gradient.1"]


def test_only_the_last_pass_starts_buckets() -> None:
    model = layers(3, 4)
    communicator = Twice()
    backward(model, buckets(model, communicator, bucket_bytes=1 << 20), passes=4)
    assert communicator.seen == ["gradient.0"]


def test_a_parameter_that_the_last_pass_does_not_reach_sends_the_gradient_of_those_before() -> None:
    """Of the first step's passes one reaches the second layer, of the second step's none: its
    gradient is 0 then."""
    model = layers(3, 3, 3)
    plain = layers(3, 3, 3)
    strategy = buckets(model, Twice(), bucket_bytes=1 << 20)

    def loss(net: nn.Sequential, reached: str) -> torch.Tensor:
        hidden = net[0](torch.ones(2, 3))
        return (net[1](hidden) if reached == "both" else hidden).square().sum()

    def one_pass(reached: str, divisor: int, is_last: bool) -> Sums:
        loss(model, reached).backward()
        return {}

    for passes in (["both", "first"], ["first", "first"]):
        for net in (model, plain):
            net.zero_grad()
        strategy.run(passes, 7, one_pass)
        strategy.reduce()
        sum(loss(plain, reached) for reached in passes).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(
                p.grad, torch.zeros_like(p) if q.grad is None else 2 * q.grad
            )


def test_the_order_is_that_of_the_parameters_not_of_backward() -> None:
    class Reversed(nn.Module):
        """Uses its first parameter last, so that backward reaches it first."""

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.second = nn.Linear(3, 3)
            self.unused = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(self.second(x))

    model = Reversed()
    communicator = Twice()
    strategy = buckets(model, communicator, bucket_bytes=48)
    for _ in range(2):
        communicator.seen.clear()
        backward(model, strategy)
        assert communicator.seen == [f"gradient.{i}" for i in range(3)]
    assert torch.count_nonzero(model.unused.weight.grad) == 0


def test_optimizers_and_tensors_that_horovod_cannot_take_are_named() -> None:
    model = layers(3, 4)
    assert fits_horovod(torch.optim.SGD(model.parameters(), lr=0.1), named(model)) == ""
    strided = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    why = fits_horovod(torch.optim.SGD(strided.parameters(), lr=0.1), named(strided))
    assert why == "Horovod cannot reduce channels_last or otherwise strided tensors (weight)"

    class Needs(torch.optim.SGD):
        def __init__(self, params: object, horizon: int) -> None:
            super().__init__(params, lr=0.1)

    assert (
        fits_horovod(Needs(model.parameters(), 3), named(model))
        == "Horovod cannot construct Needs again without its horizon"
    )


def test_gradients_lie_as_their_parameters_do() -> None:
    """Of channels_last weights, as on a GPU: the numbers are the same, the order is the
    parameter's."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(20, 2)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    models[0].to(memory_format=torch.channels_last)
    x = torch.rand(2, 3, 4, 4)
    for model in models:
        backward(model, buckets(model, Twice(), bucket_bytes=200), x=x)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert p.grad.stride() == p.stride()
        torch.testing.assert_close(p.grad, q.grad)


def test_buckets_are_called_overlapped_only_where_the_engine_sums_while_the_caller_computes() -> (
    None
):
    communicator = Twice()
    assert buckets(layers(3, 4), communicator, 2**20).summary == "gradients in 1 bucket"
    communicator.features |= {"asynchronous"}
    assert buckets(layers(3, 4), communicator, 2**20).summary == "gradients in 1 overlapped bucket"


def test_buckets_grow_with_the_ranks_of_nccl() -> None:
    """4 MiB of a ring of 8,192 ranks are messages of 512 bytes."""
    default = configure(None, []).comm
    assert default.bucket_bytes() == 4 * 2**20
    sizes_mb = {1: 25, 64: 25, 100: 25, 400: 100, 1024: 256, 8192: 256}
    found = {ranks: default.bucket_bytes(ranks) / 2**20 for ranks in sizes_mb}
    assert found == sizes_mb
    chosen = configure(None, ["comm.bucket_mb=0.5"]).comm
    assert chosen.bucket_bytes() == chosen.bucket_bytes(8192) == 2**19


def test_nccl_reduces_tensors_on_a_gpu_alone() -> None:
    ranks = Twice()
    gpu = torch.device("cuda", 0)
    assert nccl_ranks(gpu, ranks) == 0 and not runs_ahead(gpu, ranks)
    ranks.features = frozenset[Feature](("nccl", "ddp"))
    assert nccl_ranks(gpu, ranks) == 2 and runs_ahead(gpu, ranks)
    cpu = torch.device("cpu")  # of a host with GPUs
    assert nccl_ranks(cpu, ranks) == 0 and not runs_ahead(cpu, ranks)
    ranks.features = frozenset[Feature](("nccl",))  # Horovod's
    assert nccl_ranks(gpu, ranks) == 2 and not runs_ahead(gpu, ranks)
