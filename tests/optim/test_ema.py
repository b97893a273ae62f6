"""optim.ema: the average by its formula, in each framework; what evaluates it and writes it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import FULL, mpirun, needs_extra, needs_mpirun
from safetensors.numpy import load_file
from torch.optim.swa_utils import AveragedModel

from hvdtrain.__main__ import main
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import DONE
from hvdtrain.frameworks.torch.optim.rule_optimizer import (
    TorchOps,
    average,
    make_optimizer,
    set_hyper,
)
from hvdtrain.optim.adam import Adam
from hvdtrain.optim.rule import ArrayOps
from hvdtrain.optim.sgd import Sgd
from hvdtrain.optim.weight_average import Averaged, averages
from hvdtrain.records.run import read_run
from hvdtrain.training.checkpoint.files import read_arrays

WORDS = [
    "batch.size=100",
    "epochs=2",
    "optim.base_lr=0.1",
    "speed.precision=fp64",
    "recipe.warmup=0",
    "log.every_steps=7",
    "seed=3",
]


def test_the_average_is_that_of_averaged_model() -> None:
    """With the correction as its avg_fn; n_averaged counts the models before this one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3)).double()
    decay = 0.7

    def avg_fn(a: torch.Tensor, p: torch.Tensor, n: torch.Tensor | int) -> torch.Tensor:
        return a + (p - a) * (1 - decay) / (1 - decay ** (float(n) + 1))

    theirs = AveragedModel(model, avg_fn=avg_fn)
    optimizer = make_optimizer(
        Averaged(Adam(), decay), list(model.named_parameters()), exclude=True
    )
    for p in model.parameters():
        assert torch.equal(average(optimizer, p), p) if optimizer.state[p] else True
    for step in range(12):
        model(torch.randn(8, 5, dtype=torch.float64)).square().sum().backward()
        set_hyper(optimizer, Hyper(0.1 / (step + 1), 0.9, 0.01, batch=8, step=step))
        optimizer.step()
        optimizer.zero_grad()
        theirs.update_parameters(model)
    for p, expected in zip(model.parameters(), theirs.module.parameters(), strict=True):
        assert (
            average(optimizer, p) == pytest.approx(expected.detach(), abs=1e-13)
            and (p - expected).abs().max() > 1e-4
        )


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_the_average_by_hand_in_arrays_of_any_framework(decay: float) -> None:
    """w_1 = p_1; w_2 = (p_2 + d p_1) / (1 + d); the weights are those without averages."""
    gradients = np.random.default_rng(1).normal(size=(4, 3, 2))
    hyper = Hyper(0.5, 0.9, 0.1, batch=1, step=0)
    for xp in ("numpy", "torch"):
        ops = ArrayOps(np) if xp == "numpy" else TorchOps()
        make = (lambda x: x.copy()) if xp == "numpy" else (lambda x: [torch.from_numpy(x.copy())])
        read = (lambda x: x) if xp == "numpy" else (lambda x: x[0].numpy())
        rule = Averaged(Sgd(), decay)
        p = make(np.ones((3, 2)))
        plain = make(np.ones((3, 2)))
        state = rule.init(p, ops)
        own = Sgd().init(plain, ops)
        seen = []
        for g in gradients:
            p, state = rule.update(make(g), state, p, hyper, ops)
            plain, own = Sgd().update(make(g), own, plain, hyper, ops)
            assert np.array_equal(read(p), read(plain))
            seen.append(read(p).copy())
        factors = np.array([decay ** (len(seen) - 1 - t) for t in range(len(seen))])
        assert read(state[-2]) == pytest.approx(
            np.einsum("t,tij->ij", factors / factors.sum(), seen), rel=1e-14
        )


def test_which_arrays_are_averages() -> None:
    arrays = {
        "p.a.b": 1,
        "p.c": 2,
        "s.a.b.0": 3,
        "s.a.b.1": 4,
        "s.a.b.2": 5,
        "s.c.0": 6,
        "s.c.1": 7,
        "b.x": 8,
        "s.odd": 9,
        "s.lone.3": 10,
    }
    assert averages(arrays) == {"p.a.b": 4, "p.c": 6}


@needs_extra("export")
@needs_extra("evaluate")
@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("framework", "model"),
    [
        ("numpy", "linear"),
        ("jax", "mlp"),
        ("torch", "mlp"),
        ("torch", "convnet model.widths=[4,6]"),
    ],
)
def test_evaluations_are_of_the_averages(
    framework: str,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Weights are as without averages; a resumed job is the same to the last bit; evaluate and
    export use the averages."""
    monkeypatch.chdir(tmp_path)
    words = [f"framework={framework}", *f"model.name={model}".split(), *WORDS]
    assert main([*words, "run=plain"]) == main([*words, "optim.ema=0.95", "run=ema"]) == DONE
    assert (
        main([*words, "optim.ema=0.95", "run=two", "stop.steps=9"])
        == main([*words, "optim.ema=0.95", "run=two"])
        == DONE
    )
    plain, ema, two = (
        read_arrays(sorted((tmp_path / run / "checkpoints").iterdir())[-1], 2**30)
        for run in ("plain", "ema", "two")
    )
    assert {name for name in plain if not np.array_equal(plain[name], ema[name])} == set()
    assert ema.keys() == two.keys() and all(np.array_equal(ema[name], two[name]) for name in ema)
    last = {
        run: read_run(Path(run)).epoch_events()[-1]["val_loss"] for run in ("plain", "ema", "two")
    }
    assert last["ema"] == last["two"] != last["plain"]
    capsys.readouterr()
    assert (
        main(["evaluate", "ema"]) == DONE and ", averages of optim.ema\n" in capsys.readouterr().out
    )
    for words, run in (([], "ema"), (["optim.ema=null"], "plain")):
        assert main(["evaluate", "ema", "--json", *words]) == DONE
        assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(last[run], rel=1e-9)
    if framework == "torch":
        assert main(["export", "ema", "--to", "m.safetensors"]) == DONE
        assert "the averages of the weights are written" in capsys.readouterr().out
        weights = load_file("m.safetensors")
        expected = averages(ema)
        assert expected and all(
            np.array_equal(weights[name.removeprefix("p.")], array)
            for name, array in expected.items()
        )


@pytest.mark.slow
@needs_mpirun
def test_averages_are_the_same_on_ranks_and_in_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for framework, stages in (("torch", (0, 1, 2) if FULL else (2,)), *[("jax", (0, 2))] * FULL):
        words = [
            f"framework={framework}",
            "model.name=mlp",
            *WORDS,
            "optim.name=adam",
            "optim.base_lr=0.01",
            "optim.ema=0.9",
        ]
        assert main([*words, f"run={tmp_path / framework}"]) == DONE
        expected = [event["val_loss"] for event in read_run(tmp_path / framework).epoch_events()]
        for stage in stages:
            run = tmp_path / f"{framework}-{stage}"
            result = mpirun(
                2,
                [
                    "-m",
                    "hvdtrain",
                    *words,
                    "comm.engine=mpi",
                    f"shard.stage={stage}",
                    "comm.bucket_mb=0.01",
                    f"run={run}",
                ],
            )
            assert result.returncode == DONE, result
            assert [event["val_loss"] for event in read_run(run).epoch_events()] == pytest.approx(
                expected, rel=1e-12
            )
            alone = read_arrays(sorted((tmp_path / framework / "checkpoints").iterdir())[-1], 2**30)
            found = read_arrays(sorted((run / "checkpoints").iterdir())[-1], 2**30)
            for name, array in averages(alone).items():
                assert averages(found)[name] == pytest.approx(array, abs=1e-12)
