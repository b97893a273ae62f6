"""plan: its options in --help, the plan as JSON, and jobs that it refuses as training does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plan_command import planned, refused, without_data

from hvdtrain.__main__ import main

DATA = without_data(96, "8x8x1", 10)
PLAN = ["plan", "--ranks", "2,3,5000", *DATA, "model.name=linear", "epochs=2"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(arguments) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """192 samples in steps of 32, the last rate of a cosine: lr (1 + cos(pi 5 / 6)) / 2."""
    recipe = ["batch.size=32", "optim.base_lr=0.5", "recipe.schedule=cosine"]
    plan = printed(capsys, *PLAN, "--json", *recipe)
    assert plan["data"] == {
        "samples": 96,
        "shape": [8, 8, 1],
        "classes": 10,
        "from": "by --samples, --image and --classes; no data is read",
    }
    assert (
        plan["model"]["shapes"] == {"weight": [10, 64], "bias": [10]}
        or plan["model"]["parameters"] == 650
    )
    assert plan["memory_bytes"]["weights"] == 4 * 650
    two, three, many = plan["forecasts"]
    assert (two["ranks"], two["steps"], two["epochs"]) == (2, 6, 2.0)
    assert two["batches"] == [
        {
            "batch": 32,
            "first_step": 0,
            "steps": 6,
            "samples_per_rank": [16, 16],
            "forward_passes": 1,
        }
    ]
    assert three["batches"][0]["samples_per_rank"] == [10, 11]
    assert two["first_step"] == {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.0, "batch": 32}
    assert two["last_step"]["lr"] == pytest.approx(0.5 * (1 - 3**0.5 / 2) / 2)
    assert many["impossible"]["what"].startswith("batch 32 does not split over 5000 ranks")
    assert main([*PLAN, "--json", str(tmp_path / "plan"), *recipe]) == 0
    assert (
        json.loads((tmp_path / "plan").read_text()) == plan
        and "nothing is trained" in capsys.readouterr().out
    )
    assert main([*PLAN, "--json", str(tmp_path / "no/plan")]) == 2


def test_the_momentum_of_a_class_of_torch_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    plan = printed(capsys, *PLAN, "optim.name=torch.optim.RMSprop", "--json")
    assert (
        plan["forecasts"][0]["first_step"]["momentum"] is None
        and plan["memory_bytes"]["optimizer_state"] is None
    )


def test_a_folder_is_not_taken_for_the_file_of_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--json", str(tmp_path)]) == 2
    assert f"{tmp_path.name} is a folder, and --json takes it for" in capsys.readouterr().err


def test_the_help_of_a_plan_names_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help"]) == 0
    page = capsys.readouterr().out
    options = (
        "--config",
        "--ranks",
        "--json",
        "--png",
        "--samples",
        "--image",
        "--classes",
        "--all",
    )
    assert all(option in page for option in options)


def test_plan_refuses_what_training_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    data = [*without_data(100, "8x8x1", 10), "--ranks", "1"]
    for words, what in (
        (["optim.name=os.getcwd"], "os.getcwd(...) is not a subclass of torch.optim.Optimizer"),
        (
            ["optim.name=builtins.dict"],
            "builtins.dict(...) is not a subclass of torch.optim.Optimizer",
        ),
        (["optim.name=torch.optim.LBFGS"], "torch.optim.LBFGS needs a closure"),
        (
            ["optim.name=torch.optim.SGD", "optim.nesterov=true"],
            "Nesterov momentum requires a momentum",
        ),
        (["optim.name=torch.optim.Adam", "optim.lr=1"], "optim.lr is not an option"),
    ):
        assert what in refused(capsys, *data, *words)
    words = ["optim.name=torch.optim.SGD", "optim.nesterov=true", "optim.momentum=0.9"]
    assert planned(capsys, *data, *words)


def test_a_plan_names_the_rows_that_a_conflict_concerns(capsys: pytest.CaptureFixture[str]) -> None:
    shape = [*without_data(960, "8x8x3", 10), "model.name=mlp"]
    lines = planned(capsys, "--ranks", "2,3,4", "comm.op=adasum", *shape)
    rows = [line for line in lines if "needs 2, 4, 8, ... ranks" in line]
    assert len(rows) == 1 and rows[0].split()[0] == "3", rows
