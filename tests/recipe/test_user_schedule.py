"""Schedules over the whole job: the user's own function, and one_cycle beside torch's
OneCycleLR."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hvdtrain
from hvdtrain.config.read import configure
from hvdtrain.core.progress import Progress
from hvdtrain.errors import UserError
from hvdtrain.recipe.from_config import recipe_from_config

JOB = (
    "model.name=linear epochs=2 batch.size=60 batch.evaluate=90 optim.base_lr=0.5 "
    "speed.precision=fp64 log.every_steps=1 log.display=lines"
)
STEPS = 48


def rates(run: Path) -> dict[int, float]:
    found = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {event["step"]: event["lr"] for event in found if event["kind"] == "step"}


def falls(done: float) -> float:
    """A schedule of the user's: its square root."""
    return (1 - done) ** 0.5


def test_one_cycle_is_that_of_torch() -> None:
    """Whose last step is one before total_steps, and whose peak is one before pct_start of them."""
    steps = 200
    peak = 0.4
    words = (
        "recipe.schedule=one_cycle recipe.cycle_momentum=[0.85,0.95] batch.size=10 "
        f"optim.base_lr={peak} epochs=2"
    )
    recipe = recipe_from_config(configure(None, words.split()), 10 * steps // 2, 0.9)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, peak, total_steps=steps + 1, pct_start=(0.3 * steps + 1) / (steps + 1)
    )
    progress = Progress(10 * steps // 2, 10 * steps)
    for _ in range(steps):
        hyper = recipe.at(progress)
        group = optimizer.param_groups[0]
        assert hyper.lr == pytest.approx(
            group["lr"], rel=1e-12
        ) and hyper.momentum == pytest.approx(group["momentum"], rel=1e-12)
        optimizer.step()
        scheduler.step()
        progress = progress.advance(10)
    assert recipe.at(progress).lr == pytest.approx(peak / 25e4, rel=1e-9)


def test_a_function_gives_the_factor_of_each_step(tmp_path: Path, capsys: Any) -> None:
    """From a script, by import path, and resumed; after a warm-up."""
    expected = {step: 0.5 * falls(60 * (step - 1) / 2874) for step in range(1, STEPS + 1)}
    run = hvdtrain.train({"run": str(tmp_path / "given")}, *JOB.split(), schedule=falls)
    assert rates(run.folder) == pytest.approx(expected, rel=1e-12)
    assert "lr 0.5 x falls(share of the job)" in capsys.readouterr().out
    by_path = "recipe.function=test_user_schedule:falls"
    for steps in (20, 1000):
        run = hvdtrain.train(
            {"run": str(tmp_path / "named"), "stop.steps": steps},
            *JOB.split(),
            by_path,
            "recipe.warmup=5steps",
        )
    found = rates(run.folder)
    assert {step: found[step] for step in found if step > 20} == pytest.approx(
        {s: expected[s] for s in expected if s > 20}, rel=1e-12
    )
    assert found[1] == 0 and found[3] == pytest.approx(2 / 5 * 0.5 * falls(120 / 1200), rel=1e-6)


def test_a_run_with_a_schedule_of_a_script_goes_on_with_it(tmp_path: Path) -> None:
    run = hvdtrain.train(
        {"run": str(tmp_path / "run"), "stop.steps": 20}, *JOB.split(), schedule=falls
    )
    with pytest.raises(UserError, match="is an object that only its script defines"):
        hvdtrain.train(f"resume={run.folder}", "stop.steps=30")
    more = hvdtrain.train(f"resume={run.folder}", "stop.steps=30", schedule=falls)
    assert more.steps == 30


@pytest.mark.parametrize(
    ("words", "schedule", "what"),
    [
        ("", 3, "schedule is a int"),
        ("", lambda done: -1.0, "the schedule returns -1.0 after 0 of the job"),
        ("", lambda done: "high", "the schedule returns 'high' after 0 of the job"),
        (
            "recipe.schedule=cosine",
            falls,
            "recipe.function and recipe.schedule=cosine both set the schedule",
        ),
        ("epochs=null stop.time=5s", falls, "ends it, at an unknown step"),
        ("recipe.function=os:nice", None, "os:nice is part of Python"),
        ("recipe.schedule=one_cycle recipe.warmup=1", None, "one_cycle has its own warm-up"),
        ("recipe.cycle_momentum=[0.8,0.9]", None, "needs recipe.schedule=one_cycle"),
        (
            "recipe.schedule=one_cycle recipe.cycle_momentum=[0.9,0.8]",
            None,
            r"recipe.cycle_momentum is \[0.9, 0.8\]",
        ),
        (
            "recipe.schedule=one_cycle recipe.cycle_momentum=[0.8,0.9] optim.momentum=0.9",
            None,
            "both set the momentum",
        ),
    ],
)
def test_what_is_refused(words: str, schedule: Any, what: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=what):
        hvdtrain.train(
            {"run": str(tmp_path / "run")}, *JOB.split(), *words.split(), schedule=schedule
        )
