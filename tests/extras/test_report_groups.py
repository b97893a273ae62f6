"""Several runs in one report: runs that differ only in the seed are one line with a band, names say
what differs, a table has the best first, and resumes are marked."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from run_events import end, epoch, record_of, start, step

from hvdtrain.extras.figures.figure import new_figure
from hvdtrain.extras.report import page_tables
from hvdtrain.extras.report.figures import canvas, draw, ranks, speed
from hvdtrain.extras.report.figures.seeds import draw_mean, mean_curve
from hvdtrain.extras.report.measures.compare import Spread
from hvdtrain.extras.report.measures.groups import group_runs, run_labels
from hvdtrain.records.run import RunRecord


def run_of(seed: int, *accuracies: float, **config: Any) -> RunRecord:
    """A run with an evaluation after each epoch of ten steps."""
    events = [start()]
    for number, accuracy in enumerate(accuracies, 1):
        events += [step(10 * number - 5), step(10 * number), epoch(number, accuracy)]
    return record_of([*events, end(10 * len(accuracies))], seed=seed, **config)


def names_of(runs: list[RunRecord]) -> list[tuple[str, int]]:
    labels = [f"run-{index}" for index in range(len(runs))]
    return [(group.name, len(group.runs)) for group in group_runs(runs, labels)]


def test_runs_that_differ_only_in_the_seed_are_a_group() -> None:
    """Places and what is logged do not count; ranks do. Runs with equal seeds are repetitions, and
    nothing is known of a run without a configuration."""
    fast = [run_of(seed, 0.5, **{"optim.base_lr": 0.2}) for seed in (1, 2, 3)]
    slow = [run_of(seed, 0.5, **{"optim.base_lr": 0.1, "run": f"{seed}"}) for seed in (1, 2)]
    slow[1].config["log.every_steps"] = 1
    assert names_of([slow[0], *fast, slow[1]]) == [
        ("optim.base_lr=0.1", 2),
        ("optim.base_lr=0.2", 3),
    ]
    assert names_of([fast[0], fast[1], run_of(2, 0.5, **{"optim.base_lr": 0.2})]) == [
        ("run-0", 1),
        ("run-1", 1),
        ("run-2", 1),
    ]
    on_four = [record_of([start(ranks=4)], seed=seed) for seed in (1, 2)]
    on_two = [record_of([start()], seed=seed) for seed in (1, 2)]
    assert names_of([*on_two, *on_four]) == [("ranks=2", 2), ("ranks=4", 2)]
    unknown = [RunRecord(run.folder, {}, run.events) for run in on_two]
    assert [count for _, count in names_of(unknown)] == [1, 1]
    assert names_of(fast) == [("run", 3)]


def test_scripts_with_other_rates_or_models_are_not_a_group() -> None:
    """The configuration of a custom loop has neither."""
    same = [record_of([start(), step(5)], seed=seed) for seed in (1, 2)]
    assert [count for _, count in names_of(same)] == [2]
    other_rate = record_of([start(), step(5, lr=0.3)], seed=3)
    other_model = record_of([start(model="Net, 7 parameters"), step(5)], seed=4)
    assert [count for _, count in names_of([*same, other_rate, other_model])] == [2, 1, 1]


def test_names_of_runs_say_what_differs() -> None:
    def labels(*changes: dict[str, Any]) -> list[str]:
        runs = [record_of([start()], **change) for change in changes]
        return run_labels(
            [RunRecord(run.folder / f"r{i}", run.config, run.events) for i, run in enumerate(runs)]
        )

    rates = [{"seed": seed, "optim.base_lr": rate} for rate in (0.1, 0.2) for seed in (1, 2)]
    assert labels(*rates)[:2] == ["optim.base_lr=0.1, seed=1", "optim.base_lr=0.1, seed=2"]
    assert labels({"optim.name": "sgd"}, {}) == ["optim.name=sgd", "optim.name=null"]
    assert labels({"hub_token": "a"}, {"hub_token": "b"}) == ["r0", "r1"]  # both are hidden
    assert labels({"run": "x"}, {"run": "y"}) == ["r0", "r1"]
    assert labels({"data.name": "x" * 99}, {}) == ["r0", "r1"]
    four = dict.fromkeys(("a.a", "a.b", "a.c", "a.d"), 1)
    assert labels(four, dict.fromkeys(four, 2)) == ["r0", "r1"]
    assert run_labels([record_of([start()])]) == ["run"]


def test_the_mean_of_curves() -> None:
    """Means 2 and 4 with the deviation sqrt(2). A curve with other points is interpolated; the mean
    ends where a curve does."""
    assert mean_curve([[(1, 1.0), (2, 3.0)], [(1, 3.0), (2, 5.0)]]) == (
        [1, 2],
        [2.0, 4.0],
        pytest.approx([math.sqrt(2)] * 2),
    )
    assert mean_curve([[(0, 0.0), (2, 2.0), (4, 9.0)], [(1, 3.0), (3, 5.5)]])[:2] == (
        [1, 2, 3],
        [2.0, 3.125, 5.5],
    )
    assert mean_curve([[(0, 1.0), (1, 1.0)], [(2, 1.0), (3, 1.0)]]) == ([], [], [])


def legend_of(figure: Figure | None) -> list[str]:
    assert figure and len(figure.legends) == 1
    return [text.get_text() for text in figure.legends[0].texts]


def band_of(axes: Axes, index: int) -> dict[float, tuple[float, float]]:
    """{x: (lowest, highest)} of a band."""
    bands = [one for one in axes.collections if isinstance(one, PolyCollection)]
    points = np.asarray(bands[index].get_paths()[0].vertices)
    return {
        x: (min(points[points[:, 0] == x, 1]), max(points[points[:, 0] == x, 1]))
        for x in map(float, points[:, 0])
    }


def test_a_group_is_drawn_as_a_mean_with_a_band() -> None:
    """Accuracies 0.5 and 0.7: mean 0.6, deviation sqrt(0.02). A run that goes further than the
    others is a thin line there."""
    rate = {"optim.base_lr": 2}
    group = [run_of(1, 0.5, 0.7, **rate), run_of(2, 0.7, 0.9, 0.95, **rate)]
    other = run_of(1, 0.4, 0.4, **{"optim.base_lr": 1})
    figure = draw.accuracy([*group, other], ["a-1", "a-2", "b"])
    assert figure
    axes = figure.axes[0]
    train, train_rest, val, val_rest, *_ = (
        (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines
    )
    assert val == ([1.0, 2.0], pytest.approx([0.6, 0.8])) and val_rest == ([2.0, 3.0], [0.9, 0.95])
    assert train[0] == [0.5, 1.0, 1.5, 2.0] and train_rest[0] == [2.0, 2.5, 3.0]
    low, high = band_of(axes, 1)[2.0]
    assert (low, high) == pytest.approx((0.8 - math.sqrt(0.02), 0.8 + math.sqrt(0.02)))
    assert legend_of(figure) == [
        "optim.base_lr=2 (mean of 2 seeds, sd shaded)",
        "b",
        "training",
        "validation",
    ]
    zorders = [line.get_zorder() for line in axes.lines]
    assert zorders[2] > zorders[0], "validation is drawn over training"
    assert legend_of(draw.accuracy(group, ["a-1", "a-2"])) == [
        "training",
        "validation, mean of 2 seeds, sd shaded",
    ]
    assert legend_of(speed.throughput(group, ["a-1", "a-2"])) == ["mean of 2 seeds, sd shaded"]
    assert legend_of(speed.memory(group, ["a-1", "a-2"])) == [
        "host memory, mean of 2 seeds, sd shaded"
    ]
    assert legend_of(draw.rates(group, ["a-1", "a-2"])) == ["2 seeds"]


def test_a_band_of_positive_values_does_not_reach_0() -> None:
    """Values 0.1 and 3: mean 1.55, deviation 2.05; on a logarithmic axis it had no lower end."""
    _, (axes,) = new_figure()
    assert draw_mean(axes, [[(1, 0.1), (2, 0.1)], [(1, 3.0), (2, 3.0)]], color="#000000") == 2
    assert band_of(axes, 0)[2.0] == pytest.approx((0.1, 1.55 + 2.9 / math.sqrt(2)))


def test_the_legend_counts_the_runs_that_have_a_value() -> None:
    """One of three has not been evaluated; the mean of one evaluation has an error bar."""
    group = [run_of(1, 0.5), run_of(2, 0.7), record_of([start(), step(5), step(10)], seed=3)]
    figure = draw.accuracy(group, ["1", "2", "3"])
    assert legend_of(figure)[-1] == "validation, mean of 2 of 3 seeds, sd shaded"
    assert figure and len(figure.axes[0].containers) == 1


def test_a_resume_is_marked_on_the_axis() -> None:
    """Killed after step 12 and resumed at step 10: epoch 1, second 2."""
    events = [start(), step(5), step(10), start(10, seconds=2.0), step(15), step(20), end(20)]
    resumed = record_of(events)
    for figure, x in (
        (draw.loss([resumed], ["a"]), 1.0),
        (draw.rates([resumed], ["a"]), 1.0),
        (speed.throughput([resumed], ["a"]), 2.0),
    ):
        assert figure
        mark = figure.axes[-1].lines[-1]
        assert (list(mark.get_xdata()), list(mark.get_ydata())) == ([x], [0.0])
        assert mark.get_marker() == "^" and legend_of(figure)[-1] == "resumed"
    stranger = record_of([*events, start(20, seconds=1e44)])
    figure = speed.throughput([stranger], ["a"])
    assert figure and list(figure.axes[-1].lines[-1].get_xdata()) == [2.0]
    straight = draw.loss([record_of([start(), step(5), step(10)])], ["a"])
    assert legend_of(straight) == ["training"]


def test_long_names_of_rows_are_broken_between_keys() -> None:
    names = canvas.row_names(["batch.size=256, optim.base_lr=0.1, seed=1", "a$"])
    assert names.texts == ["batch.size=256,\noptim.base_lr=0.1, seed=1", r"a\$"]
    assert names.height == pytest.approx(0.35) and canvas.row_names(["a"]).height == 0.34


def test_names_of_close_targets_do_not_cover_each_other() -> None:
    reached = [
        {"time": 1.0, "kind": "target", "step": 10, "target": value} for value in (0.6, 0.601, 0.7)
    ]
    figure = draw.accuracy([record_of([start(), step(10), epoch(1, 0.75), *reached])], ["a"])
    assert figure
    texts = figure.axes[0].texts
    heights = [text.xy[1] for text in texts]
    assert [text.get_text() for text in texts] == ["target 60%", "target 60.1%", "target 70%"]
    assert min(np.diff(heights)) > 0.049 and {text.xy[0] for text in texts} == {1.0}


def test_the_table_of_runs_has_the_best_first() -> None:
    """Last accuracies 0.5 and 0.7: mean 0.6, deviation 0.1414; best ones 0.8 and 0.7: 0.75."""
    good = [
        run_of(1, 0.8, 0.5, **{"optim.base_lr": 1}),
        run_of(2, 0.6, 0.7, **{"optim.base_lr": 1}),
    ]
    poor = run_of(1, 0.55, **{"optim.base_lr": 2})
    new = record_of([start()], **{"optim.base_lr": 3})
    runs = [new, poor, *good]
    table = page_tables.ranking(runs, run_labels(runs))
    assert table.header == [
        "run",
        "last accuracy",
        "sd",
        "n",
        "best accuracy",
        "epochs",
        "time",
        "ending",
    ]
    assert [row[:6] for row in table.rows] == [
        ["optim.base_lr=1", "60.00%", "14.14%", "2", "75.00%", "2.00"],
        ["optim.base_lr=2, seed=1", "55.00%", "", "", "55.00%", "1.00"],
        ["optim.base_lr=3, seed=1", "not evaluated", "", "", "", ""],
    ]
    assert [row[-1] for row in table.rows] == ["2 done", "done", "no end"]
    assert "standard deviation" in table.note
    losses = {"objective": "loss", "metrics": {"loss": {"better": "min"}}}
    low, high = (
        record_of([start(**losses), epoch(1, 0.5, val_loss=value)], name=value) for value in (1, 2)
    )
    assert [row[:2] for row in page_tables.ranking([high, low], ["h", "l"]).rows] == [
        ["l", "1"],
        ["h", "2"],
    ]
    assert (
        page_tables.ranking([poor], ["a"]).rows
        == []
        == page_tables.ranking([poor, low], ["a", "b"]).rows
    )


def test_numbers_of_a_row_have_equally_many_digits() -> None:
    assert page_tables.aligned([1.5, 0.25, 12.0]) == ["1.50", "0.25", "12.00"]
    assert page_tables.aligned([1.0, 20.0]) == ["1", "20"] and page_tables.aligned([]) == []
    assert page_tables.aligned([1234.5, 0.5]) == ["1,234", "0.5"]
    assert page_tables.aligned([2e-9, 1e-9, 0.0]) == ["2e-09", "1e-09", "0"]
    spreads = [Spread(3.1994, 0.0296, 2), Spread(3809.0, 34.4, 3), Spread(5.0, math.nan, 1)]
    assert [page_tables._spread(one) for one in spreads] == [
        "3.199 ± 0.030 (n 2)",
        "3,809 ± 34 (n 3)",
        "5 (n 1)",
    ]
    assert page_tables._spread(Spread(5.0, 0.0, 2)) == "5 (n 2)"


def test_what_no_run_measured_is_said_once() -> None:
    runs = [record_of([start(), step(5), epoch(1, 0.5)], seed=seed) for seed in (1, 2)]
    table = page_tables.summary_table(runs, ["a", "b"])
    assert table.note == "Energy per sample: not measured: processors: no counter."
    assert "energy per sample" not in [row[0] for row in table.rows]
    single = page_tables.summary_table(runs[:1], ["a"])
    assert ["energy per sample", "not measured: processors: no counter"] in single.rows
    target = {
        "time": 1.0,
        "kind": "target",
        "step": 10,
        "target": 0.6,
        "seconds": 2.0,
        "epochs": 1.0,
    }
    reached = page_tables.targets([record_of([start(), target])], ["a"])
    assert reached.header == ["run", "target", "time", "epochs"]
    assert reached.rows == [["a", "60.00%", "2.00 s", "1.00"]]


def test_even_ranks_have_no_slowest() -> None:
    even = record_of([start(), epoch(1, 0.5, rank_work_ms=[10.0, 10.1])])
    slow = record_of([start(), epoch(1, 0.5, rank_work_ms=[10.0, 15.0])])
    assert legend_of(ranks.own_work([even], ["a"])) == ["an evaluation", "mean"]
    assert legend_of(ranks.own_work([slow], ["a"])) == ["an evaluation", "mean", "slowest"]
    both = ranks.own_work([even, slow], ["a", "b"])
    assert both and [text.get_text() for text in both.axes[0].texts] == ["rank 1 on n2"]


def test_memory_of_small_models() -> None:
    """What is left without libraries and data may be less than a page of the system."""
    small = record_of(
        [start(), step(5), end(10, rank_memory_mb=[0.0, 0.3], memory_predicted_mb=0.1)]
    )
    rows = {row[0]: row[1] for row in page_tables.summary_table([small], ["a"]).rows}
    assert rows["memory of a rank"] == "300 MB"
    assert rows["without libraries and data"] == "less than 1 MB"
