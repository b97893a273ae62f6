"""labs/: each lab's notebook runs the lab's quick form, and shows the figures of the page; the form
of all of them."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import FULL, ROOT, Job, needs_mpirun, python

import hvdtrain
from hvdtrain.__main__ import main
from hvdtrain.errors import DONE, UserError
from hvdtrain.extras.lab.command import lab as lab_command

LABS = sorted((ROOT / "labs").glob("[0-9]-*/lab.py"))
FIGURE = re.compile(r'Image\(f"{out}/([a-z-]+\.png)"\)')
EXECUTE = """
import sys, pathlib, nbclient, nbformat
path = pathlib.Path(sys.argv[1])
found = nbformat.read(path, as_version=4)
nbformat.validate(found)
nbclient.NotebookClient(found, timeout=None, resources={"metadata": {"path": path.parent}}).execute()
nbformat.write(found, path)
"""  # noqa: E501


def test_each_lab_is_listed_and_another_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab"]) == DONE
    listed = capsys.readouterr().out
    index = (ROOT / "labs" / "README.md").read_text()
    for path in LABS:
        assert (
            f"{path.parent.name[0]}  Lab " in listed
            and f"[{path.parent.name[0]}]({path.parent.name}/README.md)" in index
        )
    with pytest.raises(UserError, match="there is no lab 99"):
        lab_command(["99"])


def test_lab_1_marks_what_was_not_reached_and_says_where_no_minimum_shows(tmp_path: Path) -> None:
    lab = lab_module("1")
    rows = [
        lab.Reached(batch, 10.0, 1.0, seconds)
        for batch, seconds in ((8, 3.0), (32, 1.0), (128, 2.0))
    ]
    assert lab.without_minimum(rows) == ""
    assert lab.without_minimum(rows[:2]).startswith(
        "batch 32 took least, at an end of those that came to 95 %"
    )
    assert lab.without_minimum([]).startswith("95 % was reached with no batch")
    figure = lab.draw_net(rows, [512], 40, tmp_path / "digits.png")
    for axes in figure.axes:
        assert [line.get_xdata().tolist() for line in axes.lines] == [[8, 32, 128], [512]]
        assert [text.get_text() for text in axes.get_legend().get_texts()] == ["not in 40 epochs"]


def test_lab_2_warns_where_other_programs_compute() -> None:
    lab = lab_module("2")
    assert lab.busy(0.4, 2) == "" and lab.busy(3.9, 16) == ""
    assert lab.busy(2.5, 2).startswith(
        "warning: other programs compute here (load 2.5 on 2 cores), so images/s say little"
    )


def test_lab_3_says_where_steps_are_too_few_for_what_larc_and_lamb_are_for(tmp_path: Path) -> None:
    lab = lab_module("3")
    quick = lab.quick(tmp_path)
    nothing, wins = (
        {(name, batch): 0.5 for name in lab.RECIPES for batch in (16, 128, 1024)} for _ in range(2)
    )
    wins.update({("LARC", 1024): 0.51, ("LAMB", 1024): 0.51})
    assert (
        lab.too_few_steps(quick, wins)
        == lab.too_few_steps(quick, {**nothing, ("scaling, warm-up", 1024): math.nan})
        == ""
    )
    text = (
        "batch 1,024: LARC and LAMB are not above scaling with warm-up; 12 steps are too few to "
        "show what they are for"
    )
    assert lab.too_few_steps(quick, nothing) == text
    assert "LAMB is not above" in (
        one := lab.too_few_steps(quick, {**wins, ("LAMB", 1024): math.nan})
    ) and one.endswith("what it is for")
    for found, title in ((nothing, text), (wins, "")):
        (axes,) = lab.draw_recipes(quick, found).axes
        lines = axes.get_title(loc="left").split("\n")
        assert " ".join(lines) == title
        assert max(map(len, lines)) <= 80  # not below the legend, which is to the right
    rows = np.array([(16, 70, 0.1), (128, 24, 0.2)])
    steps = lab.draw_regimes(quick, rows, (43.0, 45.0), (12.0, 82.0), [1024])
    assert steps.get_suptitle() == "no point: batch 1,024 did not come to 90% in 60 epochs"


def test_lab_5_takes_the_fastest_window_and_draws_what_a_way_waits_behind_what_it_computes(
    tmp_path: Path,
) -> None:
    import pandas

    lab = lab_module("5")
    steps = pandas.DataFrame(
        [  # steps, window_s, communication, other, computing; others had the core in the second
            (4, 0.02, 0.0, 0.0, 5.0),  # the first: allocates
            (4, 0.40, 50.0, 2.0, 11.0),
            (4, 0.08, 5.0, 1.0, 10.0),
        ],
        columns=[
            "steps",
            "window_s",
            "phase_ms.communication",
            "phase_ms.other",
            "logged.computing_ms",
        ],
    )
    assert lab.times_of(steps) == pytest.approx((10.0, 4.0, 6.0))
    costs = [lab.Cost(f"way {ms}", 0.0, 30.0, None, None, 10.0 * ms, 2.0, 5.0) for ms in (1, 2)]
    times = lab.draw_costs(tmp_path / "costs.png", costs).axes[2]
    computing, no_core, waiting = times.containers
    assert [(bar.get_x(), bar.get_width()) for bar in computing] == [(0, 10), (0, 20)]
    assert [(bar.get_x(), bar.get_width()) for bar in no_core] == [(10, 2), (20, 2)]
    assert [(bar.get_x(), bar.get_width()) for bar in waiting] == [(12, 5), (22, 5)]


def test_the_processor_time_of_lab_5_leaves_out_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(LABS[4].parent))
    monkeypatch.delitem(sys.modules, "processor_time", raising=False)
    import processor_time

    from hvdtrain.frameworks.stopwatch import HostStopwatch

    clock = iter([0.0, 1.0, 1.25, 4.25, 4.75, 9.0])
    monkeypatch.setattr(processor_time.time, "thread_time", lambda: next(clock))
    stopwatch = processor_time.ComputingStopwatch(HostStopwatch())
    for phase in ("data", "forward", "communication", "update", "", "data"):
        stopwatch.enter(phase)
    assert stopwatch.computed_s == 1.0 + 0.25 + 0.5
    assert next(set(step) for step in stopwatch.read()) == {
        "data",
        "forward",
        "communication",
        "update",
    }
    monkeypatch.delitem(sys.modules, "processor_time")


def notebook_of(number: str, folder: Path) -> Path:
    """As `hvdtrain lab N --notebook` writes it into that folder."""
    path = folder / f"lab-{number}.ipynb"
    assert main(["lab", number, "--notebook", str(path)]) == DONE
    return path


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.parent.name)
def test_a_notebook_has_the_text_the_figures_and_the_code_of_its_page(
    path: Path, tmp_path: Path
) -> None:
    page = (path.parent / "README.md").read_text()
    number = path.parent.name[0]
    written = json.loads(notebook_of(number, tmp_path).read_text())
    assert len({cell["id"] for cell in written["cells"]}) == len(written["cells"])
    code = ["".join(cell["source"]) for cell in written["cells"] if cell["cell_type"] == "code"]
    for cell in code:
        compile(re.sub(r"^!.*", "pass", cell, flags=re.MULTILINE), path.parent.name, "exec")
    assert [name for cell in code for name in FIGURE.findall(cell)] == re.findall(
        r"!\[[^]]+\]\(([a-z-]+\.png)\)", page
    )
    text = "\n".join(
        "".join(cell["source"]) for cell in written["cells"] if cell["cell_type"] == "markdown"
    )
    assert text.startswith(page.partition("\n")[0])
    assert any(f'out = "lab-{number}-quick" if quick else "lab-{number}"' in cell for cell in code)
    assert not any(f'"lab-{number}/' in cell for cell in code), (
        "a cell reads what this run has written"
    )
    links = [
        target.partition("#")[0]
        for target in re.findall(r"\]\(([^)]+)\)", text)
        if not target.startswith(("http", "#"))
    ]
    assert links and all((tmp_path / target).exists() for target in links), links
    words = [
        word
        for line in page.splitlines()
        if not line.startswith(("```", "!["))
        for word in re.findall(r"\w+", line)
    ]
    assert len(words) - len(re.findall(r"\w+", text)) < 150  # the commands, which are cells


@pytest.mark.slow
@needs_mpirun
@pytest.mark.parametrize("path", LABS if FULL else LABS[:1], ids=lambda path: path.parent.name)
def test_a_notebook_runs_its_lab_and_shows_the_figures(path: Path, tmp_path: Path) -> None:
    """As Jupyter runs it. The lab is run once, in its quick form, so that no other test has to."""
    notebook = notebook_of(path.parent.name[0], tmp_path)
    folders = {
        name: str(tmp_path / name)
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")
    }
    done = python(["-c", EXECUTE, str(notebook)], env=folders)
    assert done.returncode == 0, done
    cells = json.loads(notebook.read_text())["cells"]
    shown = [cell for cell in cells if FIGURE.search("".join(cell["source"]))]
    assert shown
    for cell in shown:
        name = FIGURE.findall("".join(cell["source"]))[0]
        assert (path.parent / name).read_bytes()[:4] == b"\x89PNG", f"{name} of the page"
        assert [list(output["data"]) for output in cell["outputs"]] == [
            ["image/png", "text/plain"]
        ], (name, cell["outputs"])


def test_a_notebook_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--notebook takes a file, and no other option"):
        lab_command(["1", "--notebook", "x.ipynb", "--quick"])
    with pytest.raises(UserError, match="cannot write .*: No such file or directory"):
        lab_command(["1", "--notebook", str(tmp_path / "none" / "x.ipynb")])


def test_the_paths_of_lab_1_are_those_of_both_frameworks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(LABS[0].parent))
    monkeypatch.delitem(sys.modules, "lab", raising=False)
    import lab

    lab.check_frameworks()
    assert capsys.readouterr().out.count("NumPy and torch differ by") == 2
    assert lab.noise(4) == pytest.approx(lab.noise(16) * 2, rel=0.1)
    monkeypatch.setattr(lab, "by_autograd", lambda w, x, y: 1.001 * lab.by_hand(w, x, y))
    with pytest.raises(AssertionError):
        lab.check_frameworks()
    monkeypatch.delitem(sys.modules, "lab")


def test_a_gradient_step_costs_what_lab_1_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps fall and epochs rise with the batch."""
    monkeypatch.syspath_prepend(str(LABS[0].parent))
    monkeypatch.delitem(sys.modules, "lab", raising=False)
    import lab

    monkeypatch.setattr(lab, "SEEDS", 3)
    small = lab.time_to_loss(4)
    large = lab.time_to_loss(256)
    assert small.steps > large.steps and small.epochs < large.epochs / 4
    lab.write(tmp_path / "t.csv", lab.Reached._fields, [small, large])
    assert (tmp_path / "t.csv").read_text().splitlines()[1].startswith("4,")
    monkeypatch.delitem(sys.modules, "lab")


def lab_module(number: str) -> Any:
    """lab.py of that lab, under a name of its own."""
    (path,) = (path for path in LABS if path.parent.name.startswith(number))
    spec = importlib.util.spec_from_file_location(f"lab_{number}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.in_turn
def test_lab_1_trains_anew_in_the_folder_of_its_former_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = lab_module("1")
    for epochs in (1, 2):  # too few for 95 %, at which a job ends
        lab.real_net(tmp_path, (16,), epochs)
        assert capsys.readouterr().out.startswith(
            f"batch   16: 95 % not reached in {epochs} epochs\n95 % was reached with no batch"
        )
        assert hvdtrain.read(tmp_path / "batch-16").epoch.max() == epochs


def test_a_lab_that_was_changed_asks_for_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "labs"))
    import runs

    def train(samples: int) -> Any:
        words = (
            "data.name=synthetic",
            f"data.samples={samples}",
            "model.name=mlp",
            "epochs=1",
            "batch.size=32",
        )
        return runs.train(runs.Job(tmp_path / "job", words))

    assert len(train(64)) == len(train(64))
    with pytest.raises(UserError, match="data.samples") as refused:
        train(128)
    assert refused.value.fix.endswith("; another --out begins anew")


def test_the_layers_that_lab_4_predicts_follow_from_two_plans() -> None:
    lab = lab_module("4")
    way = (2, "all")
    # 10 MB, and 10 MB for each layer
    plans = {
        2: {way: {"total": 30_000_000}},
        4: {way: {"total": 50_000_000}},
    }
    assert [lab.predicted_mb(plans, way, layers) for layers in (0, 1, 12)] == [10, 20, 130]
    assert [lab.most_layers(plans, way, room_mb) for room_mb in (129.9, 130.1, 25)] == [11, 12, 1]


def test_lab_6_has_joules_where_the_job_measured_them_and_a_reason_where_not(
    tmp_path: Path,
) -> None:
    lab = lab_module("6")
    assert lab.joules({"joules": {}}) is None and lab.joules({"joules": {"cpu": None}}) is None
    assert lab.joules({"joules": {"cpu": 120.5, "gpu": 30.0}}) == 150.5
    assert lab.why_not({"energy": {"cpu": "no counter", "gpu": ""}}) == [
        "energy of processors is not measured: no counter"
    ]
    one = lab.Cost(
        ranks=1, samples=1000, seconds=4.0, start_cpu_s=3.0, cpu_s=5.0, joules=None, accuracy=0.95
    )
    assert lab.spent(one) == ("processor-seconds", 5.0) and lab.spent(
        one._replace(joules=80.0)
    ) == ("joules", 80.0)
    lab.draw_cost(
        [one._replace(joules=80.0), one._replace(ranks=2, joules=70.0)], tmp_path / "cost.png"
    )
    assert (tmp_path / "cost.png").read_bytes()[:4] == b"\x89PNG"


def test_the_storage_of_lab_6_serves_its_readers_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(LABS[5].parent))
    monkeypatch.delitem(sys.modules, "storage", raising=False)
    import storage

    data = tmp_path / "data"
    limit = tmp_path / "limit"
    data.write_bytes(bytes(range(200)))
    limit.write_bytes(storage.NOTHING_TAKEN)
    now = 5.0
    waited: list[float] = []
    monkeypatch.setattr(storage.time, "monotonic", lambda: now)
    monkeypatch.setattr(storage.time, "sleep", waited.append)
    first, second = (storage.Storage(data, limit, rate=100.0) for _ in range(2))
    assert first.read(50, 0) == bytes(range(50)) and second.read(100, 3) == bytes(range(3, 103))
    now = 6.0
    assert first.read(50, 150) == bytes(range(50)) and waited == [0.5, 1.5, 1.0]
    now = 9.0  # nobody has read for a second: that second is lost, as at a disk
    first.read(50, 0)
    assert waited[3:] == [0.5]
    monkeypatch.delitem(sys.modules, "storage")


def test_the_efficiency_of_lab_6_by_hand(tmp_path: Path) -> None:
    lab = lab_module("6")
    need_s = lab.BATCH_BYTES / lab.STORAGE_RATE  # of a batch, alone
    assert need_s == pytest.approx(0.0298, abs=1e-4)
    assert lab.storage_model(2, 0.1) == 1 and lab.storage_model(8, 0.1) == pytest.approx(
        0.1 / (8 * need_s)
    )
    found = [lab.Scaled(1, 0.1, 0.1), lab.Scaled(8, 0.125, 0.25)]
    (axes,) = lab.draw_storage(found, tmp_path / "storage.png").axes
    drawn = [[float(y) for y in line.get_ydata()] for line in axes.lines[1:]]
    assert drawn == [[1.0, 0.8], [1.0, 0.4]]


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_the_schedules_of_lab_7_give_each_rank_the_sum(size: int) -> None:
    """With the steps and the bytes that the page says."""
    lab = lab_module("7")
    everyone = frozenset(range(size))
    expected = {  # steps, and the arrays that the busiest rank sends
        "ring": (2 * (size - 1), 2 * (size - 1) / size),
        "tree": (2 * math.log2(size), 2 * math.log2(size)),
        "halving, doubling": (2 * math.log2(size), 2 * (size - 1) / size),
    }
    for name, schedule in lab.SCHEDULES.items():
        steps = schedule(size)
        assert all(chunk == everyone for of in lab.simulate(steps, size)[-1] for chunk in of), name
        assert (len(steps), lab.chunks_of_busiest(steps) / size) == expected[name]
    last = lab.simulate(lab.ring_reduce_scatter(size), size)[-1]
    assert [[chunk == everyone for chunk in of].index(True) for of in last] == [
        (rank + 1) % size for rank in range(size)
    ]
    assert all(sum(chunk == everyone for chunk in of) == 1 for of in last)
    costs = lab.Costs(latency_s=1e-5, byte_s=1e-9, added_s=0.0)
    assert lab.predicted("ring", size, 0, costs) == pytest.approx(2e-5 * (size - 1))
    with pytest.raises(ValueError, match="6 ranks are not a power of two"):
        lab.SCHEDULES["tree"](6)


COMMAND = re.compile(r"^(?:mpirun -np (\d) )?python -m hvdtrain (.+?)(?: +#.*)?$", re.MULTILINE)
JOB_WORD = re.compile(r"[a-z_]+(\.\w+)*=")


def solutions_of(path: Path) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """The commands of a lab's solutions, as (ranks or nothing, words), and the Python."""
    page = (path.parent / "solutions.md").read_text()
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    commands = [
        (ranks, shlex.split(words))
        for kind, text in blocks
        for ranks, words in COMMAND.findall(text)
        if kind == "bash"
    ]
    return commands, [text for kind, text in blocks if kind == "python"]


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.parent.name)
def test_each_exercise_has_a_solution_whose_jobs_have_right_keys(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    page = (path.parent / "README.md").read_text()
    exercises = page.partition("## Exercises\n")[2].partition("\n## ")[0]
    numbers = re.findall(r"^(\d)\. ", exercises, re.MULTILINE)
    solved = re.findall(r"^## (\d)\. ", (path.parent / "solutions.md").read_text(), re.MULTILINE)
    assert 2 <= len(numbers) <= 4 and numbers == solved
    commands, code = solutions_of(path)
    assert commands or code
    for _, words in commands:
        # what test_a_solution_runs can run in an empty folder
        assert words[0] in ("plan", "sweep") or JOB_WORD.match(words[0]), words
        config = ["--config", words[words.index("--config") + 1]] if "--config" in words else []
        # --grid KEY=A,B: the first value
        grid = [words[at + 1].split(",")[0] for at, word in enumerate(words) if word == "--grid"]
        job = [word for word in words if JOB_WORD.match(word) and "," not in word.partition("[")[0]]
        assert main([*config, *job, *grid, "--print-config"]) == DONE, words
    for text in code:
        compile(text, path.parent.name, "exec")


SOLUTIONS = [
    pytest.param(path, ranks, words, id=f"{path.parent.name[0]}-{number}")
    for path in LABS
    for number, (ranks, words) in enumerate(
        [*solutions_of(path)[0], *(("", text) for text in solutions_of(path)[1])]
    )
]


@pytest.mark.slow
@needs_mpirun
@pytest.mark.parametrize(("path", "ranks", "words"), SOLUTIONS)
def test_a_solution_runs(path: Path, ranks: str, words: list[str] | str, tmp_path: Path) -> None:
    """Jobs make 2 steps. words: of a command, or Python."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    if isinstance(words, str):
        argv = ["-c", words]
    else:
        on_ranks = ["launch", "-np", ranks, "--oversubscribe", "--"] if ranks else []
        few = [] if words[0] == "plan" else ["stop.steps=2"]
        argv = ["-m", "hvdtrain", *on_ranks, *words, *few]
    with Job(0, argv, env={"PYTHONPATH": str(path.parent)}, cwd=tmp_path) as job:
        done = job.wait()
    assert done.returncode == 0, done
