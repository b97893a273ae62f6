"""bench scaling: its jobs, the efficiency and the predictions of a study by hand, and real ones."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from ranks import needs_mpirun, python

from hvdtrain.errors import UserError
from hvdtrain.extras.bench.command import bench
from hvdtrain.extras.bench.cost_model import Cluster, StepModel
from hvdtrain.extras.bench.scaling import report
from hvdtrain.extras.bench.scaling.command import plan_jobs, step_seconds
from hvdtrain.extras.bench.scaling.figure import draw_scaling
from hvdtrain.extras.bench.scaling.report import (
    ScalingTrial,
    Study,
    curves,
    efficiency,
    predictions,
)
from hvdtrain.extras.plan.meshes.link import Link

BENCH = ["-m", "hvdtrain.extras.bench.command"]


def test_options_and_their_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        UserError, match="there is no bench scalling\n.*\n  fix: did you mean scaling?"
    ):
        bench(["scalling"])
    with pytest.raises(UserError, match="'0' is not a count"):
        bench(["scaling", "--steps", "0"])
    with pytest.raises(UserError, match="cannot read the link 'fast'"):
        bench(["scaling", "--links", "fast"])
    assert bench(["--help"]) == 0 and "--per-node 8" in capsys.readouterr().out


def test_seconds_of_steps() -> None:
    """100 images at 50/s are 2 s a step; the first sync point and other events are dropped."""
    events = [
        {"kind": "start"},
        *({"kind": "step", "batch": 100, "samples_per_s": rate} for rate in (1, 50, 25)),
        {"kind": "end"},
    ]
    assert step_seconds([json.dumps(event) for event in events]) == [2.0, 4.0]
    with pytest.raises(
        UserError, match="the job has 1 sync point, and the steps before the first one are warm-up"
    ):
        step_seconds([json.dumps(event) for event in events[:2]])


def study(cores: int = 2) -> Study:
    """Half a second for 8 samples, on two ranks 0.625 s; nothing hidden of a link of 0.05 s a
    message and no end of bandwidth."""
    trials = [
        ScalingTrial("weak", 1, 8, [0.4, 0.5, 0.6]),
        ScalingTrial("weak", 2, 16, [0.625] * 3),
        ScalingTrial("strong", 1, 8, [0.5]),
        ScalingTrial("strong", 4, 8, [0.25]),
    ]
    link = Link("lan", 0.05, 1e12)
    model = StepModel(0.1, 0.05, 0.0, 1.0)
    return Study(
        trials=trials,
        model=model,
        step_errors=[0.01, -0.03],
        link=link,
        link_errors=[],
        cluster=Cluster(link, link, 8),
        buckets=[8.0],
        cores=cores,
        threads="1",
    )


def test_efficiency_and_prediction() -> None:
    found = study()
    assert [efficiency(trial, found.trials) for trial in found.trials] == pytest.approx(
        [1.0, 0.8, 1.0, 0.5]
    )
    rows = {(row.kind, row.algorithm, row.ranks): row for row in predictions(found, [8, 16])}
    assert ("strong", "ring", 8) in rows and ("strong", "ring", 16) not in rows, (
        "16 ranks have no 8 samples"
    )
    weak = rows["weak", "ring", 8]
    assert weak.step_s == pytest.approx(0.5 + 14 * 0.05) and weak.efficiency == pytest.approx(
        0.5 / 1.2
    )
    tree8 = rows["strong", "tree", 8]
    assert tree8.step_s == pytest.approx(0.15 + 6 * 0.05) and tree8.efficiency == pytest.approx(
        0.5 / 8 / 0.45
    )


def test_text_and_json_of_scaling() -> None:
    lines = report.to_text(study())
    assert lines[4].split() == [
        "weak",
        "2",
        "16",
        "3",
        "625",
        "ms",
        "625",
        "ms",
        "..",
        "625",
        "ms",
        "26",
        "80.0%",
    ]
    assert any("OVERSUBSCRIBED" in line for line in lines) and any(
        "4 ranks on 2 cores" in line for line in lines
    )
    assert not any("OVERSUBSCRIBED" in line for line in report.to_text(study(cores=4)))
    assert "error   steps left out of the fit: median 2.0%, largest 3.0%, n = 2" in lines
    assert "error   allreduces: unknown, there are too few points to leave one out" in lines
    result = json.loads(json.dumps(report.to_json(study())))
    assert [trial["efficiency"] for trial in result["trials"]] == pytest.approx(
        [1.0, 0.8, 1.0, 0.5]
    )
    assert result["predictions"][0]["ranks"] == 8 and result["fleet"]["per_node"] == 8


def test_a_link_whose_times_give_no_latency_is_said_to_be_too_noisy() -> None:
    def warned(link: Link) -> bool:
        return any(
            "too noisy for a latency" in line
            for line in report.to_text(study()._replace(link=link))
        )

    assert warned(Link("measured", 0.0, 1e9))
    assert not warned(Link("measured", 1e-6, 1e9)) and not warned(Link("none", 0.0, math.inf)), (
        "none: one rank"
    )


def test_picture(tmp_path: Path) -> None:
    title, lines = curves(study(), "mlp")
    assert [line.label for line in lines if line.panel == "weak"][:2] == [
        "measured",
        "ring",
    ] and title.startswith("mlp: lan 50.0 ms")
    assert lines[0].ranks == [1, 2] and lines[0].efficiency == pytest.approx([1.0, 0.8])
    assert draw_scaling(tmp_path / "a.png", title, lines) == f"picture: {tmp_path}/a.png"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="cannot write the picture"):
        draw_scaling(tmp_path / "none/a.png", title, lines)


@needs_mpirun
@pytest.mark.slow
def test_scaling_of_real_jobs(tmp_path: Path) -> None:
    words = [
        "framework=numpy",
        "model.name=linear",
        "data.name=synthetic",
        "data.shape=[4,4,1]",
        "data.samples=200",
        "data.val_samples=20",
    ]
    words += ["batch.size=8", "comm.engine=mpi", f"run={tmp_path}/never"]
    result = python(
        [
            *BENCH,
            "scaling",
            "--ranks",
            "2",
            "--weak",
            "--steps",
            "12",
            "--repeat",
            "2",
            "--json",
            f"{tmp_path}/study.json",
            *words,
        ]
    )
    assert result.returncode == 0, result
    study = json.loads((tmp_path / "study.json").read_text())
    assert [(trial["kind"], trial["ranks"], trial["batch"]) for trial in study["trials"]] == [
        ("weak", 2, 8)
    ]
    assert all(
        len(trial["seconds"]) == 10 and min(trial["seconds"]) > 0 for trial in study["trials"]
    ), "twice six sync points, less the first"
    assert study["buckets"] == [170 * 4.0], "16 x 10 weights and 10 biases"
    assert study["link"]["latency_s"] >= 0, (
        "0 where the times of a busy machine are too noisy for a latency"
    )
    assert study["link"]["bytes_per_s"] > 0
    assert ("too noisy for a latency" in result.stdout) == (study["link"]["latency_s"] == 0)
    assert not (tmp_path / "never").exists()


def test_planned_jobs() -> None:
    """Weak: 8 for each rank; strong: 8 in all; alone: the share of a rank of 2 and of 4. No job
    where a rank would have no sample."""
    assert plan_jobs(["weak", "strong"], [1, 2, 4], 8) == [
        *(("weak", 1, 8), ("weak", 2, 16), ("weak", 4, 32)),
        *(("strong", 1, 8), ("strong", 2, 8), ("strong", 4, 8)),
        *(("alone", 1, 4), ("alone", 1, 2)),
    ]
    assert plan_jobs(["strong"], [1, 16], 8) == [("strong", 1, 8)]
    assert plan_jobs(["weak"], [2, 4], 9) == [("weak", 2, 8), ("weak", 4, 16)], (
        "4 for each of two; alone only where a job has one rank"
    )
    with pytest.raises(UserError, match="batch 3 has no sample for each of 4 ranks"):
        plan_jobs(["weak"], [4], 3)


@needs_mpirun
def test_scaling_reports_a_job_that_fails() -> None:
    words = [
        "framework=numpy",
        "model.name=linear",
        "data.root=/nowhere",
        "data.name=mnist",
        "data.download=false",
    ]
    result = python([*BENCH, "scaling", "--ranks", "1", *words])
    assert result.returncode != 0 and "/nowhere" in result.stderr
    result = python(
        [*BENCH, "scaling"],
        env={"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    )
    assert (
        result.returncode != 0
        and "this is already rank 1 of 2, and bench scaling starts ranks itself" in result.stderr
    )
    result = python(
        [
            *BENCH,
            "scaling",
            "--ranks",
            "1",
            "--limit",
            "0.3",
            "framework=numpy",
            "model.name=linear",
            "data.name=digits",
        ]
    )
    assert result.returncode != 0 and "the job on 1 rank did not end within 0.3 s" in result.stderr
