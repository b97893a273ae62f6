"""plan --faults: the simulation against the closed formulas, and the table."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from plan_command import without_data

from hvdtrain.errors import UserError
from hvdtrain.extras.plan.command import plan
from hvdtrain.extras.plan.faults import (
    RANKS,
    FaultTimes,
    goodputs,
    last_checkpoints_formula,
    mtbf_of,
    read_fault_times,
    restarts_formula,
    shrink_formula,
    simulate_last_checkpoints,
    simulate_restarts,
    simulate_shrink,
)
from hvdtrain.training.checkpoint.optimal_interval import optimal_interval_s

DATA = [*without_data(1000, "8x8x1", 10), "framework=numpy", "model.name=linear"]


@pytest.mark.parametrize(
    ("every_s", "cost_s", "mtbf_s", "down_s"),
    [(100, 5, 3600, 60), (600, 60, 3600, 900), (3600, 60, 1800, 60)],
)
@pytest.mark.parametrize("seed", range(3))
def test_restarts_are_as_the_formula_says(
    every_s: float, cost_s: float, mtbf_s: float, down_s: float, seed: int
) -> None:
    """Exact in expectation; four standard errors of ten groups of 2,000 faults."""
    random = Random(seed)
    groups = [simulate_restarts(every_s, cost_s, mtbf_s, down_s, random, 2000) for _ in range(10)]
    mean = sum(groups) / 10
    error = (sum((group - mean) ** 2 for group in groups) / 90) ** 0.5
    assert abs(mean - restarts_formula(every_s, cost_s, mtbf_s, down_s)) < 4 * error < 0.02


@pytest.mark.parametrize("mtbf_s", [40.0, 3600.0])
def test_last_checkpoints_are_as_the_formula_says(mtbf_s: float) -> None:
    """Exact in expectation; four standard errors of ten groups of 2,000 faults."""
    random = Random(1)
    times = FaultTimes(sync_s=30.0, checkpoint_s=3.0)
    groups = [simulate_last_checkpoints(times, mtbf_s, 100.0, random, 2000) for _ in range(10)]
    mean = sum(groups) / 10
    error = (sum((group - mean) ** 2 for group in groups) / 90) ** 0.5
    assert abs(mean - last_checkpoints_formula(times, mtbf_s, 100.0)) < 4 * error < 0.02


@pytest.mark.parametrize("ranks", [8, 512, 8192])
def test_shrinking_is_as_the_formula_says(ranks: int) -> None:
    times = FaultTimes(repair_s=36000.0)
    every_s = optimal_interval_s(times.checkpoint_s, mtbf_of(times, ranks))
    simulated = simulate_shrink(times, ranks, every_s, Random(1))
    assert simulated == pytest.approx(shrink_formula(times, ranks, every_s), abs=5e-4)
    # ten hours without a rank are seen
    assert shrink_formula(times._replace(repair_s=0.0), ranks, every_s) - simulated > 1e-4


def test_what_helps_when() -> None:
    """The same seed gives the same table; more ranks lose more, and each way is better than stop
    under launch --elastic."""
    rows = goodputs(FaultTimes())
    assert rows == goodputs(FaultTimes()) and [row.ranks for row in rows] == list(RANKS)
    for row in rows:
        assert (
            0
            < row.stop
            < row.elastic
            < min(row.restart, row.shrink)
            <= max(row.restart, row.shrink)
            < 1
        )
    assert [row.restart for row in rows] == sorted((row.restart for row in rows), reverse=True)


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        plan(
            [
                *DATA,
                "--faults",
                "restart_s=60,seed=2",
                "--json",
                str(tmp_path / "plan.json"),
                "--ranks",
                "8",
                "epochs=1",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "share of time that moves the job" in out and "restart_s=60" in out and " 8,192 " in out
    found = json.loads((tmp_path / "plan.json").read_text())["faults"]
    assert found["times"]["restart_s"] == 60 and [row["ranks"] for row in found["rows"]] == list(
        RANKS
    )
    assert plan([*DATA, "--ranks", "8", "--faults", "epochs=1"]) == 0
    for words, message in (
        ("restrat=1", "--faults has no 'restrat'"),
        ("lost_speed=8.5", "lost_speed=8.5 leaves no speed to 8 ranks"),
    ):
        with pytest.raises(UserError, match=message):
            plan([*DATA, "--ranks", "8", "--faults", words])


def test_a_start_that_is_never_over_before_the_next_fault() -> None:
    """It is as long as the exponential of 24 hours over 26 seconds: no draw would end."""
    for row in goodputs(FaultTimes(requeue_s=86400.0, rank_mtbf_hours=1.0, lost_speed=8.0)):
        assert (
            all(0 <= value < 1 for value in (row.stop, row.elastic, row.restart, row.shrink))
            and row.stop < 1e-3
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "restrat_s=3",
            "--faults has no 'restrat_s'\n  where: --faults\n  fix: did you mean restart_s",
        ),
        ("restart_s=soon", "restart_s=soon is not a number"),
        ("rank_mtbf_hours=0", "rank_mtbf_hours=0 is out of range"),
        ("detect_s=-1", "detect_s=-1 is out of range"),
    ],
)
def test_bad_times(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_fault_times(text)
