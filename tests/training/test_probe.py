"""The model's outputs for one fixed batch, compared over ranks."""

from __future__ import annotations

import math
import os
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import ROOT, mpirun, needs_mpirun

from hvdtrain.comm.communicator import Buffer, SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.progress import fold
from hvdtrain.errors import DIVERGED, Diverged
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner
from hvdtrain.training.replicas.probe import Probe, group_close, largest_pass, probe_batch

TASK = Classification((2, 2, 1), 3, np.array([0.5]), np.array([0.25]))
CONFIG = configure(None, ["framework=numpy", "model.name=linear", "model.loss=squared_error"])


class OfThree(SingleProcessCommunicator):
    """Rank 2 of three, with the losses of the others; it counts its collectives."""

    rank = 2
    size = 3

    def __init__(self, *others: tuple[float, float]) -> None:
        self.others = others
        self.calls = 0

    def allgather(self, x: Buffer, name: str) -> Buffer:
        self.calls += 1
        return np.concatenate([np.array(self.others), x])


def compare(communicator: OfThree, config: Any = CONFIG) -> None:
    learner = build_learner(CONFIG, TASK, SingleProcessCommunicator())
    weights = {name: np.zeros_like(array) for name, array in learner.state().items()} | {
        "p.fc.bias": np.array([0.5, 0, 0])
    }
    learner.load(weights)
    Probe(config, TASK).compare(communicator, learner, ["n1", "n1", "n2"], "before the first step")


def test_losses_that_differ_by_more_than_rounding_are_refused() -> None:
    """From the logits (0.5, 0, 0) the squared error to class 0 is 0.125 for each of 8 images: 1."""
    for close in ((1.0, 1.0), (1.0009, 1.0009), (0.9995, 0.9995)):
        compare(OfThree(close, (1.0, 1.0)))
    with pytest.raises(Diverged) as caught:
        compare(OfThree((1.01, 1.01), (1.01, 1.01)))
    assert caught.value.what == (
        "the model gives other outputs on some ranks before the first step: its loss for a fixed "
        "batch is 1.01 on rank 0, 1 on rank 2"
    )
    assert (
        caught.value.where == "rank 2 on n2, against 2 equal ranks"
        and caught.value.code == DIVERGED
    )


def test_a_model_that_draws_random_numbers_is_not_compared() -> None:
    compare(OfThree((3.0, 3.1), (2.0, 2.1)))


def test_nothing_is_compared_where_it_is_off() -> None:
    for key in ("guard.equal_steps=null", "speed.compile=default"):
        off = OfThree((3.0, 3.0), (3.0, 3.0))
        compare(off, configure(None, [key]))
        assert off.calls == 0


def test_ranks_are_grouped_by_the_loss_of_most() -> None:
    assert group_close([1.0, 1.0001, 2.0, 1.0002, 2.0], 1e-3) == [0, 0, 4, 0, 4]
    assert group_close([math.nan, math.inf], 1e-3) == [0, 0]
    assert (
        group_close([math.nan, 1.0, math.nan], 1e-3)[1]
        != 0
        == group_close([math.nan, 1.0, math.nan], 1e-3)[0]
    )
    assert group_close([0.0, 0.0], 1e-3) == [0, 0]
    assert len(set(group_close([1.0, math.inf], 1e-3))) == 2, "no finite loss is close to infinity"


def test_losses_of_8192_ranks_take_no_memory_of_pairs() -> None:
    """With an array of all pairs 1.1 GB on each rank."""
    # from 1 to 1.004: half of them are within 1e-3 of one in the middle
    losses = [1 + rank / 8192 / 250 for rank in range(8192)]
    tracemalloc.start()
    groups = group_close(losses, 1e-3)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 10e6
    assert groups.count(0) == pytest.approx(4096, rel=0.01) and len(
        set(groups)
    ) == 8193 - groups.count(0)


def test_the_batch_is_the_same_everywhere_and_bounded() -> None:
    batch = probe_batch(TASK)
    assert (
        batch["x"].shape == (8, 2, 2, 1)
        and batch["x"].dtype == np.uint8
        and batch["y"].tolist() == [0] * 8
    )
    assert batch["x"].tobytes()[:16] == fold(0).to_bytes(8, "little") + fold(1).to_bytes(
        8, "little"
    )
    assert probe_batch(TASK, 3)["x"].tobytes() == batch["x"].tobytes()[: 3 * 4]
    assert probe_batch(Classification((4096, 4096, 1), 3, TASK.mean, TASK.std))["x"].shape == (
        1,
        4096,
        4096,
        1,
    )


def test_the_probe_takes_no_more_memory_than_training() -> None:
    passes = {
        "batch.size=100": 34,
        "batch.micro=2": 2,
        "batch.micro=auto": 22,
        "batch.evaluate=4": 4,
    }
    assert {word: largest_pass(configure(None, [word]).batch, 3) for word in passes} == passes


APART = """
import os
import torch
class Apart(torch.nn.Module):
    def __init__(self, shape, classes, after=0):
        super().__init__()
        self.fc, self.after = torch.nn.Linear(shape[0] * shape[1] * shape[2], classes), after
    def forward(self, x):
        self.after -= self.training
        apart = os.environ.get("APART") == "1" and self.after <= 0
        return self.fc(x.flatten(1)) * (1.5 if apart else 1)
"""


@pytest.mark.slow
@needs_mpirun
@pytest.mark.parametrize(("after", "when"), [(0, "before the first step"), (3, "after step 10")])
def test_a_forward_that_differs_on_one_rank_ends_the_job(
    tmp_path: Path, after: int, when: str
) -> None:
    """What no digest shows: the weights stay equal, since the ranks add up their gradients."""
    (tmp_path / "apart.py").write_text(APART)
    odd = 'if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then export APART=1; fi; exec "$@"'
    words = [
        "model.name=apart:Apart",
        f"model.after={after}",
        "comm.engine=mpi",
        "max_steps=20",
        f"run={tmp_path / 'run'}",
    ]
    start = [
        "-c",
        "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])",
        "sh",
        "-c",
        odd,
        "sh",
        sys.executable,
        "-m",
        "hvdtrain",
        *words,
    ]
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    result = mpirun(2, start, env=env)
    assert result.returncode == DIVERGED, result
    assert (
        result.stderr.count(
            f"the model gives other outputs on some ranks {when}: its loss for a fixed batch is "
        )
        == 1
    ), result.stderr
    assert "Traceback" not in result.stderr
