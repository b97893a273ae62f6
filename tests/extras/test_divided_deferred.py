"""Models that are made in parts, which modules are their units; which optimizers and hosts
shard.stage accepts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.comm.mesh import make_mesh, number_hosts
from hvdtrain.config.read import configure
from hvdtrain.errors import UserError
from hvdtrain.extras.divided.blocks import units
from hvdtrain.extras.divided.deferred import Deferred, make_deferred
from hvdtrain.frameworks.torch.build import check_optimizer
from hvdtrain.frameworks.torch.models import gpt


class Odd(nn.Module):
    """Initial weights by most of what torch.nn.init does, views, tensors made of others, small and
    large."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(100, 100)
        nn.init.orthogonal_(self.a.weight)
        self.embedding = nn.Embedding(200, 64, padding_idx=3)
        self.positions = nn.Parameter(torch.randn(1, 70, 70) * 0.02)
        self.register_buffer("mask", torch.tril(torch.ones(80, 80)))
        self.norm = nn.BatchNorm2d(30)
        self.b = nn.Linear(100, 100)
        nn.init.trunc_normal_(self.b.weight, std=0.1)  # draws until all numbers fit
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 12)]
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(90, 90))
        self.lstm = nn.LSTM(32, 64, 2)
        with torch.no_grad():
            self.b.weight[5:9].mul_(2)
            self.a.weight.copy_(self.b.weight + torch.arange(100.0))
        self.c = nn.Linear(90, 90)
        self.c.weight = self.normed.parametrizations.weight.original1  # tied


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(100, 100))
        self.list = self.weight.tolist()


def made_twice(make: Any) -> tuple[nn.Module, nn.Module, Deferred | None]:
    torch.manual_seed(5)
    whole = make()
    generator = torch.get_rng_state()
    torch.manual_seed(5)
    model, deferred = make_deferred(make)
    assert torch.equal(torch.get_rng_state(), generator), "as many numbers are drawn"
    return whole, model, deferred


@pytest.mark.parametrize(
    "make",
    [Odd, lambda: gpt.build("gpt", 80, 300, width=64, layers=2, tied=True)],
    ids=["odd", "gpt"],
)
def test_deferred_numbers_are_those_of_the_constructor(make: Any) -> None:
    whole, model, deferred = made_twice(make)
    assert deferred is not None
    theirs = dict(model.named_parameters()) | dict(model.named_buffers())
    large = {name for name, tensor in theirs.items() if tensor.numel() >= 4096}
    assert large <= {name for name, tensor in theirs.items() if tensor.is_meta} and len(large) > 4
    for name, tensor in (dict(whole.named_parameters()) | dict(whole.named_buffers())).items():
        assert torch.equal(deferred.value(theirs[name]), tensor), name


def test_a_constructor_that_reads_its_own_numbers_makes_the_model_whole() -> None:
    whole, model, deferred = made_twice(Reads)
    assert deferred is None and torch.equal(model.weight, whole.weight)


class Blocks(nn.Module):
    def __init__(self, *blocks: nn.Module, rest: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.rest = rest


def test_units_are_blocks_with_parameters_of_their_own() -> None:
    first, second, third, rest = (nn.Linear(3, 3) for _ in range(4))
    assert units(Blocks(first, second, rest=rest)) == [first, second]
    assert units(Blocks(first, second, second, rest=rest)) == [first], (
        "one that is called twice stays with the rest"
    )
    third.weight = rest.weight
    assert units(Blocks(first, third, nn.ReLU(), rest=rest)) == [first]
    assert units(rest) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Adafactor", "gives other numbers than one on the whole"),
        ("Muon", "fails: ValueError: Muon only supports 2D"),
        ("SparseAdam", "fails: "),
    ],
)
def test_an_optimizer_that_is_not_elementwise_is_refused(name: str, reason: str) -> None:
    with pytest.raises(
        UserError,
        match=f"such a step of torch.optim.{name} {reason}",
    ):
        check_optimizer(configure(None, [f"optim.name=torch.optim.{name}", "shard.stage=2"]))


@pytest.mark.parametrize("name", ["AdamW", "RMSprop", "Adagrad", "Rprop", "NAdam"])
def test_elementwise_optimizers_are_taken(name: str) -> None:
    check_optimizer(configure(None, [f"optim.name=torch.optim.{name}", "shard.stage=2"]))


def test_hosts_are_told_by_names_and_local_ranks() -> None:
    assert number_hosts([("a", 0), ("a", 1), ("b", 0), ("b", 1)]) == [0, 0, 1, 1]
    assert number_hosts([("a", 0), ("b", 0), ("a", 1), ("b", 1)]) == [0, 1, 0, 1]
    assert number_hosts([("a", 0), ("a", 1), ("a", 0), ("a", 1), ("a", 0)]) == [0, 0, 1, 1, 2]


class UnevenHosts(SingleProcessCommunicator):
    """Rank 2 of 3, on the second of two hosts."""

    rank = 2
    size = 3

    def allgather_object(self, thing: Any) -> list[Any]:
        return [(0, "a", 0), (0, "a", 1), (0, "b", 0)]


def test_hosts_with_different_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(
        UserError,
        match="the hosts have 2, 1 ranks, but shard.group=node needs the same number on each",
    ):
        make_mesh(UnevenHosts(), configure(None, ["shard.stage=1", "shard.group=node"]))
    assert make_mesh(UnevenHosts(), configure(None, ["shard.stage=1"])).table == ((0, 1, 2),)
