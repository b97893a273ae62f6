"""Which checkpoint `export` takes; and untrusted run folders: nothing in them runs, takes all
memory, or blocks."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_export import exported, metadata, refused, save

from hvdtrain import __version__
from hvdtrain.core.progress import Progress
from hvdtrain.training.checkpoint import files
from hvdtrain.training.progress.train_state import TrainState


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def step_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    """What is in the file, and the lines before the one that names it."""
    lines = exported(capsys, "--to", "m.safetensors", "--force", *arguments)
    return int(load_file("m.safetensors")["w"][0]), lines[
        : next(i for i, line in enumerate(lines) if " -> m.safetensors: " in line)
    ]


def test_newest_best_and_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Step 4 names the last accuracy, which is step 3's; step 0 was never evaluated; steps 2 and 3
    are equals."""
    for step, accuracy, evaluated in (
        (0, math.nan, 0),
        (1, 0.5, 1),
        (2, 0.7, 2),
        (3, 0.7, 3),
        (4, 0.9, 3),
        (5, 0.6, 5),
    ):
        save(step, accuracy=accuracy, evaluated=evaluated)
    unknown = [
        "the model's name is unknown: config.yaml: cannot read the configuration: [Errno 2] No "
        "such file or directory: 'run/config.yaml'"
    ]
    assert step_of(capsys) == (5, unknown)
    assert step_of(capsys, "--checkpoint", "best") == (2, unknown)
    assert step_of(capsys, "--checkpoint=step-00000003") == (3, unknown)
    (Path("run/checkpoints/step-00000005/weights.safetensors")).write_bytes(b"")
    (Path("run/checkpoints/step-00000002/optimizer.safetensors")).unlink()
    (Path("run/checkpoints/step-00000001/progress.json")).write_text("{")
    checksum = "weights.safetensors: it has no safetensors header"
    assert step_of(capsys) == (4, [f"damaged step-00000005 is skipped: {checksum}", *unknown])
    step, notes = step_of(capsys, "--checkpoint", "best")
    assert (step, notes[1:]) == (
        3,
        [
            "damaged step-00000002 is skipped: optimizer.safetensors: No such file or directory",
            *unknown,
        ],
    )
    assert notes[0].startswith("damaged step-00000001 is skipped: progress.json: ")
    assert (
        f"the checkpoint is damaged: {checksum}\n  where: run/checkpoints/step-00000005"
        in refused("run", "--to", "n.pt", "--checkpoint", "step-00000005")
    )


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["p.../../x"], "the checkpoint has an array named 'p.../../x'"),
        (["p./etc/passwd"], "the checkpoint has an array named 'p./etc/passwd'"),
        (["p.a\x1b[2J"], "the checkpoint has an array named 'p.a\\x1b[2J'"),
        (["p.__metadata__"], "the checkpoint has an array named 'p.__metadata__'"),
        (["p."], "the checkpoint has an array named 'p.'"),
        (["w"], "the checkpoint has an array named 'w'"),
        ([f"p.{'w' * 5000}"], "the checkpoint has an array named 'p.wwwww"),
        (["p.x", "b.x"], "the checkpoint has a weight and a buffer that are both named 'x'"),
        (["s.x.0"], "the checkpoint has no weights"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_names_that_no_model_has(names: list[str], message: str) -> None:
    save(1, {name: np.zeros(2) for name in names})
    text = refused("run", "--to", "m.safetensors")
    assert message in text and len(text) < 400
    assert "fix: hvdtrain writes no such checkpoint: do not trust this run folder" in text


@pytest.mark.parametrize(
    "name", ["weights.safetensors", "optimizer.safetensors", "progress.json", "SHA256SUMS"]
)
def test_a_pipe_does_not_block(name: str) -> None:
    path = save(1) / name
    path.unlink()
    os.mkfifo(path)
    text = refused("run", "--to", "m.pt")
    assert (
        f"no checkpoint of run is good: damaged step-00000001 is skipped: {name}: a pipe, not a "
        "file\n  where: run/checkpoints" in text
    )
    assert f"the checkpoint is damaged: {name}: a pipe, not a file" in refused(
        "run", "--to", "m.pt", "--checkpoint", "step-00000001"
    )


def test_a_checkpoint_larger_than_the_memory_is_not_read() -> None:
    with (save(1) / "weights.safetensors").open("r+b") as file:
        file.truncate(1 << 43)  # 8 TiB, sparse
    text = refused("run", "--to", "m.pt")
    assert (
        "the checkpoint has 8,796,093," in text
        and "fix: export it on a machine with more memory" in text
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "run/config.yaml is a pipe, not a file"),
        (
            lambda path: path.write_text("x: y\n" * 20000),
            "cannot read the configuration: more than 65536 bytes",
        ),
        (
            lambda path: path.write_text(
                "a: &a [1]\n" + "".join(f"b{i}: [*a, *a]\n" for i in range(9))
            ),
            "not YAML: an alias is not read",
        ),
        (
            lambda path: path.write_text("[" * 30000),
            "cannot read the configuration: more than 32 levels deep",
        ),
        (
            lambda path: path.write_text("a: ["),
            "not YAML: expected the node content, but found '<stream end>'",
        ),
        (lambda path: path.write_text("framework: torch\n"), "it has no model.name"),
        (
            lambda path: path.write_text('"a\\e[2J": 1\n"a\\e[2J": 2\n'),
            "not YAML: a key is a text of at most 200 characters, not a\\x1b[2J",
        ),
        (
            lambda path: path.write_bytes(b"\xff\xfe\xfd"),
            "cannot read the configuration: 'utf-8' codec can't decode byte 0xff",
        ),
    ],
    ids=["pipe", "large", "alias", "deep", "broken", "short", "escape", "bytes"],
)
def test_weights_without_a_readable_configuration(
    make: Callable[[Path], object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(1)
    make(Path("run/config.yaml"))
    assert exported(capsys, "--to", "m.safetensors")[0].startswith(
        f"the model's name is unknown: config.yaml: {message}"
    )
    assert "model" not in metadata() and load_file("m.safetensors").keys() == {"w", "n"}


def test_no_part_of_a_configuration_is_run_or_resolved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PASSWORD", "secret")
    save(1)
    Path("run/config.yaml").write_text(
        "framework: torch\nmodel:\n  name: os:system\n  command: ${oc.env:PASSWORD}\n  loss: "
        "touch x\n"
    )
    lines = exported(capsys, "--to", "m.safetensors")
    assert (
        "cannot read the value of model.command: ${oc.env:PASSWORD}: only the value of another "
        "key is looked up" in lines[0]
    )
    assert "secret" not in "".join(lines) and "model" not in metadata()
    Path("run/config.yaml").write_text(
        "framework: torch\nmodel:\n  name: os:system\n  command: touch x\n"
    )
    exported(capsys, "--to", "m.safetensors", "--force")
    assert json.loads(metadata()["model"]) == {
        "name": "os:system",
        "options": {"command": "touch x"},
    }
    assert not Path("x").exists()


def test_invalid_data_fields_are_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    run = Path("run")
    run.mkdir()
    for step, identity in enumerate(
        ({"data": 3}, {"data": {"mean": "\x1b[2J", "std": [[1]], "shape": {}, "classes": True}}, {})
    ):
        files.write(run, TrainState(Progress(40, 400, step, step)), {"p.w": np.zeros(2)}, identity)
        lines = exported(capsys, "--to", "m.safetensors", "--force")
        assert (
            "input    (pixels / 255 - mean) / std: mean unknown, std unknown, image_shape "
            "unknown, classes unknown" in lines
        )
        assert metadata() == {
            "format": "pt",
            "hvdtrain": __version__,
            "step": str(step),
            "epochs": str(step / 40),
        }
