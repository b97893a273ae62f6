"""The numbers of a plan against a walk over every step of the job, and against the arrays of a real
learner."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config import plugins
from hvdtrain.config.read import configure
from hvdtrain.core.progress import Progress
from hvdtrain.extras.plan.forecast.job import Forecast, forecast, memory
from hvdtrain.frameworks.by_name import build_rule
from hvdtrain.recipe.batch import steps_until
from hvdtrain.recipe.clock import total_samples
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner
from hvdtrain.training.input import split_step

GROWTH = ["recipe.growth=milestones", "recipe.grow_at=[1,2.5]", "recipe.grow_to=[300,200]"]


def planned(*arguments: str, dataset: int, ranks: int = 1) -> Forecast:
    config = configure(None, arguments)
    found = forecast(config, dataset, ranks)
    assert isinstance(found, Forecast), found
    return found


JOBS = [
    ["batch.size=64", "epochs=3"],
    ["batch.size=30", "epochs=2", "recipe.warmup=7 steps"],
    ["batch.size=1000", "epochs=2", "recipe.warmup=2"],  # ends with its warm-up
    ["batch.size=64", "epochs=4", *GROWTH, "recipe.warmup=1.1"],
    ["batch.size=7", "epochs=3", "recipe.growth=milestones", "recipe.grow_at=[0.007,0.3,0.301,2.9]", "recipe.grow_to=[9,100,3,50]"],  # noqa: E501
    ["batch.size=10", "epochs=4", "recipe.schedule=steps", "recipe.milestones=[1,2,3]", "recipe.gamma=0.2", "recipe.growth=decays",  # noqa: E501
     "recipe.batch_max=80"],
    ["batch.size=64", "epochs=4", *GROWTH, "max_steps=18"],
    ["batch.size=64", "epochs=0.7", *GROWTH, "max_steps=18"],
    ["batch.size=64", "stop.epochs=2.25", "recipe.schedule=linear"],
    ["batch.size=64", "stop.steps=30", "recipe.growth=milestones", "recipe.grow_at=[25%,20 "
                                                                   "steps]", "recipe.grow_to=[100,20]"],  # noqa: E501
    ["batch.size=256", "optim.base_batch=100", "recipe.adapt_regime=true", "recipe.schedule=cosine", "recipe.warmup=0.7"],  # noqa: E501
]  # fmt: skip


@pytest.mark.parametrize("arguments", JOBS, ids=" ".join)
def test_a_forecast_equals_a_walk_over_every_step(arguments: list[str]) -> None:
    job = planned(*arguments, dataset=1000)
    p = Progress(1000, total_samples(job.config, 1000))
    walked = []
    while not p.done and p.step < (job.config.stop.steps or 1e9):
        assert job.progress(p.step) == p
        walked.append((p, job.recipe.at(p)))
        p = p.advance(walked[-1][1].batch)
    assert job.steps == len(walked)
    assert [job.hyper(step) for step in range(job.steps)] == [hyper for _, hyper in walked]
    assert sum(phase.steps * phase.batch for phase in job.batch_phases) == p.samples
    # with 3 = ceil(256 / 100)
    warm = {"7 steps": 0.21, 0.7: 3 * 0.7}.get(job.config.recipe.warmup, job.config.recipe.warmup)
    assert job.after_warmup() == next((hyper for p, hyper in walked if p.epochs >= warm), None)


def test_steps_until_an_epoch_round_as_progress_does() -> None:
    """Fractions of 1437 that, times 1437, lie above or below the whole number that they should
    be."""
    samples = range(1, 3000)
    assert any(n / 1437 * 1437 > n for n in samples) and any(n / 1437 * 1437 < n for n in samples)
    assert [steps_until(n / 1437, 0, 1, 1437) for n in samples] == list(samples)
    assert [steps_until(n / 1437, 1000, 7, 1437) for n in (900, 1000, 1001, 1007, 1008)] == [
        0,
        0,
        1,
        1,
        2,
    ]


def test_a_job_of_many_steps_is_planned_without_a_loop() -> None:
    assert planned("batch.size=1", "epochs=1000000", dataset=10**9).steps == 10**15


@pytest.mark.parametrize(
    "arguments", [["batch.micro=4"], [], ["data.sampling=partition", "batch.micro=5"]], ids=" ".join
)
def test_forward_passes_are_those_of_a_step(arguments: list[str]) -> None:
    for ranks in (1, 3, 8):
        job = planned("batch.size=64", *GROWTH, *arguments, dataset=1000, ranks=ranks)
        for batch in (64, 300, 200):
            communicator: Any = SingleProcessCommunicator()
            communicator.rank = ranks - 1
            communicator.size = ranks
            passes = split_step(job.config, Progress(1000, 9000), batch, 64, communicator)
            assert job.forward_passes(batch) == len(passes)


FRAMEWORKS = [
    ("torch", ["model.name=mlp", "norm.kind=batch"]),
    ("torch", ["model.name=convnet", "norm.kind=ghost"]),
    ("torch", ["model.name=wide_resnet", "norm.kind=sync", "model.classifier_std=0.01"]),
    ("numpy", ["model.name=linear"]),
    ("jax", ["model.name=convnet"]),
]


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "novograd", "muon"])
@pytest.mark.parametrize(
    ("framework", "arguments"),
    FRAMEWORKS,
    ids=[f"{framework} {arguments[0]}" for framework, arguments in FRAMEWORKS],
)
def test_shapes_and_memory_are_those_of_the_learner(
    framework: str, arguments: list[str], optimizer: str
) -> None:
    config = configure(
        None,
        [
            f"framework={framework}",
            *arguments,
            f"optim.name={optimizer}",
            "speed.device=cpu",
            "speed.precision=fp64",
        ],
    )
    task = Classification((8, 6, 2), 5, np.zeros(2), np.ones(2))
    shapes = plugins.load("frameworks", framework, "").shapes(config, task)
    state = build_learner(config, task, SingleProcessCommunicator()).state()
    assert shapes == {
        name[2:]: array.shape for name, array in state.items() if name.startswith("p.")
    }
    found = memory(shapes, build_rule(config), "fp64")
    assert (
        found.weights
        == found.gradients
        == found.buckets
        == sum(a.nbytes for name, a in state.items() if name.startswith("p."))
    )
    assert found.optimizer_state == sum(
        array.nbytes for name, array in state.items() if name.startswith("s.")
    )


def test_memory_is_computed_without_allocating_it() -> None:
    found = memory(
        {"huge": (10**6, 10**6)}, build_rule(configure(None, ["optim.name=adam"])), "fp32"
    )
    assert (found.weights, found.optimizer_state) == (4 * 10**12, 8 * 10**12)
