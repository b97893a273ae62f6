"""What `export` writes, against the learner that was saved; what it prints; and its errors."""

from __future__ import annotations

import hashlib
import json
import math
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import python
from safetensors import safe_open
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file

from hvdtrain import __version__
from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config import plugins
from hvdtrain.config.read import configure, to_yaml
from hvdtrain.core.arrays import Arrays
from hvdtrain.core.progress import Hyper, Progress
from hvdtrain.errors import UserError
from hvdtrain.events.log import Log
from hvdtrain.extras.export.weights import USAGE, export
from hvdtrain.frameworks.learner import Learner
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner
from hvdtrain.training.checkpoint import files
from hvdtrain.training.checkpoint.saver import Saver
from hvdtrain.training.progress.train_state import TrainState

TASK = Classification((8, 4, 2), 3, np.array([0.4, 0.5]), np.array([0.2, 0.3]))
DATA = {"samples": 40, "shape": [8, 4, 2], "classes": 3, "mean": [0.4, 0.5], "std": [0.2, 0.3]}


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def save(
    step: int, arrays: Arrays | None = None, accuracy: float = 0.5, evaluated: int | None = None
) -> Path:
    """A checkpoint of `run`: weight w is the step."""
    train_state = TrainState(
        Progress(40, 400, step, 20 * step),
        evaluated=step if evaluated is None else evaluated,
        last=accuracy,
    )
    arrays = arrays or {
        "p.w": np.full(2, step, np.float32),
        "b.n": np.array(7),
        "s.w.0": np.zeros(2, np.float32),
    }
    Path("run").mkdir(exist_ok=True)
    return files.write(Path("run"), train_state, arrays, {"seed": 5, "data": DATA})


def trained(*arguments: str) -> Learner:
    """A learner after one step; its checkpoint and its config.yaml are in `run`."""
    config = configure(None, arguments)
    one = build_learner(config, TASK, SingleProcessCommunicator())
    one.step([one.to_device(images())], Hyper(lr=0.1, momentum=0.9, weight_decay=0.0, batch=6), 1)
    save(1, one.state())
    Path("run/config.yaml").write_text(to_yaml(config))
    return one


def images() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {"x": rng.integers(0, 256, (6, *TASK.shape), dtype=np.uint8), "y": rng.integers(0, 3, 6)}


def exported(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines of an export."""
    assert export(["run", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def refused(*arguments: str) -> str:
    """The error of an export, which leaves no file behind."""
    before = sorted(Path().rglob("*"))
    with pytest.raises(UserError) as caught:
        export(arguments)
    assert sorted(Path().rglob("*")) == before
    assert caught.value.where and caught.value.fix
    return str(caught.value)


def metadata(path: str = "m.safetensors") -> dict[str, str]:
    with safe_open(path, "np") as file:
        return file.metadata()


@pytest.mark.parametrize(
    ("name", "options", "arguments"),
    [
        (
            "wide_resnet",
            {"widths": (4, 4, 8, 8)},
            ["model.widths=[4,4,8,8]", "norm.kind=ghost", "norm.ghost=2"],
        ),
        ("wide_resnet", {"widths": (4, 4, 8, 8)}, ["model.widths=[4,4,8,8]", "norm.kind=sync"]),
        (
            "mlp",
            {"dropout": 0.1},
            ["model.dropout=0.1", "speed.precision=fp64", "optim.name=torch.optim.Adam"],
        ),
    ],
    ids=["ghost", "sync", "fp64"],
)
def test_both_files_give_the_learners_logits(
    name: str, options: dict, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A new model, loaded strictly, on images normalized by the metadata; its loss is that of the
    learner's evaluation."""
    learner = trained(f"model.name={name}", *arguments)
    dtype = torch.float64 if "speed.precision=fp64" in arguments else torch.float32
    lines = [exported(capsys, "--to", file) for file in ("m.safetensors", "m.pt")]
    fields = metadata()
    batch = images()
    assert {
        key: json.loads(fields[key])
        for key in ("mean", "std", "image_shape", "classes", "step", "epochs")
    } == {
        **{
            "mean": [0.4, 0.5],
            "std": [0.2, 0.3],
            "image_shape": [8, 4, 2],
            "classes": 3,
            "step": 1,
            "epochs": 0.5,
        }
    }
    assert (fields["format"], fields["hvdtrain"], fields["framework"], fields["accuracy"]) == (
        "pt",
        __version__,
        "torch",
        "0.5",
    )
    assert json.loads(fields["model"]) == {
        "name": name,
        "options": {key: list(v) if key == "widths" else v for key, v in options.items()},
    }
    mean, std = (
        torch.tensor(json.loads(fields[key]), dtype=dtype).view(1, -1, 1, 1)
        for key in ("mean", "std")
    )
    x = (torch.from_numpy(batch["x"]).permute(0, 3, 1, 2).to(dtype) / 255 - mean) / std
    for printed in lines:  # the two lines of Python that export printed
        model = (
            plugins.load("frameworks/torch/models", name, "here")
            .build(name, TASK.shape, TASK.classes, **options)
            .to(dtype)
        )
        exec("\n".join(line[9:] for line in printed[-2:]), {"model": model})
        with torch.no_grad():
            assert torch.equal(model.eval()(x), learner.model.eval()(x))
            loss = torch.nn.functional.cross_entropy(
                model(x).double(), torch.from_numpy(batch["y"]), reduction="sum"
            )
        assert float(loss) == pytest.approx(
            float(learner.evaluate(learner.to_device(batch))["loss"]), rel=1e-6
        )


def test_both_formats_hold_the_state_dict_and_nothing_else() -> None:
    state = {
        name: t.clone()
        for name, t in trained("model.name=wide_resnet", "model.widths=[4,4,8,8]")
        .model.state_dict()
        .items()
    }
    for to in ("m.safetensors", "m.pt"):
        assert export(["run", "--to", to]) == 0
    for weights in (load_file("m.safetensors"), torch.load("m.pt", weights_only=True)):
        assert type(weights) is dict
        assert weights.keys() == state.keys()
        for name, tensor in weights.items():
            assert torch.equal(tensor, state[name]) and tensor.is_contiguous()
            assert (tensor.dtype, tensor.shape) == (state[name].dtype, state[name].shape)


@pytest.mark.parametrize("framework", ["jax", "numpy"])
def test_other_frameworks_keep_their_names(
    framework: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state = trained(f"framework={framework}", "model.name=linear").state()
    lines = exported(capsys, "--to", "m.safetensors")
    found: dict = {}
    exec("\n".join(line[9:] for line in lines[-2:]), found)
    for weights in (found["weights"], load_numpy("m.safetensors")):
        assert weights.keys() == {"fc.weight", "fc.bias"}
        np.testing.assert_array_equal(weights["fc.weight"], state["p.fc.weight"])
    assert metadata()["framework"] == framework
    assert (
        exported(capsys, "--to", "m.pt")[-1]
        == '         weights = torch.load("m.pt", weights_only=True)'
    )


def test_the_output_of_an_export(capsys: pytest.CaptureFixture[str]) -> None:
    trained("framework=numpy", "model.name=linear")
    save(30, accuracy=0.75, evaluated=20)
    assert exported(capsys, "--to", "m.safetensors")[:3] == [
        "step-00000030 of run (epoch 15.00, validation accuracy 0.7500 of step 20) -> "
        "m.safetensors: 2 arrays, 3 numbers, 0.0 MB",
        'model    {"name": "linear", "options": {}} of framework \'numpy\'',
        "input    (pixels / 255 - mean) / std: mean [0.4, 0.5], std [0.2, 0.3], image_shape [8, "
        "4, 2], classes 3",
    ]
    assert (metadata()["accuracy"], metadata()["accuracy_of_step"]) == ("0.75", "20")
    save(31, accuracy=math.nan, evaluated=0)
    assert (
        "(epoch 15.50, not evaluated yet)"
        in exported(capsys, "--to", "m.safetensors", "--force")[0]
    )
    assert "accuracy" not in metadata()


@pytest.mark.parametrize("arguments", [[], ["--help"], ["run", "-h"]])
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert export(arguments) == 0
    assert capsys.readouterr().out == f"{USAGE}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--to", "m.pt"],
            [
                "RUN is missing\n  where: command line of export\n  fix: hvdtrain export RUN --to "
                "FILE"
            ],
        ),
        (["run"], ["--to is missing\n", "fix: hvdtrain export RUN"]),
        (["run", "--to"], ["argument --to: expected one argument\n", "fix: hvdtrain export RUN"]),
        (
            ["run", "--too", "m.pt"],
            ["unknown argument '--too'\n", "fix: did you mean --to?; hvdtrain export RUN"],
        ),
        (
            ["run", "more", "--to", "m.pt"],
            [
                "unknown argument 'more'\n",
                "fix: known: --to, --checkpoint, --adapters, --merged, --force; hvdtrain",
            ],
        ),
        (
            ["run", "--to", "m.tflite"],
            [
                "m.tflite ends neither in .safetensors nor in .pt",
                "\n  where: --to\n  fix: as in --to model.safetensors",
            ],
        ),
        (["run", "--to", "no/m.pt"], ["there is no folder no\n  where: --to\n  fix: mkdir -p no"]),
        (
            ["run", "--to", "old.pt"],
            ["old.pt exists already\n  where: --to\n  fix: --force overwrites it"],
        ),
        (["run", "--to", "link.pt"], ["link.pt exists already\n"]),
        (["run", "--to", "folder.pt", "--force"], ["folder.pt is a folder\n"]),
        (
            ["nowhere", "--to", "m.pt"],
            ["no checkpoint in nowhere\n  where: RUN\n  fix: give the run folder"],
        ),
        (
            ["run", "--to", "m.pt", "--checkpoint", "bets"],
            ["run has no checkpoint bets\n  where: --checkpoint\n  fix: did you mean best?"],
        ),
        (
            ["run", "--to", "m.pt", "--checkpoint", "120"],
            ["has no checkpoint 120\n", "fix: known: newest, best, step-00000003"],
        ),
        (
            ["run", "--to", "m.pt", "--checkpoint", "best"],
            ["no checkpoint of run was evaluated at its own step\n", "fix: --checkpoint newest"],
        ),
        (
            ["r" * 256, "--to", "m.pt"],
            ["a name of 256 bytes: rrr", "  where: RUN\n", "fix: a name has at most 255 bytes"],
        ),
        (
            ["run", "--to", f"{'m' * 253}.pt"],
            ["a name of 256 bytes: mmm", "  where: --to\n", "fix: a name has at most 255 bytes"],
        ),
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_mistakes(arguments: list[str], expected: list[str]) -> None:
    save(3, evaluated=2)
    Path("old.pt").write_text("old")
    Path("link.pt").symlink_to("gone.pt")
    Path("folder.pt").mkdir()
    text = refused(*arguments)
    for message in expected:
        assert message in text, text


@pytest.mark.parametrize("to", ["m.safetensors", "m.pt"])
def test_a_full_disk_leaves_the_file_as_it_was_and_the_next_export_overwrites_it(to: str) -> None:
    save(1, {"p.w": np.zeros(10000)})
    Path(to).write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        text = refused("run", "--to", to, "--force")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"cannot write {to}: " in text and "File too large" in text
    assert Path(to).read_text() == "old"
    assert export(["run", "--to", to, "--force"]) == 0
    assert Path(to).stat().st_size > 80000
    Path("plain").touch()
    assert Path(to).stat().st_mode == Path("plain").stat().st_mode
    assert sorted(os.listdir()) == sorted([to, "plain", "run"])


def test_a_numpy_job_is_exported_without_torch() -> None:
    arguments = [
        "framework=numpy",
        "model.name=linear",
        "epochs=2",
        "optim.base_lr=0.05",
        f"run={Path('job').absolute()}",
    ]
    code = f"""
import sys
from hvdtrain.__main__ import main
from hvdtrain.extras.export.weights import export
assert main({arguments!r}) == 0
assert export([{str(Path("job").absolute())!r}, "--to", {str(Path("m.safetensors").absolute())!r}, "--checkpoint", "best"]) == 0
loaded = [m for m in ("torch", "jax", "sklearn.linear_model") if m in sys.modules]
assert not loaded, loaded
"""  # noqa: E501
    done = python(["-c", code], is_warm=False)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in Path("job/events.jsonl").read_text().splitlines()]
    best = max(event["val_accuracy"] for event in events if event["kind"] == "epoch")
    assert (
        float(metadata()["accuracy"]) == best
        and json.loads(metadata()["model"])["name"] == "linear"
    )
    assert {name: a.shape for name, a in load_numpy("m.safetensors").items()} == {
        "fc.weight": (10, 64),
        "fc.bias": (10,),
    }


def test_tied_weights_load_strictly_and_unsaved_buffers_are_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "support"))
    one = trained("model.name=faulty:Tied")
    assert (
        one.state_dict_names()["two.weight"]
        == one.state_dict_names()["one.weight"]
        == "p.one.weight"
    )
    shutil.rmtree("run/checkpoints")
    saver = Saver(Path("run"), configure(None, []).checkpoint, {"seed": 5, "data": DATA}, Log([]))
    assert saver.finish(TrainState(Progress(40, 400, 3, 60)), one) == ""
    exported(capsys, "--to", "model.safetensors")
    from faulty import Tied

    model = Tied(TASK.shape, TASK.classes)
    model.load_state_dict(load_file("model.safetensors"), strict=True)
    assert model.two.weight is model.one.weight
    assert torch.equal(model.one.weight, torch.from_numpy(one.state()["p.one.weight"]))


def test_listed_names_of_missing_arrays_are_refused() -> None:
    folder = save(3)
    tree = json.loads((folder / "progress.json").read_text())
    (folder / "progress.json").write_text(json.dumps(tree | {"names": {"w": "s.w.0"}}))
    sums = [
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n"
        for name in (*files.ARRAYS, files.PROGRESS)
    ]
    (folder / "SHA256SUMS").write_text("".join(sums))
    assert "the checkpoint lists names of arrays that are missing" in refused(
        "run", "--to", "model.pt"
    )
