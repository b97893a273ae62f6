"""begin_with(): weights that rank 0 computes from training samples before the first step, on any
number of ranks, and not again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import mpirun, needs_mpirun
from safetensors.numpy import load_file

from hvdtrain.__main__ import main
from hvdtrain.config.read import configure
from hvdtrain.data.sampler import evaluated_samples
from hvdtrain.errors import BUG, UserError
from hvdtrain.frameworks.torch.model import check_first_samples
from hvdtrain.frameworks.torch.models.airbench import Whitening
from hvdtrain.report.run import read_run
from hvdtrain.training.datasets import open_datasets

WORDS = [
    "data.name=digits",
    "model.name=airbench",
    "model.widths=[3,4]",
    "norm.kind=sync",
    "speed.precision=fp64",
    "batch.size=31",
]
WORDS += [
    "optim.name=sgd",
    "optim.base_lr=0.1",
    "seed=5",
    "stop.steps=6",
    "epochs=null",
    "data.sampling=global",
]


def weights(run: Path) -> dict[str, np.ndarray]:
    (newest,) = sorted((run / "checkpoints").glob("step-*"))[-1:]
    return load_file(newest / "weights.safetensors")


def by_hand() -> np.ndarray:
    """The kernels from the samples that the seed draws of all, scaled as the task scales images."""
    datasets = open_datasets(configure(None, WORDS))
    images = datasets.train.read(
        evaluated_samples(len(datasets.train), min(5000, len(datasets.train)), 5)
    )["x"]
    task = datasets.task
    x = (torch.tensor(images).permute(0, 3, 1, 2).double() / 255 - float(task.mean[0])) / float(
        task.std[0]
    )
    layer = Whitening(1, 5e-4).double()
    layer.begin_with(x)
    return layer.weight.detach().numpy()


@pytest.mark.slow
@needs_mpirun
def test_two_ranks_begin_with_the_weights_of_one_and_a_resumed_job_keeps_them(
    tmp_path: Path,
) -> None:
    one = tmp_path / "one"
    two = tmp_path / "two"
    assert main([*WORDS, f"run={one}"]) == 0
    result = mpirun(2, ["-m", "hvdtrain", *WORDS, "comm.engine=mpi", f"run={two}"])
    assert result.returncode == 0, result
    alone = weights(one)
    together = weights(two)
    name = next(name for name in alone if name.endswith("whitening.weight"))
    np.testing.assert_allclose(alone[name], by_hand(), rtol=0, atol=1e-12)
    for key, array in alone.items():
        np.testing.assert_allclose(together[key], array, rtol=0, atol=1e-11, err_msg=key)
    assert main([f"resume={one}", f"run={one}", "stop.steps=9"]) == 0
    resumed = weights(one)
    assert (resumed[name] == alone[name]).all() and any(
        (resumed[key] != array).any() for key, array in alone.items()
    )


def test_the_configuration_of_the_record_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On images of its size, with a narrower network: each key of it is used."""
    small = (
        "data.name=synthetic data.samples=64 data.val_samples=20 data.shape=[32,32,3] "
        "batch.size=32 model.widths=[8,8,8] epochs=2"
    )
    config = str(Path(__file__).parents[2] / "configs" / "cifar10_speed.yaml")
    assert main(["--config", config, *small.split(), f"run={tmp_path / 'run'}"]) == 0
    said = capsys.readouterr().out
    assert "recipe  muon, lr 0.24" in said and "done (epochs=2)" in said
    losses = [event["train_loss"] for event in read_run(tmp_path / "run").epoch_events()]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("count", [0, -3, "many", 2.5])
def test_first_samples_is_a_count(count: object) -> None:
    model = Whitening(1, 5e-4)
    model.first_samples = count  # type: ignore[assignment]
    with pytest.raises(
        UserError,
        match=r"first_samples of model\.name=airbench is .*\n.*\n  fix: a whole number of "
        r"training samples",
    ):
        check_first_samples(model, configure(None, WORDS))


class Faulty(torch.nn.Linear):
    """Its begin_with() cannot take an image."""

    def __init__(self, classes: int) -> None:
        super().__init__(64, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(1))

    def begin_with(self, inputs: torch.Tensor) -> None:
        self.weight.data = self.weight @ inputs


def test_an_error_in_begin_with_is_told_as_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main([*WORDS[:1], "model.name=test_first_weights:Faulty", f"run={tmp_path / 'run'}"]) == BUG
    )
    said = capsys.readouterr().err
    assert (
        "computing the first weights, begin_with(): " in said
        and "in begin_with: self.weight.data = self.weight @ inputs" in said
    ), said
    assert "checkpoint" not in said


def test_parts_of_the_weights_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, "norm.kind=batch", "shard.stage=3", f"run={tmp_path / 'run'}"]) == 2
    said = capsys.readouterr().err
    assert (
        "begin_with() of model.name=airbench needs whole weights on rank 0" in said
        and "leave shard.stage out, or shard.stage=2" in said
    )
