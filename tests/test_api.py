"""hvdtrain from a script: train() takes a configuration, returns the result, and raises errors;
read() reads the run."""

from __future__ import annotations

import copy
import io
import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import mpirun, needs_extra, needs_mpirun, python
from safetensors.torch import load_file

import hvdtrain
from hvdtrain.__main__ import main
from hvdtrain.core.extras import extras, shows_run
from hvdtrain.core.process import command_line


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


class Net(torch.nn.Module):
    """A class as in a notebook."""

    def __init__(self, shape: tuple[int, int, int], classes: int, hidden: int = 8) -> None:
        super().__init__()
        self.one = torch.nn.Linear(shape[0] * shape[1] * shape[2], hidden)
        self.two = torch.nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.relu(self.one(x.flatten(1))))


def test_dir_shows_what_is_not_imported_yet() -> None:
    listed = python(
        ["-c", "import sys, hvdtrain; print(*dir(hvdtrain)); print('hvdtrain.api' in sys.modules)"],
        is_warm=False,
    )
    names, imported = listed.stdout.splitlines()
    assert {"train", "read", "Run", "UserError"} <= set(names.split()) and imported == "False", (
        listed.stderr
    )


def test_a_mapping_trains_as_the_command_line_does_and_reads_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = {
        "epochs": 2,
        "model": {"name": "linear"},
        "optim.base_lr": 1e-05,
        "run": Path("one"),
        "data.root": None,
        "log": {"targets": [0.01]},
    }
    run = hvdtrain.train(config, "batch.size=32")
    assert (
        main(["epochs=2", "model.name=linear", "optim.base_lr=1e-05", "run=two", "batch.size=32"])
        == 0
    )
    assert (run.folder, run.code, run.why, run.steps, run.epochs) == (
        Path("one"),
        0,
        "epochs=2",
        90,
        2880 / 1437,
    )
    one = hvdtrain.read(run)
    two = hvdtrain.read("two")
    epochs = one[one.kind == "epoch"]
    assert epochs.val_accuracy.tolist() == two[two.kind == "epoch"].val_accuracy.tolist()
    assert epochs.val_accuracy.iloc[-1] == run.last and run.best == epochs.val_accuracy.max()
    assert one.attrs["config"]["optim.base_lr"] == 1e-05 and one.attrs["config"]["batch.size"] == 32
    assert (one.kind == "target").sum() == 1
    assert run.seconds > 0
    assert capsys.readouterr().out.count("run folder: ") == 2


def test_a_class_is_a_model_and_a_yaml_file_a_configuration() -> None:
    run = hvdtrain.train({"model": {"name": Net, "hidden": 3}, "max_steps": 3, "run": "one"})
    assert run.steps == 3 and run.why == "stop.steps=3"
    assert "model.name" in hvdtrain.read(run).attrs["config"]
    assert hvdtrain.read(run).attrs["config"]["model.name"] == f"{__name__}:Net"
    Path("c.yaml").write_text("max_steps: 2\nmodel: {name: linear}\n")
    again = hvdtrain.train(Path("c.yaml"), "run=two", "seed=3")
    assert again.steps == 2 and hvdtrain.read(again).attrs["config"]["seed"] == 3


def test_what_is_wrong_is_raised_and_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        hvdtrain.UserError,
        match=r"no such key: epoch\n  where: hvdtrain.train\(\)\n.*did you mean epochs",
    ):
        hvdtrain.train({"epoch": 2})
    with pytest.raises(
        hvdtrain.UserError, match=r"batch.size is an object of complex\n  where: hvdtrain.train\(\)"
    ):
        hvdtrain.train({"batch": {"size": 3j}})
    with pytest.raises(hvdtrain.UserError, match=r"guard\.nonfinite=stop"):
        hvdtrain.train({"optim.base_lr": 1e6, "model.name": "mlp", "epochs": 3, "run": "bad"})
    with pytest.raises(hvdtrain.UserError, match="there is no run folder nowhere"):
        hvdtrain.read("nowhere")
    with pytest.raises(AttributeError, match="has no attribute 'fit'"):
        hvdtrain.fit  # noqa: B018
    assert capsys.readouterr().err == ""


SCRIPT = """
import sys, torch, hvdtrain
class Net(torch.nn.Linear):
    def __init__(self, classes):
        super().__init__(64, classes)
file = open(sys.argv[1], "w")
file.write("kept")
{call}
print("never")
"""


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            "hvdtrain.train({'model.name': 'mpl'})",
            "hvdtrain: unknown name: mpl\n  where: model.name, hvdtrain.train()\n  fix: did you "
            "mean mlp?\n"
            "{script}:8, in <module>: hvdtrain.train({'model.name': 'mpl'})\n",
        ),
        (
            "hvdtrain.train('epochs=x')",
            "hvdtrain: wrong value for epochs: 'x'\n  where: epochs, hvdtrain.train()\n",
        ),
        ("hvdtrain.train({'model.name': Net})", "hvdtrain: the model fails for images "),
    ],
)
def test_a_mistake_in_a_script_is_told_without_frames_of_hvdtrain(
    call: str, said: str, tmp_path: Path
) -> None:
    """What, where, fix and the script's own line; Python then ends as after any exception: what the
    script wrote is kept."""
    script = tmp_path / "script.py"
    kept = tmp_path / "kept.txt"
    script.write_text(SCRIPT.format(call=call))
    done = python([str(script), str(kept)], is_warm=False)
    assert done.returncode == 2, done
    assert said.replace("{script}", f"{script}") in done.stderr
    assert (
        f'File "{Path(hvdtrain.__file__).parent}' not in done.stderr and "never" not in done.stdout
    )
    assert kept.read_text() == "kept"


def test_numbers_of_numpy_are_numbers_and_what_has_no_name_is_no_model() -> None:
    run = hvdtrain.train(
        {
            "max_steps": np.int64(2),
            "optim.base_lr": np.float32(0.5),
            "batch": {"size": np.arange(8, 9)[0]},
            "model.name": "linear",
        }
    )
    config = hvdtrain.read(run).attrs["config"]
    assert (run.steps, config["optim.base_lr"], config["batch.size"], run.rank) == (2, 0.5, 8, 0)
    with pytest.raises(
        hvdtrain.UserError,
        match=r"model.name is .*<lambda>, which has no name to import\n.*\n.*at the top of the "
        r"file",
    ):
        hvdtrain.train({"model": {"name": lambda shape: None}})
    with pytest.raises(
        hvdtrain.UserError,
        match=r"model.name is an object of Net\n.*\n.*a class \(not one of its objects\)",
    ):
        hvdtrain.train({"model": {"name": Net((8, 8, 1), 10)}})


def test_a_run_that_is_over_says_that_nothing_was_trained_and_how_to_go_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = hvdtrain.train({"model.name": Net, "max_steps": 4, "run": "one"})
    said = capsys.readouterr().out
    assert (
        f"resume   {command_line()} resume=one model.name={__name__}:Net stop.steps=8\n" in said
        and "nothing to do" not in said
    )
    assert "startup" not in extras() or re.search(
        r"^start   [0-9.]+ s to the end of the first step(?!.*Python)", said, re.MULTILINE
    ), "the process is older than the job"
    with pytest.raises(
        hvdtrain.UserError, match="one is complete .*: optim.base_lr is 0.02 there, 0.5 here"
    ):
        hvdtrain.train({"model.name": Net, "max_steps": 4, "run": "one", "optim.base_lr": 0.5})
    again = hvdtrain.train({"model.name": Net, "max_steps": 4, "run": "one"})
    said = capsys.readouterr().out
    assert (
        "nothing to do: run one is already complete. Use another run=, or resume it with "
        "stop.steps=8\n"
        in said
        and "\nspeed" not in said
    )
    assert again.last == first.last
    further = hvdtrain.train({"resume": "one", "model.name": Net}, "max_steps=8")
    assert further.steps == 8 and "nothing to do" not in capsys.readouterr().out


def test_a_job_that_is_started_while_an_error_is_handled_has_not_failed() -> None:
    try:
        hvdtrain.train({"epoch": 2})
    except hvdtrain.UserError:
        run = hvdtrain.train({"model.name": "linear", "max_steps": 2, "run": "one"})
    kinds = [
        json.loads(line)["kind"] for line in (run.folder / "events.jsonl").read_text().splitlines()
    ]
    assert "end" in kinds and "failed" not in kinds


def test_single_steps_and_a_folder_of_the_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    hvdtrain.train({"model.name": "linear", "max_steps": 3, "run": "~/one", "log.step_times": True})
    assert set(hvdtrain.read("~/one").kind) == {"step", "epoch"}
    table = hvdtrain.read(Path("~/one"), step_times=True)
    assert table[table.kind == "step_times"].step.tolist() == [1, 2, 3]


def command(said: str, head: str) -> list[str]:
    """The arguments of a line of the footer, as a shell parses them."""
    return shlex.split(
        next(line for line in said.splitlines() if line.startswith(head)).removeprefix(head)
    )


def test_commands_are_for_a_shell_whatever_the_folder_is_called(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = "sp ace'q;$(x)"
    hvdtrain.train({"model.name": Net, "max_steps": 4, "run": run})
    said = capsys.readouterr().out
    program = shlex.split(command_line())
    assert command(said, "resume   ") == [
        *program,
        f"resume={run}",
        f"model.name={__name__}:Net",
        "stop.steps=8",
    ]
    for name in shows_run():
        assert command(said, f"{name:8} ") == [*program, name, run]
    assert main(command(said, "resume   ")[len(program) :]) == 0
    assert f"run folder: {run}\n" in capsys.readouterr().out
    assert hvdtrain.read(run).step.max() == 8
    # at once
    assert (
        hvdtrain.train(
            {"model.name": "linear", "guard.max_time": "2s", "resume": "no", "run": f"{run}2"}
        ).code
        == 75
    )
    assert command(capsys.readouterr().out, "the same command resumes the job, with ") == [
        f"run={run}2",
        "resume=auto",
    ]
    assert (
        hvdtrain.train({"model.name": "linear", "guard.max_time": "2s", "run": f"{run}3"}).code
        == 75
    )
    assert "\nthe same command resumes the job\n" in capsys.readouterr().out, "it names the folder"
    unnamed = hvdtrain.train({"model.name": "linear", "guard.max_time": "2s"})
    assert command(capsys.readouterr().out, "the same command resumes the job, with ") == [
        f"run={unnamed.folder}"
    ]


@needs_extra("report")
def test_the_command_of_a_report_takes_a_folder_that_looks_like_an_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hvdtrain.train({"model.name": "linear", "framework": "numpy", "max_steps": 2, "run": "-dash"})
    report = command(capsys.readouterr().out, "report   ")
    words = report[len(shlex.split(command_line())) :]
    assert words == ["report", "./-dash"] and main(words) == 0
    assert main(["report", "-dash"]) == 2 and "fix: write ./-dash" in capsys.readouterr().err


def test_letters_that_the_output_has_not_end_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    run = hvdtrain.train({"model.name": "linear", "max_steps": 2, "run": "日本"})
    assert (
        run.steps == 2
        and b"run folder: \\u65e5\\u672c\n" in written.getvalue()
        and sys.stdout.errors == "strict"
    )


@needs_extra("trained_models")
@needs_mpirun
def test_each_rank_of_a_script_gets_the_same_and_one_that_fails_ends_all(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import hvdtrain, sys\n"
        "class Net(__import__('torch').nn.Linear):\n"
        "    def __init__(self, classes): super().__init__(64, classes)\n"
        "    def forward(self, x): return super().forward(x.flatten(1))\n"
        "run = hvdtrain.train({'model.name': Net, 'epochs': 1, 'run': sys.argv[1], 'comm.engine': "
        "'mpi'})\n"
        "sys.stderr.write(f'{run.steps} {run.last:.4f}\\n')\n"
        "images = __import__('numpy').arange(3 * 64, dtype='uint8').reshape(3, 8, 8)\n"
        "said = hvdtrain.predict(run, images, 'comm.engine=mpi', 'batch.evaluate=1')\n"
        "one = hvdtrain.predict(run, images[:1], 'comm.engine=mpi')\n"  # a rank has no sample
        "known = hvdtrain.evaluate(run, {'x': images, 'y': said.argmax(1)}, 'comm.engine=mpi')\n"
        "sys.stderr.write(f'said {said.shape} {said.sum():.4f} {abs(said[:1] - one).max() < 1e-6} "
        '{known["accuracy"]}\\n\')\n'
        "hvdtrain.train({'batch.size': 1, 'comm.engine': 'mpi'})\n"
        "print('never')\n"
    )
    done = mpirun(2, [str(script), str(tmp_path / "run")])
    assert done.returncode == 2, done
    assert "batch 1 does not split over 2 ranks" in done.stderr and "never" not in done.stdout
    for word, expected in (("23 ", "23 "), ("said ", "said (3, 10) ")):
        first, second = [line for line in done.stderr.splitlines() if line.startswith(word)]
        assert first == second and first.startswith(expected)
    assert first.endswith(" True 1.0")


@needs_extra("memory_forecast")
def test_a_large_model_object_is_predicted_and_has_the_trained_weights(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Of more than 2^20 weights; copying its buffers and the weights of its loss without numbers
    fails inside torch."""
    net = torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(64, 17_000),
        torch.nn.BatchNorm1d(17_000),
        torch.nn.Linear(17_000, 10),
    )
    first = copy.deepcopy(net.state_dict())
    loss = torch.nn.CrossEntropyLoss(weight=torch.arange(1.0, 11.0), reduction="none")
    run = hvdtrain.train({"stop.steps": 2, "run": "run", "batch.size": 4}, model=net, loss=loss)
    out, err = capfd.readouterr()
    assert (
        " of each rank by prediction, " in out
        and " predicted (" in out
        and "not predicted" not in out
    )
    assert "fake_tensor" not in err
    saved = load_file(next(Path(run.folder, "checkpoints").glob("step-*/weights.safetensors")))
    assert {name[2:] for name in saved} == set(first)
    for name, tensor in ((name[2:], tensor) for name, tensor in saved.items()):
        torch.testing.assert_close(
            net.state_dict()[name], tensor.view(first[name].shape), rtol=0, atol=0
        )
        assert not torch.equal(tensor, first[name]), name
