"""`sample` of image tokens: pictures in the colours of the codebook, completions of validation
images; the same on any number of ranks. A copy without hvdtrain.extras.sample lacks these tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from ranks import FULL, HIGHEST_STAGE, mpirun, needs_extra, needs_mpirun

from hvdtrain.__main__ import main
from hvdtrain.data.datasets import digits
from hvdtrain.extras.image_tokens.codebook import read_codebook

pytestmark = needs_extra("sample")

MODEL = [
    "task.name=language",
    "model.name=gpt",
    "model.layers=1",
    "model.heads=2",
    "model.width=8",
    "optim.name=adamw",
]
SHORT = ["max_steps=3", "batch.size=16", "batch.evaluate=100", "log.every_steps=3"]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps."""
    run = tmp_path_factory.mktemp("images") / "run"
    assert main(["data.name=image_tokens", "data.colours=4", *MODEL, *SHORT, f"run={run}"]) == 0
    return run


def cells(path: Path, height: int, width: int) -> np.ndarray:
    """The images of a grid, each enlarged eightfold: uint8 (rows, columns, height, width)."""
    page = np.asarray(Image.open(path))
    rows = (page.shape[0] + 2) // (8 * height + 2)
    columns = (page.shape[1] + 2) // (8 * width + 2)
    assert page.shape == (rows * (8 * height + 2) - 2, columns * (8 * width + 2) - 2)
    found = np.zeros((rows, columns, height, width), np.uint8)
    for row in range(rows):
        for column in range(columns):
            top = row * (8 * height + 2)
            left = column * (8 * width + 2)
            found[row, column] = page[top : top + 8 * height : 8, left : left + 8 * width : 8]
    return found


def test_a_grid_of_images(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "grid.png"
    assert main(["sample", str(images), "--count", "9", "--png", str(to)]) == 0
    assert f"9 images drawn, 8x8 -> {to}" in capsys.readouterr().out
    drawn = cells(to, 8, 8)
    assert drawn.shape == (3, 3, 8, 8)
    assert {*np.unique(drawn)} == {*read_codebook(images).colours[:, 0].tolist()}
    first = to.read_bytes()
    assert main(["sample", str(images), "--count", "9", "--png", str(to), "--force"]) == 0
    assert to.read_bytes() == first
    assert (
        main(["sample", str(images), "--count", "9", "--png", str(to), "--force", "--seed", "2"])
        == 0
    )
    assert to.read_bytes() != first


def test_lower_halves_are_drawn_beside_whole_images(images: Path, tmp_path: Path) -> None:
    to = tmp_path / "grid.png"
    assert main(["sample", str(images), "--count", "4", "--prompt-half", "--png", str(to)]) == 0
    pairs = cells(to, 8, 16).reshape(-1, 8, 16)
    colours = read_codebook(images).colours[:, 0].astype(int)
    val = digits.build("digits", None, "val").read(np.arange(360))["x"][..., 0].astype(int)
    coloured = colours[np.abs(val[..., None] - colours).argmin(3)]
    for pair in pairs[:4]:
        whole = pair[:, :8]
        completed = pair[:, 8:]
        assert (coloured == whole).all((1, 2)).any()
        assert np.array_equal(completed[:4], whole[:4])
    assert not np.array_equal(pairs[:4, 4:, :8], pairs[:4, 4:, 8:])


@pytest.mark.slow
@needs_mpirun
def test_two_ranks_draw_what_one_draws(images: Path, tmp_path: Path) -> None:
    one = tmp_path / "one.png"
    two = tmp_path / "two.png"
    assert main(["sample", str(images), "--count", "5", "--png", str(one)]) == 0
    result = mpirun(2, ["-m", "hvdtrain", "sample", str(images), "--count", "5", "--png", str(two)])
    assert result.returncode == 0, result.stderr
    assert two.read_bytes() == one.read_bytes()


@pytest.mark.slow
@needs_mpirun
@pytest.mark.parametrize("framework", ["torch", *["jax"] * FULL])
def test_two_ranks_with_parts_of_the_weights_draw_what_one_draws(
    framework: str, tmp_path: Path
) -> None:
    """Of 3 images rank 0 draws one and rank 1 two, one after the other: rank 0 keeps in step with
    the second."""
    run, one, two = (tmp_path / name for name in ("run", "one.png", "two.png"))
    words = [
        "data.name=image_tokens",
        "data.colours=4",
        *MODEL,
        "model.layers=2",
        *SHORT,
        "speed.precision=fp64",
        HIGHEST_STAGE,
        f"framework={framework}",
    ]
    trained = mpirun(2, ["-m", "hvdtrain", *words, "comm.engine=mpi", f"run={run}"])
    assert trained.returncode == 0, trained.stderr
    assert main(["sample", str(run), "--count", "3", "--png", str(one)]) == 0
    words = [
        "sample",
        str(run),
        "--count",
        "3",
        "--png",
        str(two),
        "batch.evaluate=1",
        "comm.engine=mpi",
    ]
    result = mpirun(2, ["-m", "hvdtrain", *words])
    assert result.returncode == 0, result.stderr
    assert two.read_bytes() == one.read_bytes()


def test_what_cannot_be_sampled(
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grid.png").write_text("mine")
    assert main(["sample", str(images)]) == 2
    assert "grid.png exists already" in capsys.readouterr().err
    assert (tmp_path / "grid.png").read_text() == "mine"
    assert main(["model.name=linear", "max_steps=1", "run=classes"]) == 0
    assert main(["sample", "classes", "--png", "other.png"]) == 2
    assert (
        "sample supports data.name=image_tokens and text, and texts of jsonl, csv and parquet; "
        "the run has data.name=digits" in capsys.readouterr().err
    )


def test_a_codebook_of_another_model(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(images, run)
    (run / "codebook.json").write_text('{"colours": [[0], [255]]}')
    assert main(["sample", str(run), "--count", "1", "--png", str(tmp_path / "grid.png")]) == 2
    assert (
        "the codebook has 2 colours, but the model has 4" in capsys.readouterr().err
        and not (tmp_path / "grid.png").exists()
    )
    assert main(["sample", str(run), "--prompt", "x"]) == 2
    assert "--prompt is for text; the run has data.name=image_tokens" in capsys.readouterr().err
