"""The clock of a job: where stop.steps, fractions of epochs and stop.time end it, and evaluations
within an epoch."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import FULL, mpirun, needs_mpirun, python
from safetensors.numpy import load_file

from hvdtrain.__main__ import main
from hvdtrain.config.read import configure
from hvdtrain.core.progress import Progress
from hvdtrain.data.sampler import evaluated_samples
from hvdtrain.training.checkpoint import files
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.progress.triggers import evaluation_due, is_sync_point, stop_reason

# 157 samples in steps of 31: epochs end after 5.06, 10.1, 15.2 steps
JOB = (
    "framework=numpy model.name=linear data.name=synthetic data.samples=157 data.val_samples=61 "
    "data.classes=5 data.shape=[4,4,2]"
)
FAST = [
    *JOB.split(),
    "speed.precision=fp64",
    "batch.size=31",
    "optim.base_lr=0.05",
    "optim.momentum=0.5",
]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def events(run: str, kind: str) -> list[dict[str, Any]]:
    return [
        e
        for e in map(json.loads, Path(run, "events.jsonl").read_text().splitlines())
        if e["kind"] == kind
    ]


def weights(run: str) -> dict[str, np.ndarray]:
    newest = files.finished(Path(run))[-1]
    return {
        f"{file}/{k}": a
        for file in ("weights", "optimizer")
        for k, a in load_file(newest / f"{file}.safetensors").items()
    }


def same(a: str, b: str) -> bool:
    left = weights(a)
    right = weights(b)
    return left.keys() == right.keys() and all(
        np.array_equal(left[name], right[name]) for name in left
    )


def evaluations(run: str) -> list[tuple[int, int, float]]:
    return [
        (e["step"], e["epoch"], round(31 * e["step"] / 157 - e["epochs"], 12))
        for e in events(run, "epoch")
    ]


@pytest.mark.parametrize(
    ("words", "reason", "steps"),
    [
        (["epochs=0.5"], "epochs=0.5", [3]),  # 78.5 samples
        (["stop.epochs=2.25"], "epochs=2.25", [6, 11, 12]),  # 353.25
        (["stop.steps=7"], "stop.steps=7", [6, 7]),
        (["stop.steps=7", "epochs=1"], "epochs=1", [6]),
        (["epochs=1", "evaluate.every_steps=2"], "epochs=1", [2, 4, 6]),
        (["stop.steps=9", "evaluate.every_steps=4"], "stop.steps=9", [4, 6, 8, 9]),
    ],
)
def test_where_a_job_ends_and_is_evaluated(
    words: list[str], reason: str, steps: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """The last, partial epoch has an evaluation and a checkpoint too."""
    assert main([*FAST, *words, "run=r"]) == 0
    said = capsys.readouterr().out
    (end,) = events("r", "end")
    assert (end["reason"], end["step"], end["exit_code"]) == (
        reason,
        steps[-1],
        0,
    ) and f"done ({reason})" in said
    assert evaluations("r") == [
        (step, -(-31 * step // 157) - (31 * step % 157 < 31 and step > 5), 0) for step in steps
    ]
    newest = files.read_numbers(files.finished(Path("r"))[-1]).train_state
    assert (newest.progress.step, newest.evaluated) == (steps[-1], steps[-1])
    for event in events("r", "step"):
        assert event["of"] == {"epochs=0.5": 0.5, "epochs=2.25": 2.25, "epochs=1": 1}.get(
            reason, 31 * steps[-1] / 157
        )


def test_the_cosine_ends_with_the_job_and_is_resumed_at_an_evaluation_and_beside_it() -> None:
    """Resumed from the checkpoint of a step within an epoch: the rates, evaluations and weights of
    a job that never stopped."""
    words = [
        *FAST,
        "stop.steps=20",
        "recipe.schedule=cosine",
        "recipe.warmup=10%",
        "evaluate.every_steps=4",
        "evaluate.samples=17",
    ]
    words += ["log.every_steps=1", "checkpoint.every_steps=1", "checkpoint.keep_last=99"]
    assert main([*words, "run=whole"]) == 0
    rates = [e["lr"] for e in events("whole", "step")]
    assert rates[:2] == pytest.approx([0, 0.025])
    assert rates[2:] == pytest.approx(
        [0.05 * (1 + math.cos(math.pi * step / 18)) / 2 for step in range(18)], rel=1e-12
    )
    for at in (7, 8):  # an evaluation comes after step 8, and its checkpoint after the evaluation
        killed = cut("whole", f"killed-{at}", at)
        assert main([*words, f"run={killed}"]) == 0
        assert events(killed, "start")[-1]["step"] == at and same("whole", killed)
        expected = [e for e in events("whole", "epoch") if e["step"] > at]
        after = events(killed, "epoch")[-len(expected) :]
        keys = (
            "step",
            "epoch",
            "epochs",
            "train_loss",
            "val_loss",
            "val_accuracy",
            "val_count",
            "best_accuracy",
        )
        assert [[e[key] for key in keys] for e in after] == [
            [e[key] for key in keys] for e in expected
        ]


def cut(run: str, to: str, step: int) -> str:
    """A copy of a run as a job left it that was killed after the checkpoint of a step."""
    shutil.copytree(run, to)
    for folder in files.finished(Path(to)):
        if folder.name > f"step-{step:08d}":
            shutil.rmtree(folder)
    return to


def test_evaluations_within_an_epoch_change_nothing_of_what_is_learned() -> None:
    assert main([*FAST, "epochs=2", "run=plain", "log.every_steps=1"]) == 0
    assert (
        main(
            [
                *FAST,
                "epochs=2",
                "run=often",
                "log.every_steps=1",
                "evaluate.every_steps=2",
                "evaluate.samples=9",
            ]
        )
        == 0
    )
    assert same("plain", "often")
    assert [e["loss"] for e in events("plain", "step")] == [
        e["loss"] for e in events("often", "step")
    ]


def test_part_of_the_validation_set(capsys: pytest.CaptureFixture[str]) -> None:
    """Each evaluation counts the same samples, drawn by the seed; all of them are the whole set."""
    assert main([*FAST, "epochs=1", "run=r", "evaluate.samples=20", "evaluate.every_steps=3"]) == 0
    assert (
        "157 training and 61 validation samples (20 of them in an evaluation)"
        in capsys.readouterr().out
    )
    assert [e["val_count"] for e in events("r", "epoch")] == [20, 20]
    assert events("r", "start")[0]["val_samples"] == 61
    assert main([*FAST, "epochs=1", "run=r", "evaluate.samples=30"]) == 2
    assert (
        "r is complete (epochs=1), so the change would have no effect: evaluate.samples is 20 "
        "there, 30 here"
    ) in capsys.readouterr().err
    assert main([*FAST, "epochs=1", "run=big", "evaluate.samples=62"]) == 2
    assert "evaluate.samples=62 is more than the 61 validation samples" in capsys.readouterr().err


def test_the_part_is_drawn_by_the_seed_without_repetition() -> None:
    found = [evaluated_samples(1000, 100, seed) for seed in range(50)]
    assert all(np.array_equal(np.unique(part), part) and len(part) == 100 for part in found)
    assert np.array_equal(evaluated_samples(1000, 100, 3), found[3])
    counts = np.bincount(np.concatenate(found), minlength=1000)  # 5 of each on average
    assert ((counts - 5) ** 2 / (5 * 0.9)).sum() < 1000 + 4 * math.sqrt(2000)
    assert np.array_equal(evaluated_samples(61, 61, 1), np.arange(61))


def test_stop_target_for_counts_evaluations(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                *FAST,
                "epochs=9",
                "run=r",
                "evaluate.every_steps=1",
                "stop.target=0.0",
                "stop.target_for=3",
            ]
        )
        == 0
    )
    assert "done (stop.target=0 held for 3 evaluations)" in capsys.readouterr().out
    assert [e["step"] for e in events("r", "epoch")] == [1, 2, 3]


def test_a_job_that_its_time_ends_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    """Over all its runs: earlier time counts, and a longer limit resumes the job."""
    words = [*FAST, "log.every_steps=5", "run=r"]
    assert main([*words, "stop.time=0.2s"]) == 0
    said = capsys.readouterr().out
    (end,) = events("r", "end")
    assert end["reason"] == "stop.time=0.2s" and end["seconds"] >= 0.2
    assert events("r", "epoch")[-1]["step"] == end["step"], "evaluated at its end"
    assert events("r", "step")[-1]["of"] is None and events("r", "start")[0]["max_seconds"] == 0.2
    assert f"resume=r stop.time={2 * math.ceil(end['seconds'])}s\n" in said
    before = Path("r/events.jsonl").read_bytes()
    assert main([*words, "stop.time=0.2s"]) == 0
    assert (
        "nothing to do" in capsys.readouterr().out and Path("r/events.jsonl").read_bytes() == before
    )
    assert main([*words, "stop.time=0.2s", f"stop.steps={end['step'] + 7}"]) == 2
    assert "r is complete (stop.time=0.2s)" in capsys.readouterr().err
    assert main([*words, "stop.time=2h", f"stop.steps={end['step'] + 7}"]) == 0
    assert events("r", "end")[-1]["reason"] == f"stop.steps={end['step'] + 7}"


def test_the_time_that_a_checkpoint_has_taken_ends_the_job_after_a_resume() -> None:
    """Killed between the last step and its evaluation: the evaluation is made, and no step more."""
    assert (
        main([*FAST, "epochs=1", "run=r", "checkpoint.every_steps=1", "checkpoint.keep_last=99"])
        == 0
    )
    killed = cut("r", "killed", 4)
    assert main([*FAST, "epochs=1", f"run={killed}", "stop.time=0.000001s"]) == 0
    end = events(killed, "end")[-1]
    assert (end["reason"], end["step"]) == ("stop.time=0.000001s", 4)
    assert events(killed, "epoch")[-1]["step"] == 4


def test_triggers_by_hand() -> None:
    config = configure(
        None, ["evaluate.every_steps=10", "log.every_steps=1000", "stop.steps=95", "epochs=3"]
    )
    state = TrainState(Progress(100, 300, 0, 0))
    assert is_sync_point(config, state, Progress(100, 300, 10, 40)) and not is_sync_point(
        config, state, Progress(100, 300, 11, 44)
    )
    at_10 = TrainState(Progress(100, 300, 10, 40))
    assert evaluation_due(config, at_10) and stop_reason(config, at_10) == ""
    evaluated = at_10.after_evaluation(0.5, None, 1.0)
    assert (
        not evaluation_due(config, evaluated) and evaluated.epoch == 0 and evaluated.best_epoch == 1
    )
    over = TrainState(Progress(100, 300, 95, 299).end_here(), evaluated=95)
    assert stop_reason(config, over) == "stop.steps=95"
    assert stop_reason(configure(None, ["stop.time=2h", "epochs=3"]), over) == "stop.time=2h"
    assert stop_reason(configure(None, ["stop.time=2h", "epochs=2.99"]), over) == "epochs=2.99"


TOKENS = (  # 131 windows of 8 tokens and padding; 40 steps of 7 are 2.1 epochs
    "data.name=own_data:tokens task.name=language task.ignore=0 model.name=gpt model.layers=1 "
    "model.width=8 model.heads=2 "
    "speed.precision=fp64 batch.size=7 batch.micro=2 optim.name=adamw optim.base_lr=0.02 "
    "stop.steps=40 log.every_steps=1 "
    'recipe.warmup=400tokens recipe.chain=[{"length":50%},{"kind":cosine}] '
    "recipe.growth=milestones recipe.grow_at=[2000tokens] "
    "recipe.grow_to=[9] evaluate.every_steps=6 evaluate.samples=13 checkpoint.every_steps=1 "
    "checkpoint.keep_last=99"
)


@pytest.mark.slow
@needs_mpirun
def test_the_clock_is_the_same_on_any_number_of_ranks_and_after_a_resume_on_another(
    tmp_path: Path,
) -> None:
    """Rates and evaluations of each step to 1e-12, with lengths in tokens and shares; resumed
    beside an evaluation within an epoch."""

    def train(ranks: int, run: str) -> None:
        argv, env = (
            ["-m", "hvdtrain", *TOKENS.split(), f"run={tmp_path / run}"],
            {"PYTHONPATH": ".:tests/support"},
        )
        result = mpirun(ranks, argv, env=env) if ranks > 1 else python(argv, env=env)
        assert result.returncode == 0, result.stderr

    train(1, "one")
    one = rows(str(tmp_path / "one"))
    ends = [6, 12, 18, 19, 24, 30, 36, 38, 40]
    assert [row[1] for row in one if row[0] == "epoch"] == ends
    for ranks in (2, 3) if FULL else (3,):
        train(ranks, f"on-{ranks}")
        compare(one, rows(str(tmp_path / f"on-{ranks}")), 0)
    for at, ranks in ((11, 3), (12, 2), (18, 3)) if FULL else ((11, 2),):
        run = cut(str(tmp_path / "one"), str(tmp_path / f"from-{at}"), at)
        train(ranks, f"from-{at}")
        compare(one, rows(run), at)


def rows(run: str) -> list[tuple[Any, ...]]:
    """Of each event of kind step and epoch after the newest start: what depends on the position
    alone, then what is rounded."""
    found: list[tuple[Any, ...]] = []
    for event in map(json.loads, Path(run, "events.jsonl").read_text().splitlines()):
        if event["kind"] == "start":
            found = []
        elif event["kind"] == "step":
            found.append(
                (
                    "step",
                    event["step"],
                    event["epochs"],
                    event["of"],
                    event["lr"],
                    event["batch"],
                    [event["loss"]],
                )
            )
        elif event["kind"] == "epoch":
            values = [event["train_loss"], event["val_loss"], event["best_loss"]]
            found.append(
                (
                    "epoch",
                    event["step"],
                    event["epoch"],
                    event["epochs"],
                    event["lr"],
                    event["val_count"],
                    values,
                )
            )
    return found


def compare(one: list[tuple[Any, ...]], other: list[tuple[Any, ...]], after: int) -> None:
    expected = [row for row in one if row[1] > after]
    assert [row[:-1] for row in expected] == [row[:-1] for row in other]
    for row, found in zip(expected, other, strict=True):
        assert found[-1] == pytest.approx(row[-1], rel=1e-12), row
