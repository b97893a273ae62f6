"""begin_with(): weights that rank 0 computes from training samples before the first step.
tests/extras/test_airbench.py has them on two ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import needs_extra
from safetensors.numpy import load_file

from hvdtrain.__main__ import main
from hvdtrain.config.read import configure
from hvdtrain.data.sampler import evaluated_samples
from hvdtrain.errors import BUG, UserError
from hvdtrain.frameworks.torch.model import check_first_samples
from hvdtrain.training.datasets import open_datasets

WORDS = ["data.name=digits", "batch.size=31", "stop.steps=2", "seed=5"]
FAULTY = "model.name=test_first_weights:Faulty"


class Centred(torch.nn.Linear):
    """Subtracts the mean of the samples that it begins with."""

    first_samples = 20

    def __init__(self, classes: int) -> None:
        super().__init__(64, classes)
        self.mean = torch.nn.Parameter(torch.zeros(64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(1) - self.mean)

    def begin_with(self, inputs: torch.Tensor) -> None:
        self.mean.copy_(inputs.flatten(1).mean(0))


class Faulty(torch.nn.Linear):
    """Its begin_with() cannot take an image."""

    def __init__(self, classes: int) -> None:
        super().__init__(64, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(1))

    def begin_with(self, inputs: torch.Tensor) -> None:
        self.weight.data = self.weight @ inputs


def test_a_model_begins_with_as_many_samples_as_it_asks_for(tmp_path: Path) -> None:
    """Drawn of all by the seed, and normalized as the model gets them."""
    run = tmp_path / "run"
    assert main([*WORDS, "model.name=test_first_weights:Centred", f"run={run}"]) == 0
    datasets = open_datasets(configure(None, WORDS))
    drawn = evaluated_samples(len(datasets.train), 20, 5)
    images = datasets.train.read(drawn)["x"].reshape(20, 64) / 255
    expected = (images.mean(0) - datasets.task.mean[0]) / datasets.task.std[0]
    found = load_file(run / "checkpoints" / "step-00000002" / "weights.safetensors")["p.mean"]
    assert len(np.unique(drawn)) == 20
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("count", [0, -3, "many", 2.5])
def test_first_samples_is_a_count(count: object) -> None:
    model = Faulty(10)
    model.first_samples = count  # type: ignore[assignment]
    with pytest.raises(
        UserError,
        match=r"first_samples of model\.name=test_first_weights:Faulty is .*\n.*\n"
        r"  fix: a whole number of training samples",
    ):
        check_first_samples(model, configure(None, [*WORDS, FAULTY]))


def test_an_error_in_begin_with_is_told_as_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS[:1], FAULTY, f"run={tmp_path / 'run'}"]) == BUG
    said = capsys.readouterr().err
    assert (
        "computing the first weights, begin_with(): " in said
        and "in begin_with: self.weight.data = self.weight @ inputs" in said
    ), said
    assert "checkpoint" not in said


@needs_extra("fully_sharded")
def test_parts_of_the_weights_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, FAULTY, "shard.stage=3", f"run={tmp_path / 'run'}"]) == 2
    said = capsys.readouterr().err
    assert (
        "begin_with() of model.name=test_first_weights:Faulty needs whole weights on rank 0" in said
        and "leave shard.stage out, or shard.stage=2" in said
    )
