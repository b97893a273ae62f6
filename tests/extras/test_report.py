"""`hvdtrain report`: the figures show the lines, the page the numbers; text is escaped; mistakes
are reported."""

from __future__ import annotations

import base64
import html
import json
import math
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from run_events import COMPLETE, CONFIG, end, epoch, record_of, start, step, write
from test_report_summary import run_on

from hvdtrain.__main__ import main
from hvdtrain.core.process import command_line
from hvdtrain.extras.figures.figure import COLOURS, png
from hvdtrain.extras.report import page_tables
from hvdtrain.extras.report.command import ProgressPrinter
from hvdtrain.extras.report.figures import canvas, draw, ranks, speed
from hvdtrain.extras.report.figures.canvas import downsample
from hvdtrain.extras.report.measures import summary
from hvdtrain.extras.report.measures.compare import scaling_comparisons
from hvdtrain.extras.report.measures.summary import host_of
from hvdtrain.extras.report.page import render_page
from hvdtrain.records.run import RunRecord

SCRIPT = '<script>alert("1")</script>'
FULL = [  # every figure but the comparison of ranks has something to show
    start(energy={"gpu": "", "cpu": "no counter"}, model=SCRIPT, parameters=9610, version="9.9"),
    {"time": 1001.0, "kind": "started", "step": 1, "start_s": {"Python": 0.5, "data": 1.25}},
    *(step(n, watts=100.0, noise_scale=500.0, gpu_memory_mb=800.0) for n in (5, 10)),
    epoch(1, 0.7, rank_work_ms=[8.0, 12.0], joules_per_sample=0.5),
    {
        "time": 1010.0,
        "kind": "target",
        "step": 10,
        "target": 0.6,
        "seconds": 200.0,
        "epochs": 1.0,
        "samples": 64000,
        "joules": 32000.0,
    },
    {"time": 1011.0, "kind": "nonfinite", "step": 12, "policy": "skip", "count": 1},
    {"time": 1012.0, "kind": "checkpoint_failed", "step": 13, "reason": SCRIPT},
    *(step(n, watts=110.0, noise_scale=600.0, gpu_memory_mb=800.0) for n in (15, 20)),
    epoch(2, 0.6, rank_work_ms=[8.0, 12.2], joules_per_sample=0.7),
    end(
        20,
        seconds=4.25,
        samples_per_s=12345.6,
        joules_per_sample=0.6,
        rank_memory_mb=[462, 480.2],
        memory_predicted_mb=420,
    ),
]


class PageParser(HTMLParser):
    """Tags, text and table rows of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.tags and self.tags[-1][0] in ("td", "th") and self.rows:
            self.rows[-1][-1] += data.strip()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a run that has every figure but the comparison, in a folder named like a script;
    drawn once."""
    run = tmp_path_factory.mktemp("runs") / SCRIPT.replace("/", "_")
    write(run, FULL, CONFIG | {"model.name": SCRIPT})
    assert main(["report", str(run)]) == 0
    return run


def test_world_sizes_over_time() -> None:
    events = [
        start(ranks=4),  # n1, n2, n2, n2
        step(5),
        {
            "time": 1003.0,
            "kind": "lost",
            "step": 5,
            "ranks": [1, 2, 3],
            "hosts": ["n2"] * 3,
            "left": 1,
        },
        step(10),
        {"time": 1060.0, "kind": "stop", "step": 10, "reason": "SIGUSR2 from https://u:secret@h/"},
        start(10, time=1061.0, ranks=3, hosts=["n1", "n3"]),
        step(15, time=1070.0),
        start(15, time=1130.0) | {"ranks": "?", "hosts": None},
        {"time": 1140.0, "kind": "end", "step": 15, "reason": "epochs=3"},
        {"time": 1150.0, "kind": "evaluation", "step": 15},  # by a command of its own
        start(15, time=1160.0, ranks=3, hosts=["n1", "n3"]),
    ]
    rows = page_tables.world_sizes(record_of(events)).rows
    assert [row[:1] + row[2:] for row in rows] == [
        ["0", "4", "n1, n2", "started"],
        ["5", "1", "n1", "3 ranks lost"],
        ["10", "3", "n1, n3", rows[2][4]],
        ["15", "", "", "resumed after a kill or the loss of a host"],
        ["15", "3", "n1, n3", "ended (epochs=3), resumed"],
    ]
    assert [row[1] for row in rows] == [summary.duration(s) for s in (0, 3, 61, 130, 160)]
    assert rows[2][4].startswith("stopped (SIGUSR2 from ") and "secret" not in rows[2][4]
    assert page_tables.world_sizes(record_of(FULL)).rows == []


def test_every_picture_shows_its_lines(made: Path) -> None:
    names = sorted(
        path.name.removeprefix("report-").removesuffix(".png") for path in made.glob("report-*.png")
    )
    assert names == [
        "accuracy",
        "loss",
        "memory",
        "noise",
        "phases",
        "power",
        "ranks",
        "rates",
        "throughput",
    ]
    for name in names:
        with Image.open(made / f"report-{name}.png") as picture:
            assert (
                picture.format == "PNG"
                and picture.width == round(5.6 * 150)
                and 400 < picture.height < 900
            ), name
            pixels = np.asarray(picture.convert("RGB")).astype(int)
        drawn = (
            np.abs(pixels - [int(COLOURS[0][digit : digit + 2], 16) for digit in (1, 3, 5)]).sum(2)
            < 110
        )
        # the first run's colour, pale where it is thin, on white
        assert drawn.sum() > 60 and (pixels.sum(2) == 765).mean() > 0.3, name


def test_the_page_has_no_script_and_no_address_outside(made: Path) -> None:
    """No script, no address but data:, and a policy that forbids them."""
    seen = PageParser((made / "report.html").read_text())
    assert not {"script", "iframe", "object", "embed", "form", "base"} & {
        tag for tag, _ in seen.tags
    }
    addresses = [
        value
        for _, attrs in seen.tags
        for name, value in attrs.items()
        if name in ("src", "href", "srcset", "data", "action")
    ]
    assert len(addresses) == 10 and all(
        address and address.startswith("data:") for address in addresses
    )
    assert not [name for _, attrs in seen.tags for name in attrs if name.startswith("on")]
    policies = [
        attrs["content"]
        for tag, attrs in seen.tags
        if attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]
    assert all(attrs["alt"] for tag, attrs in seen.tags if tag == "img")
    for address in addresses[1:]:
        picture = base64.b64decode(str(address).partition("base64,")[2]).decode()
        assert "<svg" in picture and "<text" not in picture and "<script" not in picture


def test_the_numbers_on_the_page(made: Path) -> None:
    seen = PageParser((made / "report.html").read_text())
    facts = {row[0]: row[1] for row in seen.rows if len(row) == 2}
    expected = {"ranks": "2", "hosts": "n1, n2", "model": SCRIPT, "parameters": "9,610", "best accuracy": "70.00%",  # noqa: E501
            "last accuracy": "60.00%",
            "time": "4.25 s", "samples/s": "12,346", "epochs": "2", "ending": "done: epochs=2", "sum": "1.750", "batch.size": "64",  # noqa: E501
            "memory of a rank": "300 MB, on a GPU 800 MB",
            "without libraries and data": "480 MB, 420 predicted (+10.0% on rank 0)",
            "energy per sample": "0.6 J (GPUs); not measured: processors: no counter"}  # fmt: skip
    assert {name: facts.get(name) for name in expected} == expected
    assert [made.name, "60.00%", "3 min 20 s", "1.00", "64,000", "32,000"] in seen.rows
    assert [
        "1",
        "n2",
        "12.100",
        "1.20",
    ] in seen.rows  # the mean of 12 and 12.2; 12.1 / ((8 + 12.1) / 2) = 1.204
    text = " ".join(seen.text.split())
    assert "rank 1 on n2 is slowest: 12.1 ms of own work a step, median 10.1" in text
    assert "a loss or gradient was not finite: step 12; policy skip" in text
    assert f"1 checkpoint could not be written, the last at step 13: {SCRIPT}" in text
    assert f"{command_line()} report " in text and "The last events" not in text


def test_the_environment_is_on_the_page() -> None:
    run = record_of([start(environment={"modules": ["gcc/13"]})])
    page = render_page([run], ["a"], [], "command")
    assert "<h2>Environment</h2>" in page and "gcc/13" in page


def test_text_of_a_run_is_escaped(made: Path) -> None:
    source = (made / "report.html").read_text()
    assert (
        SCRIPT not in source
        and "<script" not in source
        and html.escape(SCRIPT, quote=False)[:12] in source
    )
    assert PageParser(source).text.count(SCRIPT) >= 3  # the model, the reason, the configuration


def test_a_report_of_several_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 rank at 400 images/s, 2 ranks at 600: 1.5 times, 75%. Pictures of an earlier report are
    removed; the user's own files stay."""
    monkeypatch.chdir(tmp_path)
    for count, samples_per_s in ((1, 400.0), (2, 600.0)):
        write(
            tmp_path / f"mlp-{count}",
            [
                start(ranks=count),
                step(5),
                epoch(1, 0.7),
                end(20, samples_per_s=samples_per_s, seconds=15.0),
            ],
            CONFIG | {"seed": count},
        )
    (tmp_path / "report").mkdir()
    for name in ("report-power.png", "report-mine.png"):
        (tmp_path / "report" / name).touch()
    assert main(["report", "mlp-1", "mlp-2", "./mlp-2/"]) == 0
    assert capsys.readouterr().out == "page: report/report.html\npictures: 8 in report\n"
    assert (
        not (tmp_path / "report/report-power.png").exists()
        and (tmp_path / "report/report-mine.png").exists()
    )
    assert (tmp_path / "report/report-scaling.png").stat().st_size > 5000 and len(
        list((tmp_path / "report").iterdir())
    ) == 10
    seen = PageParser((tmp_path / "report/report.html").read_text())
    assert (
        ["ranks", "1", "2"] in seen.rows
        and ["key", "ranks=1, seed=1", "ranks=2, seed=2"] in seen.rows
        and ["seed", "1", "2"] in seen.rows
    )
    assert ["2", "2", "600 (n 1)", "1.50", "75.0%"] in [row[:5] for row in seen.rows]
    assert (
        "2 runs" in seen.text
        and "More ranks: batch 64 over all ranks (strong scaling)" in seen.text
    )


def page_of(*records: RunRecord) -> str:
    return PageParser(
        render_page(records, [f"r{index}" for index, _ in enumerate(records)], [], "command")
    ).text


def test_a_crash_shows_its_last_events() -> None:
    """The last eight events, long ones cut off; a run that stopped regularly has no such list."""
    text = page_of(
        record_of([start(lines=["x" * 500]), *(step(n, loss=1 / 3) for n in range(1, 10))])
    )
    assert (
        '"loss": 0.333333' in text
        and "no end: it is running, or was killed" in text
        and "not evaluated" in text
    )
    assert '"step": 2,' in text and '"step": 1,' not in text and '"step": 9,' in text
    failed = page_of(
        record_of(
            [
                start(lines=["x" * 500]),
                {
                    "time": 1.0,
                    "kind": "failed",
                    "step": 3,
                    "reason": "MemoryError: x",
                    "exit_code": 83,
                },
            ]
        )
    )
    assert "failed: MemoryError: x" in failed and "x" * 100 in failed and "x" * 300 not in failed
    assert "The last events" not in page_of(
        record_of([start(), {"time": 1.0, "kind": "stop", "step": 3, "reason": "SIGUSR1"}])
    )


OLD = [{"time": 1000.0, "kind": "start", "step": 0, "lines": ["x"], "digest": "ab", "ranks": 1, "hosts": ["vm"]},  # noqa: E501
       {"time": 1001.0, "kind": "step", "step": 10, "epochs": 0.5, "loss": 2.0, "samples_per_s": 100.0, "lr": 0.1, "batch": 64},  # noqa: E501
       {"time": 1002.5, "kind": "step", "step": 20, "epochs": 1.0, "loss": None, "samples_per_s": 200.0, "lr": 0.1}]  # fmt: skip  # noqa: E501


def test_runs_of_an_older_version() -> None:
    """Without seconds, accuracy and phases: times come from the clock, and what is not known is
    left out."""
    text = page_of(RunRecord(Path("run"), {}, OLD))
    assert (
        "1 rank, 2.50 s, not evaluated" in text
        and "not recorded" in text
        and "config.yaml is missing or cannot be read" in text
    )
    rows = {
        row[0]: row[1]
        for row in page_tables.summary_table([RunRecord(Path("run"), {}, OLD)], ["a"]).rows
    }
    assert rows["samples/s"] == "150" and "engine" not in rows and "parameters" not in rows
    assert [
        drawn.kind.name for drawn in draw.draw_all([RunRecord(Path("run"), {}, OLD)], ["a"])
    ] == ["loss", "rates", "throughput"]


def test_a_run_without_steps_has_no_figures() -> None:
    assert (
        draw.draw_all([RunRecord(Path("run"), {}, OLD[:1])], ["a"]) == []
        and draw.draw_all([record_of([start(), end(0)])] * 2, ["a", "b"]) == []
    )


def lines_of(figure: Figure | None) -> list[tuple[list[float], list[float]]]:
    assert figure
    return [
        (list(line.get_xdata()), list(line.get_ydata()))
        for axes in figure.axes
        for line in axes.lines
    ]


def test_the_lines_of_the_figures() -> None:
    """An evaluation at step 5 is drawn at half an epoch; targets are horizontal; a single point has
    a marker."""
    half = record_of([start(), step(5), epoch(1, 0.7, step=5)], **{"stop.target": 0.9})
    assert lines_of(draw.loss([half], ["a"])) == [([0.5], [2.0]), ([0.5], [1.2])]
    assert lines_of(draw.accuracy([half], ["a"])) == [
        ([0.5], [0.05]),
        ([0.5], [0.7]),
        ([0, 1], [0.9, 0.9]),
    ]
    drawn = draw.loss([half], ["a"])
    assert drawn and drawn.axes[0].lines[0].get_marker() == "o"
    assert lines_of(draw.rates([record_of(COMPLETE)], ["a"])) == [
        ([0.5, 1.0, 1.5, 2.0], [0.1] * 4),
        ([0.5, 1.0, 1.5, 2.0], [64.0] * 4),
    ]
    assert lines_of(speed.throughput([record_of(COMPLETE)], ["a"])) == [
        ([1.0, 2.0, 3.0, 4.0], [320.0] * 4)
    ]


def timeline_of(of_ranks: Any) -> Figure | None:
    passes = {
        "kind": "passes",
        "time": 1010.5,
        "step": 10,
        "passes": [[["forward", 0, 0, 0.0, 1.0, 2.0]]] * 2,
        "passes_of_ranks": of_ranks,
    }
    return ranks.timeline([record_of([*COMPLETE, passes])], [""])


@pytest.mark.parametrize(
    "of_ranks",
    [
        [None, None],
        [0, math.nan],
        [1e44, 1],
        [0, -5],
        [0, 1.5],
        [0, 2**20],
        [True, 1],
        ["0", 1],
        [0],
        3,
    ],
)
def test_passes_of_what_is_no_rank_are_not_drawn(of_ranks: Any) -> None:
    assert timeline_of(of_ranks) is None


def test_the_passes_of_ranks_are_drawn() -> None:
    figure = timeline_of([0, 2.0])
    assert figure and [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "0 on n1",
        "2",
    ]
    assert (
        host_of({"host_of_rank": ["n1", "n2"]}, -1)
        == ""
        == host_of({"host_of_rank": ["n1", "n2"]}, 2)
    )


def test_phases_are_means_over_steps() -> None:
    """5 steps of 2 ms and 15 of 4 ms are (10 + 60) / 20 = 3.5; the last step event of an epoch
    belongs to it."""
    events = [
        step(5, phase_ms={"forward": 2.0}),
        step(20, phase_ms={"forward": 4.0, "unknown": None}, steps=15),
        step(22),
    ]
    assert (
        speed.phase_ms(events[:2]) == {"forward": 3.5, "unknown": 0.0}
        and speed.phase_ms([{"kind": "step"}]) == {}
    )
    figure = speed.phases([record_of([*events[:2], epoch(1, 0.5, step=20), events[2]])], ["a"])
    assert figure and [bar.get_height() for bar in figure.axes[0].patches[:2]] == [3.5, 2.0]
    within = [
        events[0],
        epoch(1, 0.4, step=5, epochs=0.25),
        events[1],
        epoch(1, 0.5, step=20, epochs=1.0),
        events[2],
    ]
    figure = speed.phases([record_of(within)], ["a"])
    assert figure and [bar.get_height() for bar in figure.axes[0].patches[:2]] == [3.5, 2.0], (
        "an evaluation within it ends no epoch"
    )
    both = speed.phases([record_of(COMPLETE), record_of(COMPLETE)], ["a", "b"])
    assert both and [bar.get_width() for bar in both.axes[0].patches] == [
        2.0,
        2.0,
        5.0,
        5.0,
        1.0,
        1.0,
    ]
    assert [label.get_text() for label in both.axes[0].get_yticklabels()] == ["a", "b"]


def test_many_ranks_and_epochs_are_a_heat_map() -> None:
    rows = [[10.0] * 9 + [20.0 + number] for number in range(5)]
    figure = ranks.own_work(
        [record_of([start(), *(epoch(i, 0.5, rank_work_ms=row) for i, row in enumerate(rows, 1))])],
        ["a"],
    )
    assert figure and figure.axes[0].get_title() == "slowest: rank 9, 22 ms"
    assert np.asarray(figure.axes[0].images[0].get_array()).tolist() == np.transpose(rows).tolist()


def test_the_figure_of_scaling() -> None:
    figure = ranks.scaling([run_on(1, 100.0), run_on(4, 300.0)], ["a", "b"])
    assert lines_of(figure)[:2] == [([1, 4.0], [1, 4.0]), ([1.0, 4.0], [1.0, 3.0])] and (
        [1.0, 4.0],
        [1.0, 0.75],
    ) in lines_of(figure)
    assert ranks.scaling([run_on(1, 100.0), run_on(1, 110.0, seed=2)], ["a", "b"]) is None


def test_a_long_line_is_downsampled_and_keeps_its_peaks() -> None:
    points = [(float(x), 1000.0 if x == 4321 else float(x % 7)) for x in range(50_000)]
    x, y = zip(*downsample(points), strict=True)
    assert (
        len(x) == len(y) <= 2000
        and list(x) == sorted(x)
        and x[y.index(1000.0)] == 4321.0
        and min(y) == 0.0
    )
    many = [step(n, loss=1.0 if n % 2 else 3.0) for n in range(1, 5001)]
    (_, band), (_, means) = lines_of(draw.loss([record_of([start(), *many])], ["a"]))
    assert (
        len(band) == 2000
        and set(band) == {1.0, 3.0}
        and means == pytest.approx([2.0] * 200, abs=0.05)
    )


def test_a_figure_with_a_large_svg_is_a_png_in_the_page() -> None:
    assert (
        canvas.data_url(b"<svg/>", b"png")
        == "data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode()
    )
    assert (
        canvas.data_url(b"x" * 400_001, b"png")
        == "data:image/png;base64," + base64.b64encode(b"png").decode()
    )


def test_labels_are_shown_literally(recwarn: pytest.WarningsRecorder) -> None:
    """A dollar sign, a leading underscore, and letters that the font lacks."""
    for drawn in draw.draw_all([record_of(COMPLETE[:2])] * 2, ["_$x^{$", "中文"])[:1]:
        assert png(drawn.figure)[:4] == b"\x89PNG" and len(drawn.figure.legends[0].texts) == 3
    assert not recwarn.list


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["report", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err[err.index("hvdtrain: ") :]  # a busy machine prints lines of progress before


def test_mistakes_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = "fix: hvdtrain report RUN [RUN ...] [--to FOLDER]"
    run = str(write(tmp_path / "run", COMPLETE, CONFIG))
    assert (
        refused(capsys, "--to", "x")
        == f"hvdtrain: RUN is missing\n  where: command line of report\n  {call}\n"
    )
    assert (
        "unknown argument '--too=x'\n  where: command line of report\n  fix: did you mean --to?"
        in refused(capsys, run, "--too=x")
    )
    assert f"expected one argument\n  where: command line of report\n  {call}" in refused(
        capsys, run, "--to"
    )
    assert f"{tmp_path} has no events.jsonl\n  where: RUN\n" in refused(capsys, run, str(tmp_path))
    (tmp_path / "file").touch()
    assert (
        f"cannot write {tmp_path / 'file'}: File exists\n  where: --to\n  fix: give a folder that "
        "can be written" in refused(capsys, run, "--to", str(tmp_path / "file"))
    )
    (tmp_path / "to" / "report.html").mkdir(parents=True)
    assert (
        f"cannot write {tmp_path / 'to/report.html'}: Is a directory\n  where: --to\n"
        in refused(capsys, run, "--to", f"{tmp_path}/to")
    )
    assert os.listdir(tmp_path / "to") == ["report.html"]
    (tmp_path / "in" / "report-noise.png").mkdir(parents=True)
    assert (
        f"cannot write {tmp_path / 'in/report-noise.png'}: Is a directory\n  where: --to"
        in refused(capsys, run, "--to", f"{tmp_path}/in")
    )
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert (
        refused(capsys, run)
        == "hvdtrain: matplotlib is not installed\n  where: report\n  fix: pip install matplotlib\n"
    )
    monkeypatch.setitem(sys.modules, "matplotlib.figure", sys.modules["matplotlib"])
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(Exception, match="jinja2 is not installed"):
        page_of(record_of(COMPLETE))


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"], ["run", "-h"]):
        assert main(["report", *arguments]) == 0
        assert capsys.readouterr().out.startswith(
            "hvdtrain report RUN [RUN ...] [--to FOLDER]\n  RUN "
        )


def test_progress_is_printed_every_two_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    now = [10.0]
    progress = ProgressPrinter(lambda: now[0])
    for at, line in ((11.9, "early"), (12.0, "first"), (13.9, "soon"), (14.1, "second")):
        now[0] = at
        progress(line)
    assert capsys.readouterr() == ("", "first\nsecond\n")


def test_a_table_of_scaling() -> None:
    (found,) = scaling_comparisons([run_on(1, 90.0), run_on(1, 110.0, seed=2), run_on(2, 1500.0)])
    table = page_tables.scaling(found)
    assert table.rows[0][:5] == ["1", "1, 2", "100 ± 14 (n 2)", "1.00", "100.0%"] and table.rows[1][
        2:4
    ] == ["1,500 (n 1)", "15.00"]
    assert table.header == [
        "ranks",
        "seeds",
        "samples/s",
        "speed-up",
        "efficiency",
        "time (s)",
        "last accuracy (%)",
        "J per sample",
        "energy ratio",
    ]
    assert table.note.startswith("Relative to 1 rank.") and not re.search("nan|inf", table.note)
    assert json.dumps(table.rows).count("nan") == 0


def test_a_job_resumed_on_other_ranks_has_a_warning() -> None:
    text = page_of(record_of([start(ranks=1), step(5), start(5), step(10)]))
    assert "ranks 1, then 2: the run is left out of the comparisons of ranks" in " ".join(
        text.split()
    )
    assert "comparison" not in page_of(record_of([start(), step(5), start(5), step(10)]))


def test_a_short_job_among_several_numbers_of_ranks_has_a_warning() -> None:
    long = run_on(1, 100.0)
    short = record_of([start(), step(5), end(20, seconds=4.25)])
    left_out = (
        "r1: a job of 4.25 s says nothing about speed: the run is left out of the comparisons of "
        "ranks (10 s or more)"
    )
    assert left_out in " ".join(page_of(long, short).split())
    assert "says nothing" not in page_of(short, short)


def evaluation(**fields: Any) -> dict[str, Any]:
    """Ants 3 of 4 right, 1 taken for a bee; bees 1 of 2."""
    found = {
        "checkpoint": "step-00000020",
        "data": "folder",
        "root": "https://me:hush@host/x",
        "split": "val",
        "count": 6,
        "loss": 0.5,
    }
    found |= {
        "accuracy": 4 / 6,
        "class_names": ["ant", "bee"],
        "class_samples": [4, 2],
        "class_accuracy": [0.75, 0.5],
    }
    found |= {"confusion": [[3, 1], [1, 1]], "confused": [[0, 1, 1], [1, 0, 1]]}
    curve = [[0, 0.5, 1], [0, 0.75, 1]]
    found |= {"roc": [curve, curve], "precision_recall": [curve, None], "class_auroc": [0.6, 0.6]}
    found |= {"calibration": [[0.6, 0.9], [0.5, 1.0], [2, 4]]}
    return {"time": 99_000.0, "kind": "evaluation", "step": 20, **found, **fields}


def test_an_evaluation_is_drawn(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [*COMPLETE[:-1], evaluation()], CONFIG)
    assert main(["report", str(run)]) == 0
    seen = PageParser((run / "report.html").read_text())
    assert (run / "report-confusion.png").stat().st_size > 5000
    assert [
        "run",
        "step-00000020",
        "folder in https://***@host/x, val",
        "6",
        "0.5000",
        "66.67%",
    ] in seen.rows
    rows = [
        ["class", "samples", "accuracy", "most often taken for"],
        ["bee", "2", "50.00%", "ant (1)"],
        ["ant", "4", "75.00%", "bee (1)"],
    ]
    assert [row for row in seen.rows if row in rows] == rows and "hush" not in seen.text
    assert "last event 1970-01-01 00:17:00 UTC" in seen.text  # of the job
    figure = draw.confusion([record_of([*COMPLETE, evaluation()])], ["a"])
    assert figure is not None
    axes = figure.axes[0]
    assert axes.images[0].get_array().tolist() == [[0.75, 0.25], [0.5, 0.5]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ant", "bee"]
    assert [text.get_text() for text in axes.texts] == ["75", "25", "50", "50"]
    figure = draw.curves([record_of([*COMPLETE, evaluation()])], ["a"])
    assert figure is not None and (run / "report-curves.png").stat().st_size > 5000
    lines = [[line.get_xdata().tolist() for line in axes.lines] for axes in figure.axes]
    assert lines == [[[0, 0.5, 1], [0, 1]], [], [[0.6, 0.9], [0, 1]]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["bee, AUROC 0.600"]


@pytest.mark.parametrize(
    "fields",
    [
        {"confusion": [[1, 2], [3]], "class_samples": [1]},
        {"confusion": [[1, -2], [3, 1]], "class_accuracy": None},
        {"confusion": [["a", None], [{}, []]], "confused": [[0, 9, 1], [1], "x", [0, 1, "y"]]},
        {
            "confusion": 7,
            "confused": 7,
            "class_names": 7,
            "class_samples": {},
            "data": None,
            "root": 3,
        },
        {"confusion": [[1] * 101] * 101, "class_samples": [math.inf, 2]},
        {
            "confusion": 0,
            "roc": [[[0, 2], [0, 1]], 7, [["a"], [0]]],
            "calibration": [[2], [1], [1]],
        },
        {"confusion": 0, "roc": [[[0, 1], [0, 1]]] * 2, "calibration": 3, "class_auroc": ["x"]},
        {"confusion": [[0, 0], [0, 0]], "class_names": ["\x1b[31m", "<script>"]},
    ],
)
def test_an_evaluation_of_a_stranger_is_drawn_or_left_out(fields: dict[str, Any]) -> None:
    record = record_of([*COMPLETE, evaluation(**fields)])
    assert "\x1b" not in page_of(record) and "Evaluations" in page_of(record)
    assert draw.confusion([record], ["a"]) is None or "class_names" in fields
    assert draw.confusion([record, record], ["a", "b"]) is None
    draw.curves([record], ["a"])
