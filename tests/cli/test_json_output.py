"""--json: with a file, with -, and without a value; the plan as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.__main__ import main
from hvdtrain.cli.output import with_json_value

PLAN = [
    "plan",
    "--ranks",
    "2,3,5000",
    "--samples",
    "96",
    "--image",
    "8x8x1",
    "--classes",
    "10",
    "model.name=linear",
    "epochs=2",
]


@pytest.mark.parametrize(
    ("arguments", "completed"),
    [
        ("--json", "--json -"),
        ("--json epochs=1", "--json - epochs=1"),
        ("--json --ranks 2", "--json - --ranks 2"),
        ("--json - epochs=1", "--json - epochs=1"),
        ("--json file epochs=1", "--json file epochs=1"),
        ("--json=file", "--json=file"),
        ("tests --json", "tests --json -"),
        ("epochs=1 --json", "epochs=1 --json -"),
        ("", ""),
    ],
)
def test_a_json_without_a_value_is_the_standard_output(arguments: str, completed: str) -> None:
    assert with_json_value(arguments.split()) == completed.split()


@pytest.mark.parametrize(
    "arguments", [["--json", "RUN"], ["--json=RUN"], ["--json", "RUN", "epochs=1"]]
)
@pytest.mark.parametrize("command", ["evaluate", "plan", "check", "bench step"])
def test_a_folder_is_not_taken_for_the_file(
    command: str, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [argument.replace("RUN", str(tmp_path)) for argument in arguments]
    assert main([*command.split(), *words]) == 2
    said = capsys.readouterr()
    fix = "where: --json\n  fix: a file: --json=FILE; or --json - for the standard output"
    assert (
        f"{tmp_path.name} is a folder, and --json takes it for its FILE\n  {fix}" in said.err
        and not said.out
    )


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


def test_a_check_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    report = printed(
        capsys, "check", "--json", "framework=numpy", "model.name=linear", "comm.engine=single"
    )
    assert report["exit_code"] == 0 and len(report["ranks"]) == 1
