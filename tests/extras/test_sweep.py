"""sweep: which trials it makes, what it rejects, how it resumes, and its table."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import HANG_S, ROOT, environment, needs_mpirun
from waiting import wait_until

from hvdtrain.__main__ import main
from hvdtrain.core.extras import shows_run
from hvdtrain.errors import BUG, DIVERGED, DONE, REQUEUE, UserError
from hvdtrain.extras.sweep.arguments import USAGE, read_options
from hvdtrain.extras.sweep.command import exit_code, shares, sweep
from hvdtrain.extras.sweep.figure import SweepPoint, draw_sweep
from hvdtrain.extras.sweep.optuna_study import OptunaStudy
from hvdtrain.extras.sweep.space import Point, grid_points, random_points, read_space
from hvdtrain.extras.sweep.trials import (
    EXITS,
    FILE,
    Result,
    Sweep,
    Trial,
    append_exit,
    error_line,
    locked_sweep,
    read_exits,
    rows_of,
    state_of,
    table_lines,
    take_up_sweep,
    write_sweep,
)
from hvdtrain.records.run import ACCURACY, RunMetric

JOB = ["framework=numpy", "model.name=linear"]
LOSS = RunMetric("loss", lower_is_better=True)


def test_a_grid_is_all_combinations_and_the_last_list_varies_fastest() -> None:
    space = read_space(["model.widths=[64,64],[32]", "seed=1,2"], [])
    assert grid_points(space, None) == [
        ("model.widths=[64,64]", "seed=1"),
        ("model.widths=[64,64]", "seed=2"),
        ("model.widths=[32]", "seed=1"),
        ("model.widths=[32]", "seed=2"),
    ]


def test_draws_are_those_of_the_seed_within_their_ranges_and_more_trials_begin_with_the_same() -> (
    None
):
    space = read_space(
        ["seed=1,2"], ["optim.base_lr=log:0.001:1", "batch.size=logint:8:512", "epochs=int:1:3"]
    )
    points = random_points(space, 60, 7)
    assert points == random_points(space, 60, 7) != random_points(space, 60, 8) and points[
        :20
    ] == random_points(space, 20, 7)
    assert (
        len(set(points)) == 60 and [point[-1] for point in points[:4]] == ["seed=1", "seed=2"] * 2
    )
    values = [dict(argument.split("=") for argument in point) for point in points[::2]]
    rates = [math.log10(float(value["optim.base_lr"])) for value in values]
    # 30 draws, half of them expected
    assert min(rates) >= -3 and max(rates) <= 0 and 8 <= sum(rate < -1.5 for rate in rates) <= 22
    assert {value["epochs"] for value in values} == {"1", "2", "3"} and all(
        8 <= int(value["batch.size"]) <= 512 for value in values
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "nothing to sweep"),
        ("--grid optim.base_lr=0.1,0.1", "optim.base_lr=0.1 is listed twice"),
        ("--grid optim.base_lr=0.1,,0.2", "optim.base_lr has an empty value"),
        ("--grid optim.base_lr=0.1 --random optim.base_lr=log:1:2", "optim.base_lr is swept twice"),
        ("--grid optim.base_lr=0.1 optim.base_lr=0.2", "optim.base_lr is both given and swept"),
        ("--grid optim.base_rl=0.1", "optim.base_rl"),
        ("--grid optim.base_lr=0.1,fast", "optim.base_lr.*\n.*in the trial optim.base_lr=fast"),
        ("--grid run=a,b", "run cannot be swept"),
        ("--grid seed=1,2 resume=old", "a sweep sets resume itself"),
        ("--grid optim.base_lr", "cannot read --grid optim.base_lr"),
        ("--random optim.base_lr=log:0:1", "a logarithmic range begins above 0, not at 0"),
        ("--random optim.base_lr=log:1:0.1", "1 is not below 0.1"),
        ("--random optim.base_lr=lg:0.1:1", "unknown range: lg\n.*\n.*log"),
        ("--random optim.base_lr=log:0.1", "log takes two numbers"),
        ("--random epochs=int:1:2.5", "int takes two whole numbers"),
        (f"--random epochs=int:1:1{'0' * 400}", "int takes two whole numbers"),
        ("--random optim.base_lr=0.1,0.2", "0.1,0.2 is a list, not a range"),
        ("--random optim.base_lr=log:0.1:1", "the number of trials is missing"),
        (
            "--random optim.base_lr=log:0.1:1 --sampler grid",
            "optim.base_lr has a range, but a grid needs lists",
        ),
        ("--grid seed=1,2 --sampler random --trials 9", "only the seed is swept"),
        (
            "--grid seed=1,2,3 --random optim.base_lr=log:0.1:1 --trials 2",
            "each draw is trained with 3 seeds, but there are only 2 trials",
        ),
        (
            "--grid optim.base_lr=0.1,0.2 --sampler random --trials 3",
            "these lists have 2 combinations",
        ),
        (
            "--grid seed=1,2 --random optim.base_lr=log:0.1:1 --sampler optuna --trials 4",
            "the seed is not a value to search for",
        ),
        ("--grid optim.base_lr=0.1,0.2,0.3 --trials 2", "the grid has 3 trials"),
        ("--grid optim.base_lr=0.1 --sampler gird", "there is no sampler gird\n.*\n.*grid"),
        ("--grid optim.base_lr=0.1 --trials none", "--trials none is not a number from 1"),
        ("--grid optim.base_lr=0.1 --at-onec 2", "unknown argument '--at-onec'\n.*\n.*--at-once"),
        (
            "--grid optim.base_lr=0.1 --bogus",
            "unknown argument '--bogus'\n.*\n  fix: known: --config, ",
        ),
        ("--grid optim.base_lr=0.1 epochs", "unknown argument 'epochs'"),
        ("--grid batch.size=64,1 --ranks-per-trial 2", "in the trial batch.size=1"),
        ("--grid lr=0.1 --", "the script is missing\n.*after --\n.*-- train.py"),
        ("--grid lr=0.1 -- epochs=1", "'epochs=1' is not a script"),
        ("--grid lr=0.1 -- none.py", "there is no script none.py"),
        (f"--grid lr=0.1 --config x -- {__file__}", "--config is for jobs of hvdtrain"),
        (f"--grid run=a,b -- {__file__}", "run cannot be swept"),
        (f"--grid lr=0.1 -- {__file__} resume=a", "a sweep sets resume itself"),
        (f"--grid lr=0.1 -- {__file__} lr=1", "lr is both given and swept"),
        (f"--random lr=lg:0.1:1 -- {__file__}", "unknown range: lg"),
        (f"--grid lr=0.1,0.1 -- {__file__}", "lr=0.1 is listed twice"),
    ],
)
def test_bad_input_is_an_error_before_a_trial_starts(
    words: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        sweep(["--out", str(tmp_path / "s"), *JOB, *words.split()])
    assert not (tmp_path / "s").exists()


def test_a_folder_belongs_to_one_sweep(tmp_path: Path) -> None:
    mine = Sweep(
        "random", 1, [], ["optim.base_lr=log:0.1:1"], 1, ["epochs: 1"], [("a=1",), ("a=2",)]
    )
    assert take_up_sweep(tmp_path, mine, "here") is mine
    write_sweep(tmp_path, mine)
    more = Sweep(**(vars(mine) | {"trials": [*mine.trials, ("a=3",)]}))
    assert (
        take_up_sweep(tmp_path, more, "here") == more
        and take_up_sweep(tmp_path, mine, "here") == mine
    )
    for change, message in (
        ({"seed": 2}, "--seed 2, there it is 1"),
        ({"config": ["epochs: 2"]}, "their configurations differ: epochs is 2 here, there it is 1"),
        (
            {"config": ["epochs: 1", "batch:", "  size: 8"]},
            "differ: batch.size is 8 here, there it is not set",
        ),
        (
            {"config": ["epochs: 1", "a:", "  b:", "  - 8", "  - 16", "c: 3"]},
            r"differ: a.b is \[8, 16\] here, there it is not set",
        ),
        ({"config": ["epochs: [1"]}, "is not a record of a sweep"),
        ({"trials": [("a=2",)]}, "its trials are others"),
    ):
        with pytest.raises(UserError, match=message):
            take_up_sweep(tmp_path, Sweep(**(vars(mine) | change)), "here")
    for text in ("{", "[]", '{"version": 9, "trials": []}', '{"version": 1, "trials": []}'):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(UserError, match=r"sweep\.json"):
            take_up_sweep(tmp_path, mine, "here")
    (tmp_path / FILE).rename(tmp_path / "thesis.txt")
    with pytest.raises(UserError, match="contains other files"):
        take_up_sweep(tmp_path, mine, "here")
    with (
        locked_sweep(tmp_path),
        pytest.raises(UserError, match="another sweep runs in"),
        locked_sweep(tmp_path),
    ):
        pass


def test_the_last_whole_line_of_a_trial_counts(tmp_path: Path) -> None:
    append_exit(tmp_path, "trial-0001", REQUEUE, "stopped", "")
    append_exit(tmp_path, "trial-0001", DONE, "done", "")
    append_exit(tmp_path, "trial-0002", BUG, "failed", "ValueError: no")
    with (tmp_path / EXITS).open("a") as file:
        file.write('{"trial": "trial-0002", "code": 0, "sta')
    assert read_exits(tmp_path) == {
        "trial-0001": ("done", ""),
        "trial-0002": ("failed", "ValueError: no"),
    }


def test_what_an_exit_code_means() -> None:
    codes = [
        (DONE, False),
        (REQUEUE, False),
        (REQUEUE, True),
        (DIVERGED, False),
        (BUG, False),
        (137, True),
    ]
    assert [state_of(*one) for one in codes] == [
        "done",
        "stopped",
        "pruned",
        "diverged",
        "failed",
        "failed",
    ]


def test_the_exit_code_of_a_sweep() -> None:
    assert [
        exit_code(states, 0)
        for states in (["done", "failed"], ["diverged", "pruned"], ["diverged", "failed"])
    ] == [
        DONE,
        DIVERGED,
        BUG,
    ]
    assert exit_code(["done", "stopped"], 1) == exit_code(["diverged", "waiting"], 1) == REQUEUE
    for code in (DIVERGED, BUG, REQUEUE):
        assert f" {code}: " in USAGE


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("step 1\nhvdtrain: no such key\n  where: a\n  fix: b\n", "no such key"),
        (
            "Traceback:\n  x\nValueError: no\nthe error above ends the job\nmpirun has ended\n",
            "ValueError: no",
        ),
        ("a\n\nlast\n\n", "last"),
        ("", ""),
    ],
)
def test_the_line_that_says_why_a_trial_failed(log: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(log)
    assert error_line(tmp_path / "log") == line
    assert error_line(tmp_path / "none") == "no log: No such file or directory"


def done(*values: float, metric: RunMetric = ACCURACY) -> Result:
    return Result("done", metric, values, 2.0, 10.0, "")


def test_the_table_has_the_mean_over_the_seeds_and_the_best_row_first() -> None:
    worse = ("optim.base_lr=0.1",)
    better = ("optim.base_lr=1",)
    results = {
        Trial(1, (*worse, "seed=1")): done(0.5, 0.75),
        Trial(2, (*worse, "seed=2")): done(0.9, 0.25),
        Trial(3, (*better, "seed=1")): done(0.625),
        Trial(4, (*better, "seed=2")): Result("failed", ACCURACY, (), math.nan, math.nan, "no"),
        Trial(5, ("optim.base_lr=2", "seed=1")): Result(
            "diverged", ACCURACY, (0.1,), 1.0, 3.0, "NaN"
        ),
    }
    first, second, third = rows_of(results)
    assert (first.point, first.mean, first.done, first.states) == (
        better,
        0.625,
        1,
        "1 done, 1 failed",
    ) and math.isnan(first.sd)
    assert (second.point, second.mean, second.best) == (
        worse,
        0.5,
        0.825,
    ) and second.sd == pytest.approx(math.sqrt(0.125), rel=1e-12)
    assert (third.done, third.states) == (0, "diverged")
    assert [line.split() for line in table_lines([first, second, third], ACCURACY)][:3] == [
        ["optim.base_lr", "accuracy", "sd", "n", "best", "epochs", "seconds", "trials"],
        ["1", "1", "62.50%", "1", "62.50%", "2.00", "10.0", "3,4", "1", "done,", "1", "failed"],
        ["2", "0.1", "50.00%", "35.36%", "2", "82.50%", "2.00", "10.0", "1,2", "2", "done"],
    ]
    losses = {Trial(1, worse): done(2.0, metric=LOSS), Trial(2, better): done(1.0, metric=LOSS)}
    assert [row.point for row in rows_of(losses)] == [better, worse]


@pytest.mark.parametrize(
    "keys",
    [
        ["optim.base_lr"],
        ["optim.base_lr", "optim.name"],
        ["optim.base_lr", "optim.name", "epochs", "model.widths"],
    ],
)
def test_the_figure_has_a_panel_for_each_key(keys: list[str], tmp_path: Path) -> None:
    values = {
        "optim.base_lr": ["0.01", "0.1", "1"],
        "optim.name": ["sgd", "$x$"],
        "epochs": ["1", "2"],
        "model.widths": ["[8]", "[16,8]"],
    }
    points = [
        SweepPoint({key: values[key][i % len(values[key])] for key in keys}, 0.5 + i / 20, math.nan)
        for i in range(6)
    ]
    assert (
        "f.png" in draw_sweep(tmp_path / "f.png", "a $ title", ACCURACY, points)
        and (tmp_path / "f.png").stat().st_size > 5000
    )


def test_trials_side_by_side_share_the_machine() -> None:
    cores = len(os.sched_getaffinity(0))
    assert shares({}, 0, 1, 1) == {}
    assert (
        shares({"CUDA_VISIBLE_DEVICES": ""}, 0, cores, 1) == {"OMP_NUM_THREADS": "1"}
        and shares({"OMP_NUM_THREADS": "3"}, 0, 2, 1) == {}
    )
    parts = ["MIG-a", "MIG-b", "MIG-c"]  # of a divided GPU
    environ = {"CUDA_VISIBLE_DEVICES": ",".join(parts), "OMP_NUM_THREADS": "1"}
    assert [shares(environ, slot, 3, 1) for slot in range(3)] == [
        {"CUDA_VISIBLE_DEVICES": part} for part in parts
    ]


def test_optuna_learns_and_goes_on_from_what_is_recorded() -> None:
    """The objective is -(log10(rate) + 1)^2, best at 0.1."""
    space = read_space([], ["optim.base_lr=log:0.0001:10"])
    results = {}
    points = []

    def study(trials: int, recorded: list[Point]) -> OptunaStudy:
        return OptunaStudy(
            space, 3, trials, recorded, lambda trial: results.get(trial, waiting), points.append
        )

    waiting = Result("waiting", ACCURACY, (), math.nan, math.nan, "")
    first = study(12, [])
    while (trial := first.following()) is not None:
        results[trial] = done(-((math.log10(float(trial.point[0].partition("=")[2])) + 1) ** 2))
        first.ended(trial, results[trial])
    again = study(25, list(points))
    while (trial := again.following()) is not None:
        results[trial] = done(-((math.log10(float(trial.point[0].partition("=")[2])) + 1) ** 2))
        again.ended(trial, results[trial])
    assert len(points) == len(results) == 25 and [trial.point for trial in results] == points
    errors = [-result.last for result in results.values()]
    assert sum(errors[-8:]) < sum(errors[:8]) / 2, errors
    poor = study(26, list(points))
    hopeless = Result("waiting", ACCURACY, (-99.0,), 1.0, 1.0, "")
    trial = poor.following()
    assert trial is not None
    results[trial] = hopeless
    assert poor.is_hopeless(trial)
    results[trial] = hopeless._replace(values=(-1e-9,))
    poor = study(26, points[:25])
    assert not poor.is_hopeless(poor.following() or trial)


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hvdtrain", "sweep", *arguments]
    return subprocess.run(
        command, check=False, env=environment(), cwd=ROOT, text=True, capture_output=True
    )


# a script whose job ends as its key `end` says, with the loss lr; `end=silent` writes no run
SCRIPT = """
import json, pathlib, sys

words = dict(word.split("=") for word in sys.argv[1:])
if words["end"] == "silent":
    sys.exit()
how, code, script_code = words["end"].split(":")
run = pathlib.Path(words["run"])
run.mkdir(exist_ok=True)
loss = {"objective": "loss", "metrics": {"loss": {"better": "min"}}}
events = [
    {"time": 1.0, "kind": "start", "step": 0, **loss},
    {"time": 2.0, "kind": "epoch", "step": 1, "epochs": 1.0, "val_loss": float(words["lr"])},
    {"time": 3.0, "kind": how, "step": 1, "exit_code": int(code), "reason": "it"},
]
(run / "events.jsonl").write_text("".join(json.dumps(event) + "\\n" for event in events))
sys.exit(int(script_code))
"""


def test_a_sweep_of_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its keys are its own. A script that ends with 0 is not done if its job is not."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    own = ["--grid", "lr=0.5,0.25", "--out", "s", "--at-once", "2", "--json", "s.json"]
    assert sweep([*own, "--", "python", "train.py", "end=end:0:0"]) == DONE
    output, progress = capsys.readouterr()
    found = json.loads(Path("s.json").read_text())
    assert [(row["values"], row["mean"]) for row in found["rows"]] == [
        ({"lr": "0.25"}, 0.25),
        ({"lr": "0.5"}, 0.5),
    ]
    assert "best        python train.py end=end:0:0 lr=0.25" in output and "loss 0.25" in progress
    with pytest.raises(UserError, match=r"contains another sweep: -- train.py end=stop:75:0, "):
        sweep([*own, "--", "train.py", "end=stop:75:0"])
    ends = "end:0:0,stop:75:0,failed:82:1,failed:1:1,silent,start:0:0"
    out = ["--out", "t", "--json", "t.json", "lr=1"]
    assert sweep(["--grid", f"end={ends}", *out, "--", "train.py"]) == REQUEUE
    trials = json.loads(Path("t.json").read_text())["trials"].values()
    assert [trial["state"] for trial in trials] == [
        "done",
        "stopped",
        "diverged",
        "failed",
        "failed",
        "failed",
    ]
    assert "has written no run" in (errors := [trial.get("error", "") for trial in trials])[4]
    assert "ended before its job" in errors[5]


def test_a_trial_of_a_script_on_several_ranks_is_started_by_launch() -> None:
    options, planned = read_options(
        ["--grid", "a=1", "--ranks-per-trial", "2", "b=2", "--out", "s", "--", "-m", "json", "c"]
    )
    assert options.trial_command(["a=1"])[1:] == [
        "-m", "hvdtrain", "launch", "-np", "2", "--", "-m", "json", "c", "b=2", "a=1",
    ]  # fmt: skip
    assert options._replace(ranks=1).trial_command([])[1:] == ["-m", "json", "c", "b=2"]
    assert planned.script == ["-m", "json", "c", "b=2"] and planned.config == []


@pytest.mark.slow
def test_a_sweep_of_real_jobs(tmp_path: Path) -> None:
    """Two at once; one diverges, which is a result; the same command starts nothing; further trials
    come behind."""
    out = tmp_path / "s"
    words = [
        *JOB,
        "epochs=1",
        "--out",
        str(out),
        "--at-once",
        "2",
        "--json",
        str(tmp_path / "s.json"),
    ]
    grid = ["--grid", "optim.base_lr=0.05,1e6", "--grid", "seed=1,2", "guard.nonfinite=stop"]
    first = run([*words, *grid])
    assert first.returncode == DONE, first
    found = json.loads((tmp_path / "s.json").read_text())
    assert [trial["state"] for trial in found["trials"].values()].count("done") >= 2, found
    best = found["rows"][0]
    assert (
        best["values"] == {"optim.base_lr": "0.05"}
        and best["n"] == 2
        and best["mean"] > 0.7
        and best["sd"] >= 0
    )
    assert (out / "sweep.png").read_bytes()[:4] == b"\x89PNG" and "0.05" in (
        out / "sweep.txt"
    ).read_text()
    assert (
        "best        " in first.stdout
        and "optim.base_lr=0.05" in first.stdout
        and "(4 of 4)" in first.stderr
    )
    ends = {path: path.stat().st_mtime_ns for path in out.glob("trial-*/events.jsonl")}
    again = run([*words, *grid])
    assert again.returncode == DONE and "4 kept from before" in again.stderr, again
    assert {path: path.stat().st_mtime_ns for path in out.glob("trial-*/events.jsonl")} == ends
    other = run([*words, "--grid", "optim.base_lr=0.1"])
    assert other.returncode == 2 and "contains another sweep" in other.stderr


@pytest.mark.slow
def test_what_is_printed_can_be_typed_and_where_all_trials_diverge_the_code_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    few = [*JOB, "stop.steps=9", "epochs=null", "guard.nonfinite=stop"]
    assert sweep([*few, "--grid", "optim.base_lr=0.05", "--out=-x"]) == DONE
    said = capfd.readouterr().out.splitlines()
    for name in shows_run():
        line = next(line for line in said if line.startswith(f"{name}  "))
        assert main([name, *shlex.split(line.partition(f" {name} ")[2])]) == DONE, line
    explosive = ["optim.weight_decay=1e6", "optim.exclude=none"]
    assert (
        sweep([*few, *explosive, "--grid", "optim.base_lr=1e6", "--out", "explosive"]) == DIVERGED
    )


@pytest.mark.slow
def test_fewer_trials_than_optuna_has_made_already_are_kept(tmp_path: Path) -> None:
    words = [
        *JOB,
        "epochs=1",
        "--random",
        "optim.base_lr=log:0.01:1",
        "--sampler",
        "optuna",
        "--out",
        str(tmp_path / "s"),
    ]
    first, fewer = run([*words, "--trials", "2"]), run([*words, "--trials", "1"])
    assert first.returncode == fewer.returncode == DONE, (first, fewer)
    assert "2 trials, 2 kept from before" in fewer.stderr and "stopped" not in fewer.stdout, fewer


@pytest.mark.slow
def test_a_sweep_of_a_script_with_train(tmp_path: Path) -> None:
    """Its arguments reach hvdtrain.train(); a trial is an ordinary run."""
    script = tmp_path / "train.py"
    script.write_text("import sys\nimport hvdtrain\nhvdtrain.train(*sys.argv[1:])\n")
    words = ["--grid", "optim.base_lr=0.05,0.1", "--out", str(tmp_path / "s"), "--json"]
    swept = run([*words, str(tmp_path / "s.json"), "--", str(script), *JOB, "epochs=1"])
    assert swept.returncode == DONE, swept
    found = json.loads((tmp_path / "s.json").read_text())
    assert found["objective"] == "accuracy" and all(row["mean"] > 0.5 for row in found["rows"])
    assert "optim.base_lr: 0.1" not in (tmp_path / "s" / "sweep.json").read_text()
    config = (tmp_path / "s" / "trial-0002" / "config.yaml").read_text()
    assert "base_lr: 0.1" in config


@pytest.mark.slow
@needs_mpirun
def test_a_sweep_that_is_stopped_goes_on(tmp_path: Path) -> None:
    """On two ranks; each trial is resumed from its checkpoint, and ends as if it had not been
    stopped."""
    words = [
        *JOB,
        "epochs=50",
        "--grid",
        "seed=1,2",
        "--ranks-per-trial",
        "2",
        "--out",
        str(tmp_path / "s"),
    ]
    command = [sys.executable, "-m", "hvdtrain", "sweep", *words]
    with subprocess.Popen(
        command,
        env=environment(),
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as started:
        events = tmp_path / "s" / "trial-0001" / "events.jsonl"

        def trains() -> bool:
            assert started.poll() is None, started.communicate()
            return events.exists() and b'"kind": "step"' in events.read_bytes()

        wait_until(trains, "a step of the first trial")
        started.send_signal(signal.SIGUSR2)
        output, progress = started.communicate(timeout=HANG_S)
    assert (
        started.returncode == REQUEUE
        and "2 of 2 trials are not done; the same command resumes" in output
    ), (output, progress)
    again = run(words)
    assert (
        again.returncode == DONE
        and "trial-0001  resumes" in again.stderr
        and "(2 of 2)" in again.stderr
    ), again
    assert "resume  from step" in (tmp_path / "s" / "trial-0001.log").read_text()
    assert [
        line.split()[-1] for line in (tmp_path / "s" / "sweep.txt").read_text().splitlines()[1:]
    ] == ["done"], again.stdout
