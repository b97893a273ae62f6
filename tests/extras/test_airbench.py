"""model.name=airbench: what it computes, and its first layer, which comes from training samples on
any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import ROOT, mpirun, needs_mpirun
from safetensors.numpy import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hvdtrain.__main__ import main
from hvdtrain.config.read import configure
from hvdtrain.data.sampler import evaluated_samples
from hvdtrain.errors import UserError
from hvdtrain.extras.airbench.frameworks.torch.models import airbench
from hvdtrain.extras.airbench.frameworks.torch.models.airbench import Whitening
from hvdtrain.records.run import read_run
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
    config = str(ROOT / "configs" / "cifar10_speed.yaml")
    assert main(["--config", config, *small.split(), f"run={tmp_path / 'run'}"]) == 0
    said = capsys.readouterr().out
    assert "recipe  muon, lr 0.24" in said and "done (epochs=2)" in said
    losses = [event["train_loss"] for event in read_run(tmp_path / "run").epoch_events()]
    assert losses[-1] < losses[0]


def test_airbench_computes_what_it_describes() -> None:
    torch.manual_seed(3)
    model = airbench.build("airbench", (12, 9, 2), 5, widths=(20, 6)).double()
    x = torch.randn(7, 2, 12, 9, dtype=torch.float64)
    f = torch.nn.functional
    model.begin_with(x)
    state = dict(model.state_dict())
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == {
        "whitening.weight",
        *(f"blocks.{i}.{k}.weight" for i in (1, 2) for k in (2, 5)),
    }

    def norm(x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean((0, 2, 3), keepdim=True)
        return centred / (centred.square().mean((0, 2, 3), keepdim=True) + 1e-12).sqrt()

    expected = f.gelu(f.conv2d(x, state["whitening.weight"]))
    for i in (1, 2):
        expected = f.max_pool2d(f.conv2d(expected, state[f"blocks.{i}.0.weight"], padding=1), 2)
        expected = f.gelu(
            norm(f.conv2d(f.gelu(norm(expected)), state[f"blocks.{i}.4.weight"], padding=1))
        )
    expected = expected.amax((2, 3)) @ state["fc.weight"].T / 6
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-12)
    first = state["blocks.1.0.weight"]
    assert state["fc.weight"].std() == pytest.approx(1)
    torch.testing.assert_close(
        f.conv2d(torch.ones(1, 16, 3, 3).double(), first[:16], padding=1),
        torch.ones(1, 16, 3, 3).double(),
    )


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is computed within."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        self.numbers = max(
            [
                self.numbers,
                *(part.numel() for part in tree_leaves(result) if isinstance(part, torch.Tensor)),
            ]
        )
        return result


def test_airbench_whitens(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    layer = airbench.Whitening(3, eps=1e-9).double()
    monkeypatch.setattr(airbench, "PART", 20)  # samples at a time, the last ten alone
    x = (
        torch.randn(50, 3, 10, 10, dtype=torch.float64).cumsum(3)
        @ torch.randn(10, 10, dtype=torch.float64)
    ).cumsum(1)
    layer.begin_with(x)
    outputs = layer(x).transpose(0, 1).flatten(1)  # (24, patches)
    torch.testing.assert_close(
        outputs[:12] @ outputs[:12].T / outputs.shape[1], torch.eye(12).double(), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(outputs[12:], -outputs[:12])
    with Largest() as largest:
        layer.begin_with(x)
    assert largest.numbers == 20 * 9 * 9 * 12, "the patches of all samples were in memory at once"
    with pytest.raises(UserError, match="3 blocks halve images of 8x9 to nothing"):
        airbench.build("airbench", (8, 9, 1), 3)


def test_airbench_without_its_first_weights() -> None:
    torch.manual_seed(5)
    model = airbench.build(
        "airbench", (12, 9, 2), 5, widths=(20, 6), whitening=False, identity=False
    )
    first = model.whitening.weight.detach().clone()
    model.begin_with(torch.randn(7, 2, 12, 9))
    assert model.whitening.weight.requires_grad and torch.equal(model.whitening.weight, first)
    assert all(
        kernels.detach().abs().min() > 0
        for name, kernels in model.named_parameters()
        if kernels.ndim == 4
    ), "an identity has zeros"
