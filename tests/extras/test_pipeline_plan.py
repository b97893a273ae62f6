"""plan --pipeline: cuts and shares of waiting, against those that follow from the seconds that it
shows, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from plan_command import planned, refused, without_data
from ranks import needs_extra

pytestmark = needs_extra("plan")

# 6 units
MLP = ["data.name=digits", "model.name=mlp", "model.widths=[500,8]", "batch.size=48", "--pipeline"]
UNITS = ["flatten", "fc1", "relu1", "fc2", "relu2", "head"]


def test_cuts_and_shares_follow_from_the_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["parallel.pipeline=2", "parallel.micro_batches=3", "parallel.balance=5,1"]
    (found,) = json.loads("".join(planned(capsys, *MLP, *job, "--json", "-")))["pipelines"]
    units = found["units"]
    seconds = [unit["forward"] + unit["backward"] for unit in units]
    assert [unit["name"] for unit in units] == UNITS and min(seconds) > 0
    assert [unit["operations"] for unit in units] == [
        0,
        2 * 16 * 64 * 500,
        0,
        2 * 16 * 500 * 8,
        0,
        2 * 16 * 8 * 10,
    ]
    cuts = {cut["by"]: cut["units"] for cut in found["cuts"]}
    assert (
        list(cuts) == ["5,1", "operations", "seconds"]
        and cuts["5,1"] == [5, 1]
        and sum(cuts["operations"][:1]) in (2, 3)
    )
    first = cuts["seconds"][0]
    assert max(sum(seconds[:first]), sum(seconds[first:])) == min(
        max(sum(seconds[:n]), sum(seconds[n:])) for n in range(1, 6)
    )
    shares = {(each["micro"], each["schedule"], each["by"]): each for each in found["bubbles"]}
    assert {micro for micro, _, _ in shares} == {2, 3, 4, 8, 16} and {
        by for _, by, _ in shares
    } >= {"gpipe", "interleaved"}
    # the slower stage makes all its passes; each of the faster one's ends waits for one of them
    one = shares[3, "gpipe", "5,1"]
    forward, backward = (
        [sum(unit[kind] for unit in part) for part in (units[:5], units[5:])]
        for kind in ("forward", "backward")
    )
    step = (
        forward[0] + 2 * max(forward) + forward[1] + backward[1] + 2 * max(backward) + backward[0]
    )
    assert one["formula"] == 1 / 4 and one["measured_times"] == pytest.approx(
        1 - 3 * sum(seconds) / (2 * step)
    )


def test_the_lines_say_which_cut_is_the_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    said = "\n".join(planned(capsys, *MLP, "parallel.balance=seconds", "--ranks", "2,4"))
    two, four = said.split("mlp on a pipeline of ")[1:]
    assert two.startswith("2 ranks, 1f1b: 4 micro-batches of 12 samples\n") and four.startswith(
        "4 ranks, 1f1b: 8 micro-batches of 6 samples"
    )
    of_job, other = (line for line in two.splitlines() if line.startswith("cut by "))
    assert (
        of_job.startswith("cut by seconds: ")
        and of_job.endswith(" units, as this job")
        and other.endswith(" units")
    )
    assert (
        "1f1b*" in two
        and "m=4*" in two
        and "parallel.balance=seconds, as this job: no other cut" in two
    )
    assert "interleaved" in two and "interleaved" not in four, (
        "6 units cannot be divided into 8 stages"
    )
    bars = [len(bar) for bar in re.findall("#+", two)]
    assert len(bars) == 4 and max(bars[:2]) == 30 == max(bars[2:]), "the slowest stage of each cut"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--ranks", "1,2"], "a pipeline has 2 ranks or more"),
        (["--ranks", "7"], "a model of 6 units cannot be divided into 7 stages"),
        (
            ["parallel.pipeline=2", "parallel.balance=1,1,4"],
            "parallel.balance=[1, 1, 4] has 3 stages, but the pipeline has 2",
        ),
        (
            ["parallel.pipeline=2", "parallel.balance=5,2"],
            "parallel.balance=[5, 2] has 7 units, but the model has 6: flatten, fc1, relu1",
        ),
        (
            ["model.name=convnet", "model.widths=[2]"],
            "training changes the buffer norm1.running_var of Sequential",
        ),
        (
            ["model.name=wide_resnet", "model.widths=[2,2,2,2]"],
            "WideResNet does not define where it can be divided into stages",
        ),
    ],
)
def test_refusals(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in refused(capsys, *MLP, *arguments)


def test_units_that_work_in_place(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--pipeline", "--ranks", "2", "batch.size=8", *without_data(100, "8x8x1", 10)]
    model = ["model.name=convnet", "model.widths=[2,2]", "model.norm=false"]
    assert "cut by operations: " in "\n".join(planned(capsys, *words, *model))


@needs_extra("sample")
def test_a_job_that_draws_samples_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("abab" * 500)
    data = ["data.name=text", f"data.root={tmp_path / 'text.txt'}", "data.val_share=0.2"]
    model = ["model.name=gpt", "model.layers=1", "model.heads=1", "model.width=8", "batch.size=4"]
    words = ["--pipeline", "parallel.pipeline=2", "task.name=language", "log.samples=16"]
    assert "gpt on a pipeline of 2 ranks" in "\n".join(planned(capsys, *words, *data, *model))


def test_a_framework_without_stages_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--pipeline", "framework=numpy", "model.name=linear"]
    assert "framework=numpy" in refused(capsys, *words)
