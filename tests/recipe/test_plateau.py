"""recipe.schedule=plateau: its rates equal those of torch's ReduceLROnPlateau after the same
evaluations, in a job and after a resume."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from hvdtrain.__main__ import main
from hvdtrain.config.read import configure
from hvdtrain.core.progress import Hyper, Progress
from hvdtrain.errors import UserError
from hvdtrain.recipe.from_config import recipe_from_config
from hvdtrain.recipe.plateau import Plateau
from hvdtrain.recipe.summary import lr_summary
from hvdtrain.training.checkpoint import files
from hvdtrain.training.conflicts import refuse_conflicts

RATE = 0.5


def scheduled(
    mode: str, **words: Any
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode, **words)


@pytest.mark.parametrize("better", ["min", "max"])
@pytest.mark.parametrize(
    ("words", "torchs"),
    [
        ("", {}),
        ("recipe.patience=0 recipe.gamma=0.3", {"patience": 0, "factor": 0.3}),
        (
            "recipe.patience=1 recipe.cooldown=3 recipe.gamma=0.5",
            {"patience": 1, "cooldown": 3, "factor": 0.5},
        ),
        (
            "recipe.patience=2 recipe.threshold=0.1 recipe.gamma=0.7",
            {"patience": 2, "threshold": 0.1, "factor": 0.7},
        ),
        (
            "recipe.patience=1 recipe.threshold=0.05 recipe.threshold_mode=abs recipe.end_lr=0.02",
            {"patience": 1, "threshold": 0.05, "threshold_mode": "abs", "min_lr": 0.02},
        ),
    ],
)
def test_rates_are_those_of_torch(better: Any, words: str, torchs: dict[str, Any]) -> None:
    """200 values around a curve that becomes flat, some of them no numbers; the state goes through
    JSON after each."""
    rng = np.random.default_rng(len(words))
    values = np.exp(-np.arange(200) / 15) + rng.normal(0, 0.02, 200) + 0.3
    values = values if better == "min" else -values
    values[rng.integers(0, 200, 5)] = math.nan
    recipe = recipe_from_config(
        configure(None, f"optim.base_lr={RATE} recipe.schedule=plateau {words}".split()), 100, 0.9
    )
    optimizer, scheduler = scheduled(better, **torchs)
    state = Plateau()
    rates = []
    expected = []
    for epoch, value in enumerate(map(float, values), start=1):
        state = Plateau(
            *json.loads(
                json.dumps(
                    recipe.judge(state, Progress(100, 10**6, epoch, 100 * epoch), value, better)
                )
            )
        )
        rates.append(
            recipe.after_evaluations(recipe.at(Progress(100, 10**6, epoch, 100 * epoch)), state).lr
        )
        scheduler.step(value)
        expected.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx(expected, rel=1e-12)
    assert len(set(expected)) > 2


def test_evaluations_before_the_end_of_the_warmup_do_not_count() -> None:
    recipe = recipe_from_config(
        configure(None, ["recipe.schedule=plateau", "recipe.patience=0", "recipe.warmup=2"]),
        100,
        0.9,
    )
    state = Plateau()
    for samples, share in ((100, 1.0), (199, 1.0), (200, 1.0), (300, 0.1)):
        state = recipe.judge(state, Progress(100, 10**6, 1, samples), 0.5, "max")
        assert state.share == share
    other = recipe_from_config(configure(None, []), 100, 0.9)
    assert other.judge(state, Progress(100, 10**6), 0.5, "max") == state, (
        "no other schedule looks at evaluations"
    )
    assert other.after_evaluations(Hyper(0.3, 0, 0, 1), state).lr == 0.3


JOB = [
    "model.name=linear",
    "optim.base_lr=0.5",
    "batch.size=100",
    "speed.precision=fp64",
    "stop.steps=40",
    "evaluate.every_steps=4",
]
JOB += [
    "recipe.schedule=plateau",
    "recipe.patience=1",
    "recipe.gamma=0.5",
    "recipe.threshold=0.01",
    "log.every_steps=1",
]
JOB += ["checkpoint.every_steps=1", "checkpoint.keep_last=50"]


def read(run: str, kind: str) -> list[dict[str, Any]]:
    return [
        event
        for event in map(json.loads, Path(run, "events.jsonl").read_text().splitlines())
        if event["kind"] == kind
    ]


def test_a_job_has_these_rates_and_resumes_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped between two evaluations, with bad ones counted. torch's scheduler gets what the job's
    evaluations were."""
    monkeypatch.chdir(tmp_path)
    assert main([*JOB, "run=straight"]) == 0
    values = {event["step"]: event["val_accuracy"] for event in read("straight", "epoch")}
    optimizer, scheduler = scheduled("max", patience=1, factor=0.5, threshold=0.01)
    expected = []
    for step in range(40):
        if step in values:
            scheduler.step(values[step])
        expected.append(optimizer.param_groups[0]["lr"])
    assert [event["lr"] for event in read("straight", "step")] == pytest.approx(expected, rel=1e-12)
    assert len(set(expected)) > 2
    # an evaluation came before it
    first = next(step for step in range(40) if expected[step] < RATE)
    for left in (first - 5, first):
        shutil.copytree("straight", f"from-{left}")
        for folder in files.finished(Path(f"from-{left}"))[left:]:
            shutil.rmtree(folder)
        assert main([*JOB, f"run=from-{left}"]) == 0
        resumed = read(f"from-{left}", "step")[40:]
        assert [(event["step"], event["lr"]) for event in resumed] == [
            (event["step"], event["lr"]) for event in read("straight", "step")[left:]
        ]
        ends = [
            load_file(files.finished(Path(run))[-1] / "weights.safetensors")
            for run in ("straight", f"from-{left}")
        ]
        assert all(np.array_equal(array, ends[1][name]) for name, array in ends[0].items())
    assert main([*JOB, "run=straight", "stop.steps=50", "evaluate.every_steps=5"]) == 2, (
        "evaluations are a part of what is learned"
    )
    assert (
        "straight contains another job: evaluate.every_steps is 4 there, 5 here"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (
            "recipe.schedule=plateau recipe.gamma=1",
            "multiplies the rate by recipe.gamma=1, which does not lower it",
        ),
        ("recipe.patience=3", "recipe.patience needs recipe.schedule=plateau; it is constant"),
        ("recipe.threshold_mode=abs", "recipe.threshold_mode needs recipe.schedule=plateau"),
    ],
)
def test_what_is_refused(words: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        refuse_conflicts(configure(None, words.split()), "mpi", 2)


def test_the_line_of_the_header() -> None:
    config = configure(
        None, ["optim.base_lr=0.5", "recipe.schedule=plateau", "recipe.end_lr=0.001"]
    )
    assert (
        lr_summary(config, 100)
        == "lr 0.5, then x 0.1 after more than 10 evaluations in a row without a better one, down "
        "to 0.001"
    )
