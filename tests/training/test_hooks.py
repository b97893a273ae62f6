"""Hooks: when they are called, what they log, their state over a resume, a stop that all ranks
agree on; what is refused."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hooks_on_ranks import JOB, Ends, OfRank0, Recorder
from lost_ranks import finish
from pool import alone
from ranks import mpirun, needs_extra, needs_mpirun

import hvdtrain
from hvdtrain.errors import UserError
from hvdtrain.training.checkpoint.resume import newest_good

STEPS = 72  # of three epochs


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def train(folder: Path, *words: str, hooks: list[Any]) -> hvdtrain.Run:
    return hvdtrain.train({"run": str(folder)}, *JOB.split(), *words, hooks=hooks)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recorder]:
    """A run without a stop, and what its hook has seen."""
    recorder = Recorder()
    run = tmp_path_factory.mktemp("hooks") / "straight"
    train(run, hooks=[recorder, OfRank0()])
    return run, recorder


def test_hooks_are_called_in_the_order_of_the_loop(straight: tuple[Path, Recorder]) -> None:
    run, recorder = straight
    assert recorder.steps == list(range(1, STEPS + 1))
    assert recorder.calls[0] == ("start", 0, [])
    evaluated = [(event["step"], event["val_accuracy"]) for event in events(run, "epoch")]
    assert [
        (call[1], call[2]["accuracy"]) for call in recorder.calls if call[0] == "evaluation"
    ] == evaluated
    assert recorder.calls[-2:] == [("end", STEPS), ("checkpoint", STEPS)] or recorder.calls[
        -2:
    ] == [("checkpoint", STEPS), ("end", STEPS)]


def test_events_have_the_means_of_what_hooks_log(straight: tuple[Path, Recorder]) -> None:
    run, _ = straight
    steps = events(run, "step")
    assert all(
        event["logged"].keys() == {"weight", "my_rank", "own_loss", "of_rank_0", "step"}
        for event in steps
    )
    assert all(event["logged"]["of_rank_0"] == 10 for event in steps)
    assert all(
        math.isclose(event["logged"]["own_loss"], event["loss"], rel_tol=1e-12)
        for event in steps[:3]
    )
    weights = [event["logged"]["weight"] for event in steps]
    assert weights == sorted(weights) and weights[0] > 0
    assert [event["logged"]["error"] for event in events(run, "epoch")] == [
        1 - event["val_accuracy"] for event in events(run, "epoch")
    ]
    assert "logged.weight" in hvdtrain.read(run).columns


class LogsLoss(hvdtrain.Hook):
    def after_step(self, training: Any) -> None:
        training.log(own_loss=training.loss)


def test_the_loss_of_tokens_is_a_mean_over_tokens(tmp_path: Path) -> None:
    words = (
        "data.name=digit_tokens:windows data.levels=4 data.side=4 task.name=language "
        "model.name=gpt model.layers=1 model.heads=1 model.width=8"
    )
    run = hvdtrain.train(
        {"run": str(tmp_path / "run"), "stop.steps": 3, "log.every_steps": 1},
        *words.split(),
        hooks=[LogsLoss()],
    )
    steps = events(run.folder, "step")
    assert len(steps) == 3 and all(
        math.isclose(event["logged"]["own_loss"], event["loss"], rel_tol=1e-6) for event in steps
    )


def test_hooks_change_nothing_of_the_training(
    straight: tuple[Path, Recorder], tmp_path: Path
) -> None:
    train(tmp_path / "without", hooks=[])
    ours, theirs = (
        [event["loss"] for event in events(run, "step")]
        for run in (straight[0], tmp_path / "without")
    )
    assert ours == theirs
    assert all("logged" not in event for event in events(tmp_path / "without", "step"))


def test_the_state_of_a_hook_is_in_the_checkpoint(
    straight: tuple[Path, Recorder], tmp_path: Path, capsys: Any
) -> None:
    first = Recorder()
    second = Recorder()
    train(tmp_path / "run", "stop.steps=31", hooks=[first])
    train(tmp_path / "run", hooks=[second])
    assert second.calls[0] == ("start", 31, list(range(1, 32)))
    assert second.steps == straight[1].steps
    told = events(tmp_path / "run", "step")
    assert [event["logged"]["weight"] for event in told if event["step"] > 35] == [
        event["logged"]["weight"] for event in events(straight[0], "step") if event["step"] > 35
    ]
    train(tmp_path / "run", "epochs=4", hooks=[])
    assert (
        "the checkpoint contains state for hook Recorder, which this job does not define"
        in capsys.readouterr().out
    )


def test_a_hook_ends_the_job(tmp_path: Path, capsys: Any) -> None:
    run = train(tmp_path / "run", hooks=[Ends()])
    assert (run.code, run.why, run.steps) == (0, "hook Ends: nine steps are enough", 14)
    assert [event["step"] for event in events(run.folder, "epoch")] == [14]
    again = train(tmp_path / "run", hooks=[Ends()])
    assert (again.why, again.steps) == (run.why, 14)
    further = train(tmp_path / "run", "epochs=4", hooks=[Ends()])
    assert (further.why, further.steps) == ("epochs=4", 96)
    assert "hooks   Ends" in capsys.readouterr().out


def test_hooks_of_the_command_line(tmp_path: Path) -> None:
    """By import path; a run folder alone does not import them."""
    words = [*JOB.split(), "stop.steps=14"]
    run = hvdtrain.train(
        {
            "run": str(tmp_path / "run"),
            "hooks": ["hooks_on_ranks:Recorder", "hooks_on_ranks:OfRank0"],
        },
        *words,
    )
    assert events(run.folder, "step")[-1]["logged"].keys() == {
        "weight",
        "my_rank",
        "own_loss",
        "of_rank_0",
        "step",
    }
    with pytest.raises(UserError, match="imports code, and only the run folder names it") as caught:
        hvdtrain.train(f"resume={run.folder}", "stop.steps=20")
    assert 'hooks=["hooks_on_ranks:Recorder", "hooks_on_ranks:OfRank0"]' in caught.value.fix
    more = hvdtrain.train(
        f"resume={run.folder}", "stop.steps=20", caught.value.fix.rpartition("argument ")[2]
    )
    assert more.steps == 20


class Wrong(hvdtrain.Hook):
    """Does in one call what it is made with."""

    def __init__(self, call: str, does: Any) -> None:
        def called(training: Any, metrics: Any = None) -> Any:
            return does(training)

        setattr(self, call, called)


class WithState(hvdtrain.Hook):
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state


AFTER_RESUME = "of hook WithState would change on a resume: "


@pytest.mark.parametrize(
    ("hooks", "what"),
    [
        (["Recorder"], "'Recorder' is not a hook"),
        (Recorder(), "hooks is a Recorder"),
        (
            [Wrong("after_step", lambda training: training.log(loss=1.0))],
            "loss is a name that the trainer uses",
        ),
        (
            [Wrong("after_step", lambda training: training.log(mine="high"))],
            "mine is a str, not a number",
        ),
        (
            [Wrong("after_step", lambda training: training.log(mine=np.ones(3)))],
            r"mine is of shape \(3,\)",
        ),
        (
            [Wrong("on_end", lambda training: training.stop("late"))],
            r"training.stop\(\) in on_end\(\): training is over",
        ),
        (
            [WithState({"best": math.nan})],
            r"state_dict\(\) of hook WithState returned something that is not",
        ),
        (
            [WithState({"seen": {1, 2}})],
            r"state_dict\(\) of hook WithState returned something that is not",
        ),
        (
            [WithState({"n": {0: 1, "0": 2}})],
            rf"{AFTER_RESUME}state\['n'\] has the key 0, and would have a text",
        ),
        (
            [WithState({"log": [1, (2, 3)]})],
            rf"{AFTER_RESUME}state\['log'\]\[1\] is a tuple, and would be a list",
        ),
        (
            [WithState({"n": Counter("a")})],
            rf"{AFTER_RESUME}state\['n'\] is a Counter, and would be a dict",
        ),
    ],
)
def test_what_a_hook_must_not_do(hooks: Any, what: str, tmp_path: Path) -> None:
    """What a checkpoint would change is an error after the first step."""
    with pytest.raises(UserError, match=what):
        train(tmp_path / "run", "stop.steps=3", hooks=hooks)
    assert (
        "state_dict" not in what
        or not (tmp_path / "run/checkpoints").exists()
        or not any((tmp_path / "run/checkpoints").iterdir())
    )


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("hooks_on_ranks:jobs", "cannot be called without arguments"),
        ("os:system", "os:system is part of Python"),
        ("hooks_on_ranks:Path", "makes a PosixPath, not a hook|part of Python"),
        ("no.such:Hook", "no module named no"),
    ],
)
def test_names_that_mean_no_hook(name: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=what) as caught:
        hvdtrain.train(
            {"run": str(tmp_path / "run"), "stop.steps": 1}, *JOB.split(), f"hooks=[{name}]"
        )
    assert caught.value.where.startswith("hooks, ")


@needs_mpirun
def test_hooks_on_two_ranks(straight: tuple[Path, Recorder], tmp_path: Path) -> None:
    """Means are over ranks, the state is rank 0's on each, and all end together; weights in parts
    are gathered."""
    done = mpirun(2, alone("hooks_on_ranks:jobs", str(tmp_path), "mpi"))
    assert done.returncode == 0, done.stdout + done.stderr
    steps = events(tmp_path / "resumed", "step")
    expected = events(straight[0], "step")
    assert {event["logged"]["my_rank"] for event in steps} == {0.5} and {
        event["logged"]["of_rank_0"] for event in steps
    } == {10}
    ours, theirs = (
        {event["step"]: event["logged"]["weight"] for event in run} for run in (steps, expected)
    )
    assert all(
        math.isclose(ours[step], theirs[step], rel_tol=1e-12) for step in theirs if step > 14
    )
    assert json.loads((tmp_path / "recorder.json").read_text()) == list(range(1, STEPS + 1))
    written = json.loads((tmp_path / "weights.json").read_text())
    _, arrays, _ = newest_good(tmp_path / "parts", 2**30)
    assert written == {name: arrays[f"p.{name}"].tolist() for name in ("fc.weight", "fc.bias")}


@needs_extra("elastic")
@needs_mpirun
def test_hooks_go_back_with_the_ranks_that_are_left(tmp_path: Path) -> None:
    """Steps after the sync point are made again, and are logged once."""
    (done,) = finish("mpi", 3, alone("hooks_on_ranks:job_that_loses_a_rank", str(tmp_path)))
    assert done.returncode == 0, done
    logged = {
        event["step"]: event["logged"]["step"] for event in events(tmp_path / "shrunk", "step")
    }
    assert logged[7] == 4 and logged[14] == 11, logged
