"""shard.stage=3: every pass is a collective; on one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError
from hvdtrain.extras.fully_sharded.torch.process_group import start_process_group
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner

TASK = Classification((8, 8, 1), 10, np.array([0.4]), np.array([0.2]))


@pytest.fixture
def ranks() -> Iterator[SingleProcessCommunicator]:
    """A communicator; torch's process group on it ends with the test."""
    yield SingleProcessCommunicator()
    if dist.is_initialized():
        dist.destroy_process_group()


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
