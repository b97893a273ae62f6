"""Whole jobs on one process through the command line: lines, events, early stop, resume, and the
messages about bad input."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import needs_extra, python
from safetensors.numpy import load_file

from hvdtrain.__main__ import main
from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import digest
from hvdtrain.core.process import command_line
from hvdtrain.core.progress import Progress
from hvdtrain.data.sampler import indices
from hvdtrain.errors import UserError
from hvdtrain.events.log import Event
from hvdtrain.events.writers import JsonLinesWriter
from hvdtrain.training.build import build_learner
from hvdtrain.training.checkpoint import files
from hvdtrain.training.checkpoint.changes import Change, refuse_another_job
from hvdtrain.training.datasets import open_datasets, recipe_of
from hvdtrain.training.input import split_step
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.train_job import check_smallest_pass

FAULTY = {
    "PYTHONPATH": os.pathsep.join(
        [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "support")]
    )
}
FAST = ["model.name=linear", "optim.base_lr=0.05"]


@pytest.fixture(autouse=True)
def without_a_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def events(run: Path, kind: str) -> list[dict]:
    return [
        e
        for e in map(json.loads, (run / "events.jsonl").read_text().splitlines())
        if e["kind"] == kind
    ]


def test_a_job_prints_its_configuration_its_results_and_its_run_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*FAST, "epochs=3", "run=out", "log.every_s=0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"ranks   1 \(.* x 1\), engine single: no launcher", lines[0])
    classes = "10 classes: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9"
    assert lines[1:3] == [
        f"data    digits: 1,437 training and 360 validation samples, 8x8x1, {classes}",
        "        global sampling, read when needed",
    ]
    assert lines[3] == "inputs  (pixels / 255 - mean) / std by channel: mean 0.3054, std 0.3767"
    assert lines[4] == "batch   64 over all ranks, 64 on each"
    assert lines[5] == "recipe  sgd, lr 0.05"
    assert "650 parameters, torch float32 on cpu" in lines[6]
    head = next(line for line in lines if line.startswith("epoch"))
    assert re.split(r"  +", head) == [
        "epoch",
        "seconds",
        "epoch s",
        "images/s",
        "train loss",
        "val loss",
        "val acc",
        "lr",
    ]
    rows = [line.split() for line in lines if re.match(r" +\d", line)]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert all(len(row) == 8 for row in rows)
    assert float(rows[2][6]) > 0.9
    assert any(line.startswith("  step ") for line in lines)
    assert re.fullmatch(
        rf"done \(epochs=3\): validation accuracy {rows[2][6]} after 3.0\d epochs and [0-9.]+ s",
        next(line for line in lines if line.startswith("done")),
    )
    assert lines[-1] == "run folder: out"
    (start,), (end,) = events(Path("out"), "start"), events(Path("out"), "end")
    assert (start["ranks"], end["reason"]) == (1, "epochs=3")
    epochs = events(Path("out"), "epoch")
    assert [e["val_count"] for e in epochs] == [360, 360, 360]
    assert epochs[0]["seconds"] < epochs[1]["seconds"] < epochs[2]["seconds"]
    assert epochs[2]["step"] == -(-3 * 1437 // 64)
    assert f"{epochs[2]['val_accuracy']:.4f}" == rows[2][6]
    assert "name: linear" in (Path("out") / "config.yaml").read_text()


def test_progress_lines_wait_for_their_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FAST, "epochs=2", "run=out", "log.every_s=1000", "log.every_steps=1"]) == 0
    assert not [line for line in capsys.readouterr().out.splitlines() if line.startswith("  step ")]
    assert len(events(Path("out"), "step")) == 45


def test_train_loss_of_an_epoch_is_the_mean_over_its_samples() -> None:
    assert main([*FAST, "epochs=1", "run=out", "log.every_steps=1"]) == 0
    steps, (epoch,) = events(Path("out"), "step"), events(Path("out"), "epoch")
    assert len(steps) == 23  # 1437 samples in steps of 64
    assert epoch["train_loss"] == pytest.approx(np.mean([s["loss"] for s in steps]), rel=1e-12)
    # zero weights: every class is as likely
    assert steps[0]["loss"] == pytest.approx(np.log(10), rel=1e-6)


def test_warmup_rises_by_step() -> None:
    assert main([*FAST, "epochs=1", "run=out", "log.every_steps=1", "recipe.warmup=0.5"]) == 0
    lrs = [s["lr"] for s in events(Path("out"), "step")]
    expected = [0.05 * min(1.0, 64 * t / 1437 / 0.5) for t in range(23)]
    assert lrs == pytest.approx(expected, rel=1e-12)


def test_a_job_stops_once_the_target_is_held_for_so_many_evaluations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*FAST, "epochs=9", "run=out", "stop.target=0.5", "stop.target_for=2"]) == 0
    reached = [e["val_accuracy"] >= 0.5 for e in events(Path("out"), "epoch")]
    assert reached[-2:] == [True, True]
    assert len(reached) < 9
    assert not any(a and b for a, b in itertools.pairwise(reached[:-1]))
    assert (
        "done (stop.target=0.5 held for 2 evaluations): validation accuracy 0."
        in capsys.readouterr().out
    )


def test_a_job_stops_without_a_better_evaluation_and_goes_on_with_more_patience(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At a rate at which nothing changes, the first evaluation stays the best; the count goes on
    where a job is resumed."""
    words = [
        "model.name=mlp",
        "model.widths=[4]",
        "optim.base_lr=1e-20",
        "run=out",
        "stop.patience=3",
    ]
    assert main([*words, "epochs=2"]) == 0
    assert "done (epochs=2)" in capsys.readouterr().out
    assert main(["resume=out", "epochs=9"]) == 0
    said = capsys.readouterr().out
    found = events(Path("out"), "epoch")
    assert [round(e["epochs"]) for e in found] == [1, 2, 3, 4]
    best = f"{found[0]['val_accuracy']:.4f}"
    assert (
        f"done (stop.patience=3: 3 evaluations without a better accuracy than {best}): validation "
        f"accuracy {best}" in said
    )
    assert "resume=out stop.patience=6\n" in said
    assert main(["resume=out", "stop.patience=5"]) == 0
    assert len(events(Path("out"), "epoch")) == 6


def test_max_steps_stops_inside_an_epoch() -> None:
    assert main([*FAST, "epochs=9", "run=out", "max_steps=7"]) == 0
    (epoch,) = events(Path("out"), "epoch")
    assert epoch["step"] == 7
    assert files.finished(Path("out"))[-1].name == "step-00000007"


def test_a_resumed_job_equals_one_that_never_stopped() -> None:
    words = ["model.name=wide_resnet", "model.widths=[4,4,4,4]", "batch.size=50"]
    assert main([*words, "epochs=4", "run=straight"]) == 0
    assert main([*words, "epochs=2", "run=halves"]) == 0
    assert main([*words, "epochs=4", "resume=halves"]) == 0
    ends = [files.finished(Path(run))[-1] for run in ("straight", "halves")]
    assert ends[0].name == ends[1].name
    for name in ("weights.safetensors", "optimizer.safetensors"):
        a, b = (load_file(folder / name) for folder in ends)
        assert a.keys() == b.keys()
        assert all(np.array_equal(a[key], b[key]) for key in a)
    assert [e["epoch"] for e in events(Path("halves"), "epoch")] == [1, 2, 3, 4]


def test_evaluation_does_not_depend_on_its_batches() -> None:
    found = []
    for size in (360, 100, 7):
        assert (
            main(
                [
                    *FAST,
                    "epochs=1",
                    f"run=out{size}",
                    f"batch.evaluate={size}",
                    "speed.precision=fp64",
                ]
            )
            == 0
        )
        found += events(Path(f"out{size}"), "epoch")
    for other in found[1:]:
        assert other["val_accuracy"] == found[0]["val_accuracy"]
        assert other["val_loss"] == pytest.approx(found[0]["val_loss"], rel=1e-12)


def test_a_run_folder_is_never_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FAST, "epochs=1", "run=out"]) == 0
    before = (Path("out") / "events.jsonl").read_bytes()
    for left in ("config.yaml", "events.jsonl", "nothing but checkpoints"):
        assert main([*FAST, "epochs=1", "run=out", "resume=no"]) == 2, left
        assert "out contains another run" in capsys.readouterr().err
        if left == "config.yaml":
            assert (Path("out") / "events.jsonl").read_bytes() == before
        (Path("out") / left).unlink(missing_ok=True)
    assert files.finished(Path("out"))[-1].name == "step-00000023"


def test_jobs_of_the_same_second_get_folders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda pattern: "20260102-030405")
    for _ in range(3):
        assert main([*FAST, "max_steps=1"]) == 0
    names = sorted(path.name for path in Path("runs").iterdir())
    assert names == [f"digits-linear-20260102-030405{suffix}" for suffix in ("", "-2", "-3")]


def test_a_refused_resume_leaves_the_run_folder_as_it_was(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*FAST, "epochs=1", "run=out"]) == 0
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    assert main(["resume=out", "model.name=mlp", "epochs=2"]) == 2
    assert "the model lacks p.fc.bias and 11 more" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()} == before


def test_a_job_whose_checkpoints_are_all_damaged_does_not_start_over(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = [*FAST, "checkpoint.every_steps=20", "max_steps=40"]
    assert main([*job, "run=out"]) == 0
    for folder in files.finished(Path("out")):
        (folder / "weights.safetensors").write_bytes(b"")
    before = contents("out")
    for words in ([*job[:-1], "run=out"], ["resume=out", "max_steps=50"]):
        capsys.readouterr()
        assert main(words) == 2
        said = capsys.readouterr().err
        assert (
            "no checkpoint of out is good: damaged step-00000040 is skipped: weights.safetensors"
            in said
        ), said
        assert (
            "fix: repair or remove out/checkpoints; without it the job starts over" in said
            and contents("out") == before
        )


def test_what_says_where_a_job_runs_needs_no_asking(capsys: pytest.CaptureFixture[str]) -> None:
    """run=DIR resumes it and prints it, also with more steps."""
    job = [*FAST, "max_steps=20", "run=out"]
    assert main(job) == 0
    capsys.readouterr()
    assert (
        main(
            [*job, "max_steps=40", "log.every_steps=7", "batch.micro=16", "checkpoint.keep_last=3"]
        )
        == 0
    )
    said = capsys.readouterr().out
    changes = (
        "batch.micro: None -> 16",
        "checkpoint.keep_last: 2 -> 3",
        "log.every_steps: 10 -> 7",
        "stop.steps: 20 -> 40",
    )
    assert all(f"        changed {change}\n" in said for change in changes), said
    assert (
        "resume  from step 20" in said and files.finished(Path("out"))[-1].name == "step-00000040"
    )


def test_with_local_steps_sync_points_decide_what_is_learned() -> None:
    """The ranks average their weights there, too."""
    found = [Change("checkpoint.every_steps", 20, 30), Change("guard.stall_s", 300, 60)]
    now = TrainState(Progress(1437, 2874, 20, 1280))
    refuse_another_job(found, configure(None, []), Path("r"), now)
    with pytest.raises(
        UserError, match="^r contains another job: checkpoint.every_steps is 20 there, 30 here\n"
    ):
        refuse_another_job(found, configure(None, ["comm.local_steps=3"]), Path("r"), now)


def contents(run: str) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(run).rglob("*") if path.is_file()}


@pytest.fixture
def over(capsys: pytest.CaptureFixture[str]) -> dict[Path, bytes]:
    """The files of the run r, whose job is over after 2 epochs at lr 0.05."""
    assert main([*FAST, "epochs=2", "run=r"]) == 0
    capsys.readouterr()
    return contents("r")


def test_a_run_that_is_over_is_never_rewritten(
    over: dict[Path, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    rate = "optim.base_lr is 0.05 there, 0.1 here"
    for words, change, fix in (
        (["run=r", "epochs=1"], "epochs is 2 there, 1 here", "epochs=4"),
        (["resume=r", "optim.base_lr=0.1"], rate, "optim.base_lr=0.1 epochs=4"),
        (["run=r", "epochs=2", "optim.base_lr=0.1"], rate, "optim.base_lr=0.1 epochs=4"),
        (
            ["run=r", "epochs=2", "max_steps=9"],
            "stop.steps is None there, 9 here",
            "stop.steps=90 epochs=4",
        ),
    ):
        assert main([*FAST, *words] if words[0] == "run=r" else words) == 2
        said = capsys.readouterr().err
        assert (
            "r is complete (" in said and f"so the change would have no effect: {change}\n" in said
        ), said
        assert (
            f"fix: run=ANOTHER for a new job; to train on with it: {command_line()} resume=r "
            f"{fix}\n" in said
        ), said
        assert contents("r") == over
    assert main(shlex.split(said.rpartition(f"{command_line()} ")[2])) == 0, (
        "what it says to type works"
    )


@pytest.mark.parametrize(
    ("argument", "misfit"),
    [
        (
            "model.name=mlp",
            "the model lacks p.fc.bias and 1 more",
        ),  # the optimizer's state has another name for each
        ("optim.ema=0.9", "the state lacks s.fc.bias.1 and 1 more"),
    ],
)
def test_no_command_is_proposed_that_cannot_load_the_checkpoint(
    argument: str, misfit: str, over: dict[Path, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume=r", argument]) == 2
    fix = capsys.readouterr().err.partition("fix: ")[2]
    assert (
        fix.startswith(
            "run=ANOTHER resume=no for a new job; it cannot be resumed with the change: "
        )
        and contents("r") == over
    )
    assert main(["resume=r", argument, "epochs=4"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"hvdtrain: {fix.partition('change: ')[2].strip()}\n"), said


def test_the_same_command_of_a_job_that_is_over_writes_nothing(
    over: dict[Path, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """As a requeued job does, and with another log, too: that is the same job."""
    for more in ([], ["log.every_steps=7", "guard.stall_s=99", "log.per_rank=true"]):
        assert main([*FAST, "epochs=2", "run=r", *more]) == 0
        assert "nothing to do: run r is already complete" in capsys.readouterr().out
        assert contents("r") == over


def test_another_job_in_the_folder_of_one_that_is_not_over(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Only resume=RUN changes what is learned; config.yaml is the one that the newest weights were
    trained with."""
    assert main([*FAST, "epochs=4", "max_steps=40", "run=r"]) == 0
    before = contents("r")
    capsys.readouterr()
    assert main([*FAST, "epochs=4", "optim.momentum=0.5", "optim.base_lr=0.1", "run=r"]) == 2
    said = capsys.readouterr().err
    assert (
        "r contains another job: optim.base_lr is 0.05 there, 0.1 here; optim.momentum is None "
        "there, 0.5 here\n"
    ) in said, said
    assert "where: r/config.yaml\n" in said and contents("r") == before
    command = shlex.split(said.rpartition(f"{command_line()} ")[2])
    assert command == ["resume=r", "optim.base_lr=0.1", "optim.momentum=0.5", "stop.steps=null"]
    assert main(command) == 0
    assert "        changed optim.base_lr: 0.05 -> 0.1\n" in capsys.readouterr().out
    assert "base_lr: 0.1\n" in Path("r/config.yaml").read_text()
    starts = events(Path("r"), "start")
    assert [start["config"]["optim.base_lr"] for start in starts] == [0.05, 0.1]
    assert [start["changed"] for start in starts] == [
        {},
        {"stop.steps": [40, None], "optim.base_lr": [0.05, 0.1], "optim.momentum": [None, 0.5]},
    ]


def test_the_state_of_one_optimizer_is_not_given_to_another(
    over: dict[Path, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """The momentum of sgd is a sum of gradients, that of lars one of gradients times the layer's
    ratio; their arrays are alike."""
    for words in (
        ["resume=r", "optim.name=lars", "epochs=4"],
        [*FAST, "epochs=4", "run=r", "optim.name=lars"],
    ):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert (
            "the checkpoint was written with optim.name=sgd, but this job has optim.name=lars, "
            "so the optimizer's state would"
        ) in said, said
        assert (
            "where: r\n  fix: optim.name=sgd; or run=ANOTHER resume=no for a new job\n" in said
            and contents("r") == over
        )


def test_the_momentum_of_one_form_of_lars_is_not_given_to_the_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With form=paper the learning rate is inside it: as that of form=torch it would be too small
    by that factor."""
    lars = [*FAST, "optim.name=lars"]
    assert main([*lars, "epochs=1", "run=r"]) == 0
    before = contents("r")
    for words in (
        ["resume=r", "optim.form=paper", "epochs=2"],
        [*lars, "epochs=2", "run=r", "optim.form=paper"],
    ):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert (
            "the checkpoint was written with optim.form=torch, but this job has "
            "optim.form=paper, so the optimizer's state would"
        ) in said, said
        assert (
            "where: r\n  fix: optim.form=torch; or run=ANOTHER resume=no for a new job\n" in said
            and contents("r") == before
        )
    assert main(["resume=r", "optim.form=torch", "epochs=2"]) == 0, "its default"


def test_config_yaml_changes_with_the_first_checkpoint_that_was_trained_with_it(
    tmp_path: Path,
) -> None:
    """A job that dies before its first checkpoint leaves the former weights, and their
    configuration."""
    assert main(["model.name=trouble:Trouble", "max_steps=30", "run=r"]) == 0
    before = Path("r/config.yaml").read_bytes()
    change = [
        "model.name=trouble:Trouble",
        f"resume={tmp_path / 'r'}",
        "optim.base_lr=0.1",
        "max_steps=60",
    ]
    fault = ["model.fault=os_exit", "model.rank=0", "model.at=9", f"model.once={tmp_path / 'once'}"]
    python(["-m", "hvdtrain", *change, *fault], env=FAULTY)
    assert Path("once").exists()
    assert [(e["step"], e["config"]["optim.base_lr"]) for e in events(Path("r"), "start")] == [
        (0, 0.02),
        (30, 0.1),
    ]
    assert Path("r/config.yaml").read_bytes() == before
    assert main([*change, *fault]) == 0
    assert "base_lr: 0.1\n" in Path("r/config.yaml").read_text()


def test_a_saved_configuration_says_what_a_job_is_not_where(
    over: dict[Path, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """The configuration of a resumed run began another job as a copy of its checkpoint, which was
    over at once."""
    assert main(["resume=r", "run=a", "epochs=3"]) == 0
    assert [
        start["resumed_from"]
        for start in (*events(Path("r"), "start"), *events(Path("a"), "start"))
    ] == [None, "r"]
    capsys.readouterr()
    assert main(["--config", "a/config.yaml", "run=b"]) == 0
    assert "resume  " not in capsys.readouterr().out.partition("epoch ")[0]
    assert [e["epoch"] for e in events(Path("b"), "epoch")] == [1, 2, 3]
    assert main(["resume=r", "run=c"]) == 2
    assert (
        "r is complete (epochs=2): there is nothing left to train in c" in capsys.readouterr().err
    )
    assert contents("r") == over and not Path("c").exists()


def test_the_same_command_resumes_in_a_new_folder_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FAST, "epochs=1", "run=one"]) == 0
    command = ["resume=one", "run=two", "epochs=3"]
    assert main([*command, "max_steps=30"]) == 0
    capsys.readouterr()
    assert main(command) == 0
    assert "resume  from step 30, epoch 1.34" in capsys.readouterr().out
    assert main([*FAST, "resume=two", "run=one"]) == 2
    assert "one contains another run" in capsys.readouterr().err


def test_epochs_at_another_target_do_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FAST, "epochs=3", "run=out", "stop.target=0.5"]) == 0
    assert "stop.target=0.5 held for 1 evaluation)" in capsys.readouterr().out
    done = len(events(Path("out"), "epoch"))
    assert main(["resume=out", "stop.target=0.999"]) == 0
    assert "done (epochs=3)" in capsys.readouterr().out
    assert len(events(Path("out"), "epoch")) == 3 > done


def test_the_best_evaluation_is_of_as_many_samples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FAST, "epochs=1", "run=out"]) == 0
    assert main(["resume=out", "epochs=2", "evaluate.samples=20"]) == 0
    assert (
        "evaluations are of 20 samples, and were of 360: the best one and stop.patience start over"
        in capsys.readouterr().out
    )
    end = events(Path("out"), "end")[-1]
    assert (
        end["best_accuracy"] == events(Path("out"), "epoch")[-1]["val_accuracy"]
        and end["best_epoch"] == 2
    )


def test_numbers_that_are_none_are_null_in_the_events() -> None:
    JsonLinesWriter(Path("events.jsonl"))(
        Event(1.0, "epoch", 3, {"train_loss": math.nan, "val_loss": -math.inf, "lr": 0.1})
    )
    text = Path("events.jsonl").read_text()  # json.loads would take NaN: read the text
    assert (
        text
        == '{"time": 1.0, "kind": "epoch", "step": 3, "train_loss": null, "val_loss": null, "lr": '
        "0.1}\n"
    )


def test_micro_batches_are_bounded_equally_many_and_follow_the_sampling() -> None:
    config = configure(None, ["batch.size=31", "batch.micro=4", "data.sampling=partition"])
    for start in (0, 1430, 1437 * 3 - 5):  # the last two cross an epoch
        p = Progress(1437, 99999, 7, start)
        counts = []
        for rank in range(3):
            communicator = SingleProcessCommunicator()
            communicator.rank, communicator.size = rank, 3  # type: ignore[misc]
            rows = split_step(config, p, 31, 31, communicator)
            expected = indices(start, 31, rank, 3, 1437, config.seed, "partition")
            np.testing.assert_array_equal(np.concatenate([part.samples for part in rows]), expected)
            assert set(np.concatenate([part.epochs for part in rows])) == {
                start // 1437,
                (start + 30) // 1437,
            }
            assert max(len(part.samples) for part in rows) <= 4
            counts.append(len(rows))
        assert len(set(counts)) == 1


def test_a_grown_batch_takes_more_passes_not_more_memory() -> None:
    config = configure(None, ["batch.size=10"])
    p = Progress(1437, 99999, 7, 1430)
    for batch, lengths in ((10, [10]), (30, [10, 10, 10]), (25, [9, 8, 8]), (4, [4])):
        rows = split_step(config, p, batch, 10, SingleProcessCommunicator())
        assert [len(part.samples) for part in rows] == lengths
        np.testing.assert_array_equal(
            np.concatenate([part.samples for part in rows]),
            indices(1430, batch, 0, 1, 1437, config.seed),
        )
        assert np.concatenate([part.epochs for part in rows]).tolist() == [
            (1430 + i) // 1437 for i in range(batch)
        ]


@pytest.mark.parametrize("sampling", ["global", "partition"])
def test_a_pass_of_a_grown_batch_has_the_same_samples_on_any_number_of_ranks(sampling: str) -> None:
    """The passes of one process are the contiguous parts of the step; on several ranks each has a
    share of each, and none has none."""
    config = configure(None, ["batch.size=8", f"data.sampling={sampling}"])
    p = Progress(1437, 99999, 7, 1430)
    for batch, lengths in (
        (8, [8]),
        (30, [8, 8, 7, 7]),
        (9, [5, 4]),
    ):  # 1437 - 1430 = 7 are of the epoch before
        stream = indices(1430, batch, 0, 1, 1437, config.seed)
        for size in (1, 2, 3, 8):
            of_ranks = []
            for rank in range(size):
                communicator = SingleProcessCommunicator()
                communicator.rank, communicator.size = rank, size  # type: ignore[misc]
                of_ranks.append(
                    [part.samples for part in split_step(config, p, batch, 8, communicator)]
                )
            passes = [np.concatenate(shares) for shares in zip(*of_ranks, strict=True)]
            assert [sorted(samples) for samples in passes] == [
                sorted(samples) for samples in np.split(stream, np.cumsum(lengths)[:-1])
            ]
            if sampling == "global":
                assert [samples.tolist() for samples in passes] == [
                    part.tolist() for part in np.split(stream, np.cumsum(lengths)[:-1])
                ]
                assert {sum(map(len, shares)) for shares in of_ranks} <= {
                    batch // size,
                    -(-batch // size),
                }
                assert all(
                    np.ptp([len(shares[k]) for shares in of_ranks]) <= 1
                    for k in range(len(lengths))
                )


def normed(shape: tuple[int, int, int], classes: int) -> torch.nn.Module:
    pixels = int(np.prod(shape))
    return torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(pixels, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.Linear(8, classes),
    )


@pytest.mark.parametrize(
    ("words", "ranks", "what", "key"),
    [
        (
            "batch.size=5",
            4,
            "a batch of 5 on 4 ranks has a micro-batch of one sample",
            "batch.size",
        ),
        ("batch.size=1", 1, "a batch of 1 on 1 rank has a micro-batch of one sample", "batch.size"),
        (
            "batch.size=5 batch.micro=2",
            1,
            "a batch of 5 on 1 rank in passes of batch.micro=2 has a micro-batch of one sample",
            "batch.micro",
        ),
        (
            "batch.size=4 recipe.growth=milestones recipe.grow_at=[1] recipe.grow_to=[5]",
            2,
            "a batch of 5 on 2 ranks",
            "recipe.growth",
        ),
        ("batch.size=8", 4, None, ""),
        (
            "batch.size=5 model.name=convnet model.widths=[4]",
            4,
            None,
            "",
        ),  # an image has several values per channel
        ("batch.size=5 model.name=mlp", 4, None, ""),
    ],
)
def test_a_batch_norm_of_one_sample_is_found_before_the_first_step(
    words: str, ranks: int, what: str | None, key: str
) -> None:
    config = configure(None, ["model.name=test_train:normed", *words.split()])
    datasets = open_datasets(config, SingleProcessCommunicator())
    learner = build_learner(config, datasets.task, SingleProcessCommunicator())
    before = digest(learner.state())
    if what is None:
        check_smallest_pass(config, recipe_of(config, datasets).batch, learner, ranks)
    else:
        with pytest.raises(UserError, match=re.escape(what)) as caught:
            check_smallest_pass(config, recipe_of(config, datasets).batch, learner, ranks)
        assert caught.value.where.startswith(key) and ("norm.kind=sync" in caught.value.fix) == (
            ranks > 1
        )
    assert digest(learner.state()) == before


def test_a_job_whose_batch_grows_counts_every_sample_and_resumes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """1437 samples: batch 64 up to epoch 1 (23 steps, 1472 samples), then 200: 7 steps to 2872, 8
    to 3072 > 2874."""
    words = [*FAST, "batch.size=64", "log.every_steps=1", "recipe.schedule=steps", "recipe.milestones=[1]", "recipe.gamma=0.25",  # noqa: E501
             "recipe.growth=decays", "recipe.batch_max=200"]  # fmt: skip
    assert main([*words, "epochs=2", "run=whole"]) == 0
    out = capsys.readouterr().out
    assert "batch   64, 200 from epoch 1 over all ranks, 64 on each at first\n" in out
    assert "lr 0.05, then x 0.25 at epochs 1, replaced by batch growth up to 200\n" in out
    steps = events(Path("whole"), "step")
    assert [s["batch"] for s in steps] == [64] * 23 + [200] * 8
    assert [s["lr"] for s in steps] == pytest.approx([0.05] * 23 + [0.05 * 0.25 * 200 / 64] * 8)
    assert main([*words, "epochs=2", "max_steps=27", "run=half"]) == 0
    assert main(["resume=half", "max_steps=null"]) == 0
    newest = "checkpoints/step-00000031/weights.safetensors"
    assert (Path("half") / newest).read_bytes() == (Path("whole") / newest).read_bytes()


def test_a_rank_may_say_its_own_batch() -> None:
    assert (
        main(
            [
                *FAST,
                "epochs=1",
                "run=out",
                "batch.per_rank=48",
                "optim.base_batch=16",
                "optim.base_lr=0.01",
                "max_steps=2",
            ]
        )
        == 0
    )
    (epoch,) = events(Path("out"), "epoch")
    assert (epoch["batch"], epoch["lr"]) == (48, pytest.approx(0.03))
    text = Path("out/config.yaml").read_text()
    assert "size: 48" in text and "per_rank: null" in text


def test_print_config_reads_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["batch.size=12", "model.widths=[8,8,8,8]", "--print-config"]) == 0
    text = capsys.readouterr().out
    Path("again.yaml").write_text(text)
    assert main(["--config", "again.yaml", "--print-config"]) == 0
    assert capsys.readouterr().out == text


def idx_root() -> str:
    raw = Path("data/FashionMNIST/raw")
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        (raw / f"{part}-images-idx3-ubyte").write_bytes(
            bytes.fromhex("00000803 00000002 0000001c 0000001c") + b"\1" * 28 * 28
        )
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(
            bytes.fromhex("00000801 00000002") + b"\1\2"
        )
    return "data"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["bach.size=3"],
            ["no such key: bach.size", "where: command line", "did you mean batch.size?"],
        ),
        (
            ["epochs=many"],
            ["wrong value for epochs: 'many'", "epochs takes a number, or null: epochs=10"],
        ),
        (
            ["model.name=wide_resnt"],
            [
                "unknown name: wide_resnt",
                "where: model.name, command line",
                "did you mean wide_resnet?",
            ],
        ),
        (
            ["model.widhts=3"],
            ["model.name=wide_resnet has no option widhts", "did you mean widths?"],
        ),
        (["data.name=digts"], ["unknown name: digts", "did you mean digits?"]),
        pytest.param(
            ["data.name=folder", "data.root=nowhere"],
            ["nowhere"],
            marks=needs_extra("image_files"),
        ),
        (["data.name=fashion_mnist", "data.root=IDX"], ["train-images-idx3-ubyte", "found"]),
        (["comm.engine=hovorod"], ["unknown name: hovorod", "did you mean horovod?"]),
        (["resume=nowhere"], ["there is no run folder nowhere", "where: resume, command line"]),
        (["--config"], ["--config needs a value"]),
        (
            ["--max-time=soon"],
            ["'soon' is not a length of time", "where: guard.max_time, command line", "3.5h"],
        ),
        (["--config", "nowhere.yaml"], ["cannot read the configuration", "nowhere.yaml"]),
        (["run=/proc/nope"], ["cannot write the run folder", "where: run, command line"]),
        (["--config="], ["cannot read the configuration", "where: --config"]),
        (["data.root=/x"], ["data.name=digits reads no folder"]),
        (["batch.size=1438"], ["batch 1438 is more than the 1437 training samples"]),
        (
            ["data.name=synthetic", "data.shape=[2,2,1]"],
            ["images of 2x2 pixels cannot be halved twice"],
        ),
        (["log.noise_scale=true"], ["the job has 1 rank", "two ranks or more"]),
        (["framework=torhc"], ["unknown name: torhc", "did you mean torch?"]),
    ],
)
def test_bad_input_is_one_short_message_and_code_2(
    words: list[str], says: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    root = idx_root()
    assert main([word.replace("IDX", root) for word in words]) == 2
    text = capsys.readouterr().err
    assert text.startswith("hvdtrain: ")
    assert "Traceback" not in text
    assert len(text.splitlines()) < 20
    for part in says:
        assert part in text, text


def test_a_bug_shows_its_traceback_and_code_1(tmp_path: Path) -> None:
    result = python(
        [
            "-m",
            "hvdtrain",
            "model.name=faulty:Faulty",
            "model.bad_rank=0",
            "model.bad_step=2",
            f"model.stamp={tmp_path / 'stamp'}",
        ],
        env=FAULTY,
    )
    assert result.returncode == 1
    assert "ArithmeticError: forward 2 was made to fail" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("rank 0 on ")
