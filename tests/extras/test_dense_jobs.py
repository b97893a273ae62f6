"""parallel.dense gives the losses, the evaluation and the files of one process: the dense layers
cut over ranks, in schemes a, b and c."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from dense_jobs_on_ranks import JOBS, UPDATES, jobs_of
from pool import on_ranks
from ranks import FULL, mpirun, needs_extra, needs_horovod, needs_mpirun, python

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import DONE, UserError
from hvdtrain.frameworks.torch.models import convnet
from hvdtrain.tasks.classification import Classification, without_statistics
from hvdtrain.training.build import build_learner

slow = pytest.mark.slow


def run(tmp: Path, engine: str, size: int, how: str = "") -> dict:
    return dict(
        on_ranks(engine, size, "dense_jobs_on_ranks:curves", str(tmp / f"{engine}-{size}"), how)[0]
    )


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return run(tmp_path_factory.mktemp("one"), "single", 1)


def check(name: str, job: dict, one: dict) -> None:
    losses = np.array(job["losses"])
    expected = np.array(one["losses"])
    assert len(losses) >= 3 and losses[-1] != losses[0], name
    assert np.abs(losses - expected).max() < 1e-12 * expected.max(), name
    assert job["val"] == pytest.approx(one["val"], rel=1e-12), name
    assert job["weights"] == pytest.approx(one["weights"], rel=1e-12), name
    assert job["digests"] == 1, name


def test_one_rank_has_the_whole_dense_part(one_process: dict) -> None:
    first = next(iter(JOBS))
    check(first, one_process[f"{first} a"], one_process[first])


@pytest.mark.parametrize(
    ("engine", "size", "how"),
    [
        pytest.param("mpi", 3, "" if FULL else "few", marks=[needs_mpirun, slow], id="mpi-3"),
        *[
            pytest.param("mpi", 4, "", marks=[needs_mpirun, slow, pytest.mark.ranks4], id="mpi-4"),
            pytest.param(
                "horovod", 2, "few", marks=[needs_mpirun, needs_horovod, slow], id="horovod-2-few"
            ),
            pytest.param("mpi", 2, "few", marks=[needs_mpirun, slow], id="mpi-2-few"),
            pytest.param(
                "horovod", 2, "", marks=[needs_mpirun, needs_horovod, slow], id="horovod-2"
            ),
            pytest.param("torchdist", 2, "", marks=[needs_mpirun, slow], id="torchdist-2"),
        ]
        * FULL,
    ],
)
def test_every_scheme_is_one_process(
    one_process: dict, tmp_path: Path, engine: str, size: int, how: str
) -> None:
    found = run(tmp_path, engine, size, how)
    faulty = found.pop("faulty")
    files = found.pop("files")
    left_out = found.pop("left out")
    for precision, rel, bad in (
        ("fp64", 1e-12, 1),
        ("fp16", 1e-2, 0),
    ):  # what 16 bits may be too few for makes the loss scale smaller
        one = one_process["left out"][precision]
        assert left_out[precision]["nonfinite"] == one["nonfinite"] == bad
        assert left_out[precision]["changed"] == pytest.approx(one["changed"], rel=rel)
        assert {name.split(".")[1] for name in one["changed"]} == {"dense"}, (
            "there is the first turn's update"
        )
        assert min(one["changed"].values()) > 1e-6
    assert files == one_process["files"] and len(files) == 2
    expected = np.array(one_process["one layer"]["losses"])
    assert np.abs(np.array(faulty["losses"]) - expected).max() > 1e-5, (
        "gradients of activations that are not summed over ranks are noticed"
    )
    assert found.keys() == jobs_of(how).keys()
    for name, job in found.items():
        check(name, job, one_process[name if name in UPDATES else name.rpartition(" ")[0]])


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_two_steps_of_three_updates_by_hand(name: str) -> None:
    """Plain torch: each update with momentum and decay, clipped by its own norm, at its turn's
    share of the learning rate.

    torch.optim.Adam counts the updates of each parameter, as the trainer does.
    """
    words = (
        "model.name=convnet model.widths=[3,4] model.dense=[7] model.norm=false "
        "speed.precision=fp64 optim.exclude=none "
    )
    words += (
        f"optim.name={name} optim.clip_norm=0.08 parallel.dense=c parallel.dense_updates=3 "
        "batch.size=7"
    )
    task = without_statistics((8, 8, 1), 10)
    learner = build_learner(configure(None, words.split()), task, SingleProcessCommunicator())
    model = convnet.build("convnet", (8, 8, 1), 10, widths=(3, 4), dense=(7,), norm=False).double()
    model.load_state_dict(learner.model.state_dict())
    dense = list(model.dense.parameters())
    others = [p for path, p in model.named_parameters() if not path.startswith("dense.")]
    norms: list[float] = []
    kinds = {"sgd": partial(torch.optim.SGD, momentum=0.9), "adam": torch.optim.Adam}
    optimizers = [kinds[name](part, weight_decay=0.01) for part in (dense, others)]

    def update(number: int, lr: float) -> None:
        group = optimizers[number].param_groups[0]
        group["lr"] = lr
        norm = torch.cat([p.grad.flatten() for p in group["params"]]).norm()
        norms.append(float(norm))
        for p in group["params"]:
            p.grad *= min(1.0, 0.08 / norm)
        optimizers[number].step()
        optimizers[number].zero_grad()

    rng = np.random.default_rng(3)
    for step, lr in enumerate((0.4, 0.6)):
        batch = learner.to_device(
            {"x": rng.integers(0, 256, (7, 8, 8, 1), dtype=np.uint8), "y": rng.integers(0, 10, 7)}
        )
        x = learner.forward.inputs_of(batch)
        y = batch.arrays["y"]
        of_others = [torch.zeros_like(p) for p in others]
        for turn in (slice(turn, None, 3) for turn in range(3)):
            share = len(y[turn]) / 7
            gradients = torch.autograd.grad(
                torch.nn.functional.cross_entropy(model(x[turn]), y[turn]), [*dense, *others]
            )
            for p, g in zip(dense, gradients, strict=False):
                p.grad = g
            of_others = [
                total + g * share
                for total, g in zip(of_others, gradients[len(dense) :], strict=True)
            ]
            update(0, lr * share)
        for p, total in zip(others, of_others, strict=True):
            p.grad = total
        update(1, lr)
        learner.step([batch], Hyper(lr, 0.9, 0.01, batch=7, step=step), 0)
        for path, p in model.named_parameters():
            torch.testing.assert_close(learner.model.get_parameter(path), p, rtol=1e-12, atol=1e-14)
    assert min(norms) < 0.08 < max(norms), "some are clipped, some are not"


def test_bf16_layers_compute_each_turn_with_the_weights_of_the_turn_before() -> None:
    """Autocast keeps 16-bit copies of weights as long as its context lasts."""
    words = (
        "model.name=convnet model.widths=[3,4] model.dense=[7] model.norm=false optim.name=sgd "
        "parallel.dense=b batch.size=8"
    )
    rng = np.random.default_rng(3)
    weights = {}
    batch = {"x": rng.integers(0, 256, (8, 8, 8, 1), dtype=np.uint8), "y": np.arange(8) % 2}
    for name, updates in (("fp32", 8), ("bf16", 8), ("fp32", 1)):
        chosen = f"{words} speed.precision={name} parallel.dense_updates={updates}"
        learner = build_learner(
            configure(None, chosen.split()),
            without_statistics((8, 8, 1), 10),
            SingleProcessCommunicator(),
        )
        for step in range(2):
            learner.step(
                [learner.to_device(dict(batch))], Hyper(4.0, 0.0, 0.0, batch=8, step=step), 0
            )
        weights[name, updates] = torch.cat(
            [p.detach().flatten() for p in learner.model.dense.parameters()]
        )
    gaps = {key: float((found - weights["fp32", 8]).norm()) for key, found in weights.items()}
    assert 0 < gaps["bf16", 8] < 0.1 * gaps["fp32", 1], gaps


CNN = [
    "data.name=digits",
    "model.name=convnet",
    "model.widths=[4,6]",
    "model.dense=[9]",
    "model.norm=false",
    "batch.size=13",
    "seed=5",
]
CNN += ["recipe.warmup=0", "recipe.schedule=constant", "log.every_steps=1"]
SGD = ["optim.name=sgd", "optim.base_lr=1", "optim.base_batch=13", "optim.momentum=0.9"]


def events(run: Path, kind: str) -> list[dict]:
    return [
        event
        for event in map(json.loads, (run / "events.jsonl").read_text().splitlines())
        if event["kind"] == kind
    ]


def train(ranks: int, words: list[str]) -> None:
    argv = ["-m", "hvdtrain", *CNN, *words]
    result = mpirun(ranks, [*argv, "comm.engine=mpi"]) if ranks > 1 else python(argv)
    assert result.returncode == DONE, result.stderr


@needs_extra("evaluate")
@slow
@needs_mpirun
def test_a_checkpoint_resumes_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    """The turns of its updates are parts of the global batch, whatever the ranks."""
    words = [*SGD, "speed.precision=fp64", "parallel.dense=c", "parallel.dense_updates=4"]
    train(1, [*words, f"run={tmp_path / 'one'}", "stop.steps=6"])
    for ranks, steps in ((2, 2), *[(1, 4)] * FULL, (3, 6)):
        train(ranks, [*words, f"run={tmp_path / 'many'}", f"stop.steps={steps}"])
    one, many = (
        [event["loss"] for event in events(tmp_path / name, "step")] for name in ("one", "many")
    )
    assert len(one) == 6 and many == pytest.approx(one, rel=1e-12)
    headers = [event["model"] for event in events(tmp_path / "many", "start")]
    assert [
        "dense.fc1, dense.fc cut by outputs over 3 ranks, scheme c: " in header
        for header in headers
    ] == [False] * (1 + FULL) + [True]
    assert all("; updated 4 times a step; " in header for header in headers)
    assert python(["-m", "hvdtrain", "evaluate", str(tmp_path / "many")]).returncode == DONE


@slow
@needs_mpirun
def test_16_bit_types_learn_with_a_dense_part_over_ranks(tmp_path: Path) -> None:
    """As one process learns in 32 bits."""
    losses = {}
    words = [
        "optim.name=adam",
        "optim.base_lr=0.02",
        "batch.size=64",
        "stop.steps=60",
        "data.sampling=partition",
    ]
    for name, kind in (("bf16", "float32 and bfloat16"), *[("fp16", "float32 and float16")] * FULL):
        run = tmp_path / name
        train(2, [f"speed.precision={name}", f"run={run}", *words, "parallel.dense=b"])
        assert f" torch {kind} on cpu" in events(run, "start")[-1]["model"]
        losses[name] = events(run, "epoch")[-1]["val_loss"]
    train(1, [f"run={tmp_path / 'one'}", *words])
    exact = events(tmp_path / "one", "epoch")[-1]["val_loss"]
    assert exact < 1.5
    for loss in losses.values():
        assert loss == pytest.approx(exact, rel=0.03) and abs(loss - exact) > 1e-6 * exact


def test_a_model_without_a_dense_part_is_refused() -> None:
    config = configure(None, ["model.name=mlp", "parallel.dense=a"])
    task = without_statistics((8, 8, 1), 10)
    with pytest.raises(UserError, match="MLP has no attribute `dense_part`") as caught:
        build_learner(config, task, SingleProcessCommunicator())
    assert "parallel.dense" in caught.value.where and "convnet, alexnet" in str(caught.value.fix)


def test_a_task_whose_samples_weigh_differently_has_one_update_a_step() -> None:
    class Weighted(Classification):
        sample_weight = None

    task = Weighted((8, 8, 1), 10, np.zeros(1), np.ones(1))
    config = configure(None, ["model.name=convnet", "parallel.dense=c", "parallel.dense_updates=2"])
    with pytest.raises(
        UserError,
        match="the samples of this task have different weights, so the weight of a turn is unknown",
    ) as caught:
        build_learner(config, task, SingleProcessCommunicator())
    assert (
        "parallel.dense_updates" in caught.value.where
        and caught.value.fix == "parallel.dense_updates=1"
    )
