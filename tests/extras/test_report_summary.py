"""Key figures of runs and comparisons of runs, against numbers worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from run_events import COMPLETE, CONFIG, end, epoch, record_of, start, step

from hvdtrain.extras.report import page_tables
from hvdtrain.extras.report.measures import summary
from hvdtrain.extras.report.measures.compare import changes_between_starts, scaling_comparisons
from hvdtrain.records.run import RunRecord


def test_a_complete_run_has_its_last_and_best_value() -> None:
    record = record_of(COMPLETE)
    assert (summary.best_value(record), summary.last_value(record)) == (0.7, 0.6)
    assert (summary.job_seconds(record), summary.epochs_done(record)) == (4.25, 2.0)


def test_a_loss_is_best_where_it_is_lowest() -> None:
    """Targets come with the easiest first, the largest."""
    losses = {"objective": "loss", "metrics": {"loss": {"better": "min"}}}
    targets = [{**end(step), "kind": "target", "target": 4 - step / 10} for step in (20, 10)]
    epochs = [epoch(1, 0.5, val_loss=2.5), epoch(2, 0.5, val_loss=1.25)]
    record = record_of([start(**losses), *epochs, *targets, epoch(3, 0.5, val_loss=1.5)])
    rows = dict(page_tables.summary_table([record], ["out"]).rows)
    assert (rows["best loss"], rows["last loss"]) == ("1.25", "1.5")
    assert [row[1] for row in page_tables.targets([record], ["out"]).rows] == ["3", "2"]


def test_speed_is_images_by_seconds() -> None:
    """100 images/s for 3 s and 400 for 1 s are 700 images in 4 s: 175, not 250. The end's own
    number comes first."""
    slow = epoch(1, 0.5, samples_per_s=100.0, epoch_s=3.0)
    fast = epoch(2, 0.5, samples_per_s=400.0, epoch_s=1.0)
    assert summary.samples_per_s(record_of([start(), slow, fast])) == 175.0
    assert (
        summary.samples_per_s(record_of([start(), slow, fast, end(20, samples_per_s=170.0)]))
        == 170.0
    )
    windows = [
        step(5, samples_per_s=100.0, window_s=3.0),
        step(10, samples_per_s=400.0, window_s=1.0),
    ]
    assert summary.samples_per_s(record_of([start(), *windows])) == 175.0
    assert math.isnan(summary.samples_per_s(record_of([start()])))


def test_tokens_per_second_are_those_of_the_end_or_of_all_epochs() -> None:
    epochs = [
        epoch(1, 0.5, tokens_per_s=1000.0, epoch_s=3.0),
        epoch(2, 0.5, tokens_per_s=4000.0, epoch_s=1.0),
    ]
    assert summary.tokens_per_s(record_of([start(), *epochs])) == 1750.0
    assert (
        summary.tokens_per_s(record_of([start(), *epochs, end(20, tokens_per_s=1700.0)])) == 1700.0
    )
    assert math.isnan(summary.tokens_per_s(record_of([start(), epoch(1, 0.5)])))


def test_the_energy_summary() -> None:
    both = record_of(
        [
            start(energy={"gpu": "", "cpu": "no counter"}),
            epoch(1, 0.5, joules_per_sample=2.0),
            epoch(2, 0.5, joules_per_sample=4.0),
        ]
    )
    assert summary.energy_summary(both) == "3 J (GPUs); not measured: processors: no counter"
    measured = record_of([start(energy={"gpu": "", "cpu": ""}), end(1, joules_per_sample=0.25)])
    assert summary.energy_summary(measured) == "0.25 J (GPUs and processors)"
    assert summary.energy_summary(record_of([start()])) == "not measured: processors: no counter"
    assert (
        summary.energy_summary(record_of([start(energy={"cpu": ""})]))
        == "not measured: no epoch has ended"
    )
    assert summary.energy_summary(record_of([start(energy=None)])) == "not recorded"


def test_the_slowest_rank() -> None:
    """Means of rank 3: (12 + 13) / 2 = 12.5; the median of 10, 9, 10, 12.5 is 10. The epoch on two
    ranks was before a resume."""
    rows = [[50.0, 50.0], [10.0, 9.0, 10.0, 12.0], [10.0, 9.0, None, 13.0]]
    record = record_of(
        [start(ranks=4), *(epoch(i, 0.5, rank_work_ms=row) for i, row in enumerate(rows, 1))]
    )
    assert summary.rank_work_ms(record) == [10.0, 9.0, 10.0, 12.5]
    assert (
        summary.straggler_summary(record)
        == "rank 3 on n2 is slowest: 12.5 ms of own work a step, median 10"
    )
    even = record_of([start(), epoch(1, 0.5, rank_work_ms=[10.0, 10.5])])
    assert (
        summary.straggler_summary(even)
        == "the ranks are even: rank 1 on n2 has 10.5 ms of own work a step, median 10.2"
    )
    assert (
        summary.straggler_summary(record_of([start(ranks=1), epoch(1, 0.5, rank_work_ms=[10.0])]))
        == ""
    )


def test_labels_of_runs() -> None:
    def of(*paths: str) -> list[str]:
        return summary.labels([RunRecord(Path(path), {}, []) for path in paths])

    assert of("/a/runs/mlp-1") == ["mlp-1"]
    assert of("/a/mlp-r1-s1", "/a/mlp-r1-s2", "/a/mlp-r4-s1") == ["r1-s1", "r1-s2", "r4-s1"]
    assert of("/a/x/run", "/a/y/run") == ["x", "y"]
    assert of("/a/run", "/a/run-2") == ["run", "run-2"]
    assert of("/a/" + "x" * 60 + "1" + "z" * 30, "/a/" + "x" * 60 + "2" + "z" * 30)[0].startswith(
        "1: xxxxxxxxxxxxxxxxxxxx...zzz"
    )
    assert of("/a/\x1b[31mred") == ["?[31mred"]


@pytest.mark.parametrize(("seconds", "duration"), [(0.298, "0.298 s"), (2, "2.00 s"), (59.9, "59.9 s"), (59.97, "1 min 00 s"), (200, "3 min 20 s"),  # noqa: E501
                                                (3599.8, "1 h 00 min"), (7500, "2 h 05 min"), (math.nan, "")])  # fmt: skip  # noqa: E501
def test_durations(seconds: float, duration: str) -> None:
    assert summary.duration(seconds) == duration


def run_on(
    ranks: int, speed: float, seed: int = 1, batch: int = 64, joules: float = 1.0, **config: Any
) -> RunRecord:
    last = end(20, samples_per_s=speed, seconds=20_000.0 / speed, joules_per_sample=joules)
    return record_of(
        [start(ranks=ranks), epoch(1, 0.8 + seed / 100), last],
        **{"seed": seed, "batch.size": batch, **config},
    )


def test_strong_scaling() -> None:
    """1 rank: 90, 100, 110 images/s are 100 with a deviation of 10. 4 ranks: 310 and 330 are 320:
    3.2 times, 80% of 4. Joules 1.5 / 1.2."""
    on_one = [
        run_on(1, speed, seed, joules=1.2, **{"comm.compression": "fp16"})
        for seed, speed in ((1, 90.0), (2, 100.0), (3, 110.0))
    ]
    on_four = [
        run_on(4, 310.0, 1, joules=1.4),
        run_on(4, 330.0, 2, joules=1.6),
        run_on(4, 999.0, 1, **{"model.name": "other"}),
    ]
    (found,) = scaling_comparisons([*on_four, *on_one])
    one, four = found.rows
    assert (found.batch, one.ranks, four.ranks, one.seeds, four.seeds) == (
        "64 over all ranks (strong scaling)",
        1,
        4,
        "1, 2, 3",
        "1, 2",
    )
    assert one.samples_per_s == pytest.approx(
        (100.0, 10.0, 3)
    ) and four.samples_per_s == pytest.approx((320.0, math.sqrt(200.0), 2))
    assert (one.speed_up, one.efficiency, one.energy_ratio) == (1.0, 1.0, 1.0)
    assert (four.speed_up, four.efficiency, four.energy_ratio) == pytest.approx((3.2, 0.8, 1.25))
    assert one.last == pytest.approx((0.82, 0.01, 3)) and four.last == pytest.approx(
        (0.815, math.sqrt(0.5) / 100, 2)
    )


def test_weak_scaling() -> None:
    """Against the fewest, 2: 150 / 100 = 1.5 times on twice as many ranks. A run without an end has
    a speed, but no last accuracy."""
    two = run_on(2, 100.0, batch=32)
    four = run_on(4, 150.0, batch=64)
    going = record_of([start(ranks=4), epoch(1, 0.1, samples_per_s=150.0, seconds=12.0)])
    (found,) = scaling_comparisons([four, two, going])
    assert found.batch == "16 on each rank (weak scaling)"
    assert [(row.ranks, row.samples_per_s.n, row.last.n) for row in found.rows] == [
        (2, 1, 1),
        (4, 2, 1),
    ]
    assert (found.rows[1].speed_up, found.rows[1].efficiency) == (1.5, 0.75)


def test_runs_with_other_communication_are_compared_apart() -> None:
    """Two comparisons, both with the job on one rank; none without a configuration or with one
    number of ranks."""
    on_one = run_on(1, 100.0)
    same = run_on(2, 180.0)
    half = run_on(2, 190.0, **{"comm.compression": "fp16"})
    assert [found.rows[1].speed_up for found in scaling_comparisons([on_one, same, half])] == [
        1.8,
        1.9,
    ]
    assert (
        scaling_comparisons([run_on(2, 1.0), run_on(2, 2.0, seed=2)])
        == []
        == scaling_comparisons([RunRecord(Path("a"), {}, one.events) for one in (on_one, same)])
    )


def test_a_job_of_a_few_seconds_is_not_compared() -> None:
    """2,001 images/s: 20,000 images in 9.995 s. 2,000: in 10 s."""
    assert scaling_comparisons([run_on(1, 100.0), run_on(2, 2001.0)]) == []
    (found,) = scaling_comparisons([run_on(1, 100.0), run_on(2, 2000.0), run_on(2, 2001.0, seed=2)])
    assert (found.rows[1].seeds, found.rows[1].speed_up) == ("1", 20.0)


def test_a_job_resumed_on_other_ranks_is_not_compared() -> None:
    """100 images/s on 1 rank: a job that had 1 rank for half of its steps says nothing about 2.
    Repeated from step 0 it does."""
    one = run_on(1, 100.0)
    moved = run_on(2, 120.0)
    one_rank = start(ranks=1)
    two_ranks = start(10)
    other = start(5, device="CPU B", engine="torchdist")
    events = moved.events[1:]
    assert (
        changes_between_starts(RunRecord(Path("a"), CONFIG, [one_rank, *events, two_ranks]))
        == "ranks 1, then 2"
    )
    assert (
        scaling_comparisons([one, RunRecord(Path("a"), CONFIG, [one_rank, *events, two_ranks])])
        == []
    )
    assert (
        changes_between_starts(
            RunRecord(Path("a"), CONFIG, [start(device="CPU A"), *events, other])
        )
        == "engine mpi, then torchdist; device CPU A, then CPU B"
    )
    (found,) = scaling_comparisons(
        [one, RunRecord(Path("a"), CONFIG, [one_rank, start(), *events])]
    )
    assert found.rows[1].speed_up == pytest.approx(1.2) and not changes_between_starts(moved)
