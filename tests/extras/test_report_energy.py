"""The joules that a report shows: which hardware they count, and a counter that failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvdtrain.extras.report.measures import summary
from hvdtrain.records.run import RunRecord


def run_record(*events: dict[str, Any], **energy: str) -> RunRecord:
    return RunRecord(
        Path("run"), {}, [{"time": 0.0, "kind": "start", "step": 0, "energy": energy}, *events]
    )


def epoch(kinds: dict[str, float], images: int) -> dict[str, Any]:
    """An hour at so many images; its joules by kind."""
    of_one = {"joules_per_sample": sum(kinds.values()) / images} if kinds else {}
    return {
        "time": 1.0,
        "kind": "epoch",
        "step": 1,
        "samples_per_s": images / 3600,
        "epoch_s": 3600.0,
        "joules": kinds,
        **of_one,
    }


def test_a_counter_that_failed_is_named_in_the_report() -> None:
    failed = "a counter failed during the job"
    assert (
        summary.energy_summary(run_record(epoch({}, 10), cpu=""))
        == f"not measured: processors: {failed}"
    )
    assert summary.energy_summary(run_record(epoch({}, 10), cpu="", gpu="x")) in (
        f"not measured: processors: {failed}; GPUs: x",
    )
    both = epoch({"gpu": 30.0, "cpu": 60.0}, 10)
    left = epoch({"gpu": 50.0}, 10)
    assert (
        summary.energy_summary(run_record(both, left, cpu="", gpu=""))
        == f"5 J (GPUs); not measured: processors: {failed}"
    )
    ended = {
        "time": 2.0,
        "kind": "end",
        "step": 2,
        "joules": {"gpu": 80.0},
        "joules_per_sample": 4.0,
    }
    assert (
        summary.energy_summary(run_record(both, both, ended, cpu="", gpu=""))
        == f"4 J (GPUs); not measured: processors: {failed}"
    )
    again = {"time": 1.5, "kind": "start", "step": 1, "energy": {"cpu": ""}}
    other = "not measured: processors: not counted in every start of the job"
    assert (
        summary.energy_summary(
            run_record(
                {**ended, "joules": {}, "joules_per_sample": None}, again, epoch({}, 10), cpu="x"
            )
        )
        == other
    )


def test_joules_per_image_while_a_job_runs_are_joules_by_images() -> None:
    """90 J for 30 images and 50 for 10: 140 / 40 = 3.5, not the mean of 3 and 5."""
    assert summary.joules_per_sample(
        run_record(epoch({"cpu": 90.0}, 30), epoch({"cpu": 50.0}, 10), cpu="")
    ) == pytest.approx(3.5)
