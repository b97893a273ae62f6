"""shard.stage=3: how a model is made in parts, which modules are its units, and that every pass is
a collective; on one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.comm.mesh import make_mesh, number_hosts
from hvdtrain.comm.process_group import start_process_group
from hvdtrain.config.read import configure
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.build import check_optimizer
from hvdtrain.frameworks.torch.deferred import Deferred, make_deferred
from hvdtrain.frameworks.torch.models import gpt
from hvdtrain.frameworks.torch.parallel.blocks import units
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner

TASK = Classification((8, 8, 1), 10, np.array([0.4]), np.array([0.2]))


@pytest.fixture
def ranks() -> Iterator[SingleProcessCommunicator]:
    """A communicator; torch's process group on it ends with the test."""
    yield SingleProcessCommunicator()
    if dist.is_initialized():
        dist.destroy_process_group()


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


def learner_of(words: str, communicator: SingleProcessCommunicator) -> Any:
    return build_learner(
        configure(None, f"{words} speed.precision=fp64 batch.size=4".split()), TASK, communicator
    )


def batch_of(learner: Any, samples: int) -> Any:
    images = np.arange(samples * 64, dtype=np.uint8).reshape(samples, 8, 8, 1)
    return learner.to_device({"x": images, "y": np.arange(samples)})


HYPER = Hyper(0.1, 0.9, 1e-3, 4, 0)


def test_a_rank_without_samples_makes_every_pass(ranks: SingleProcessCommunicator) -> None:
    """In which weights are gathered: its gradients are zero, and its running statistics stay."""
    learner = learner_of(
        "model.name=wide_resnet model.widths=[2,2,2,2] shard.stage=3 optim.weight_decay=0", ranks
    )
    before = learner.state()
    passes = list[str]()
    for block in learner.model.blocks:
        block.register_forward_hook(lambda *_: passes.append("forward"))
        block.register_full_backward_hook(lambda *_: passes.append("backward"))
    for number in (1, 2):
        learner.evaluate(batch_of(learner, 0))
        assert passes == ["forward"] * (number * len(learner.model.blocks))
    passes.clear()
    learner.step([batch_of(learner, 0)], HYPER._replace(weight_decay=0.0), 0)
    assert (
        passes == ["forward"] * len(learner.model.blocks) + ["backward"] * len(learner.model.blocks)
        and len(passes) > 4
    )
    after = learner.state()
    assert all(np.array_equal(after[name], array) for name, array in before.items())


@pytest.mark.parametrize(
    "words",
    [
        "",
        "optim.name=lamb shard.reshard=false",
        "optim.name=torch.optim.Adam shard.offload=parameters",
    ],
)
def test_steps_and_state_are_those_without_shards(
    ranks: SingleProcessCommunicator, words: str
) -> None:
    job = "model.name=mlp model.widths=[16,8] optim.clip_norm=0.1 recipe.gradient_noise=0.01"
    whole = learner_of(f"{job} {words.partition('shard')[0]}", ranks)
    sharded = learner_of(f"{job} {words} shard.stage=3", ranks)
    for step in range(3):
        for learner in (whole, sharded):
            learner.evaluate(batch_of(learner, 2))
            learner.step(
                [batch_of(learner, 3), batch_of(learner, 0)],
                HYPER._replace(step=step, noise=0.01),
                step,
            )
    expected = whole.state()
    found = sharded.state()
    assert (
        expected.keys() == found.keys() and whole.state_dict_names() == sharded.state_dict_names()
    )
    for name, array in expected.items():
        assert np.array_equal(array, found[name]), name
    other = learner_of(f"{job} {words} shard.stage=3", ranks)
    other.load(found)
    assert all(np.array_equal(array, found[name]) for name, array in other.state().items())
    assert (
        "weights sharded over 1 rank as one unit" in sharded.describe()
        and not sharded.describe().startswith("FSDP")
    )


def test_rows_that_torch_moves_are_noticed(ranks: SingleProcessCommunicator) -> None:
    """The optimizer would update the memory that the rows had before, and nothing would learn."""
    learner = learner_of("model.name=mlp shard.stage=3", ranks)
    parameter = next(learner.model.parameters())
    parameter._local_tensor = parameter._local_tensor.clone()  # as FSDPParam.reset_sharded_param()
    learner.evaluate(batch_of(learner, 2))
    with pytest.raises(AssertionError, match=r"torch \S+ moved the rows of \S+ to other memory"):
        learner.step([batch_of(learner, 3)], HYPER, 0)


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1)) * self.gain


def test_a_parameter_without_rows_is_refused(ranks: SingleProcessCommunicator) -> None:
    with pytest.raises(
        UserError, match="the parameter gain is a single number: shard.stage=3 gives each rank rows"
    ):
        learner_of(f"model.name={__name__}:Scalar shard.stage=3", ranks)


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


def test_torch_distributed_runs_over_a_communicator(ranks: SingleProcessCommunicator) -> None:
    start_process_group(ranks)
    x = torch.arange(6.0)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        dist.all_reduce(x, op)
    parts = [torch.empty(6)]
    dist.all_gather(parts, x)
    half = torch.empty(6)
    whole = torch.empty(6, dtype=torch.bfloat16)
    # torch 2.13; before it, the names that it warns of
    new = hasattr(dist, "reduce_scatter_single")
    (dist.reduce_scatter_single if new else dist.reduce_scatter_tensor)(half, x)
    (dist.all_gather_single if new else dist.all_gather_into_tensor)(whole, x.bfloat16())
    dist.broadcast(x, 0)
    dist.barrier()
    assert dist.all_reduce(x, async_op=True).is_completed(), "a loop until it is so ends"
    assert x.tolist() == parts[0].tolist() == half.tolist() == whole.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(UserError, match="hvdtrain has no reduction"):
        dist.all_reduce(x, dist.ReduceOp.PRODUCT)
