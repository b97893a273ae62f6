"""Checkpoints: what is written, what is read back, and what is said of a bad one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.errors import UserError
from hvdtrain.run import checkpoint
from hvdtrain.run.checkpoint import Standing
from hvdtrain.state import Arrays, Progress


def arrays(value: float = 1.5) -> Arrays:
    return {
        "p.w": np.full((2, 3), value, np.float32),
        "b.count": np.array(7, np.int64),
        "s.w.0": np.arange(6, dtype=np.float64).reshape(2, 3),
    }


def standing(step: int) -> Standing:
    return Standing(Progress(dataset=10, total=30, step=step, samples=4 * step), seconds=2.5, at_target=1, target=0.9, accuracy=0.95)


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, standing(3), arrays(), seed=5, keep_last=2)
    assert folder == tmp_path / "checkpoints" / "step-00000003" == checkpoint.newest(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["progress.json", "slots.safetensors", "weights.safetensors"]
    found, read = checkpoint.load(folder, dataset=10, seed=5, total=50)
    assert found == Standing(Progress(dataset=10, total=50, step=3, samples=12), seconds=2.5, at_target=1, target=0.9, accuracy=0.95)
    assert read.keys() == arrays().keys()
    for name, array in arrays().items():
        np.testing.assert_array_equal(read[name], array)
        assert (read[name].dtype, read[name].shape) == (array.dtype, array.shape)


def test_only_the_newest_stay_and_the_same_step_is_replaced(tmp_path: Path) -> None:
    for step in (1, 2, 10, 10):
        checkpoint.save(tmp_path, standing(step), arrays(step), seed=5, keep_last=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000002", "step-00000010"]
    assert checkpoint.load(checkpoint.newest(tmp_path), 10, 5, 30)[1]["p.w"][0, 0] == 10


def test_an_unfinished_checkpoint_is_never_the_newest(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, standing(1), arrays(), seed=5, keep_last=2)
    (tmp_path / "checkpoints" / ".step-00000009.unfinished").mkdir()
    assert checkpoint.newest(tmp_path).name == "step-00000001"


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint in"):
        checkpoint.newest(tmp_path)


@pytest.mark.parametrize(
    ("dataset", "seed", "what"), [(11, 5, "another training set of samples: 10, this job has 11"), (10, 6, "another seed: 5")]
)
def test_another_job_is_refused(tmp_path: Path, dataset: int, seed: int, what: str) -> None:
    folder = checkpoint.save(tmp_path, standing(3), arrays(), seed=5, keep_last=2)
    with pytest.raises(UserError, match=what):
        checkpoint.load(folder, dataset, seed, 30)


@pytest.mark.parametrize("name", ["weights.safetensors", "slots.safetensors", "progress.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "garbage", "empty"])
def test_a_damaged_file_is_a_user_error(tmp_path: Path, name: str, damage: str) -> None:
    path = checkpoint.save(tmp_path, standing(3), arrays(), seed=5, keep_last=2) / name
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"cut": whole[: len(whole) // 2], "garbage": b"\x80\x04cposix\nsystem\n" * 9, "empty": b""}[damage])
    with pytest.raises(UserError, match="cannot read the checkpoint") as caught:
        checkpoint.load(path.parent, 10, 5, 30)
    assert caught.value.where == str(path.parent)


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, standing(3), arrays(), seed=5, keep_last=2) / "progress.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(UserError, match="format 99, this version reads 1"):
        checkpoint.load(path.parent, 10, 5, 30)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", "abc"),
        ("samples", None),
        ("samples", -64),
        ("dataset", 0),
        ("total", 1.5),
        ("at_target", float("inf")),
        ("seed", True),
        ("seconds", "x"),
        ("accuracy", None),
    ],
)
def test_numbers_that_cannot_be_are_refused(tmp_path: Path, key: str, value: object) -> None:
    path = checkpoint.save(tmp_path, standing(3), arrays(), seed=5, keep_last=2) / "progress.json"
    saved = json.loads(path.read_text())
    (saved["progress"] if key in saved["progress"] else saved)[key] = value
    path.write_text(json.dumps(saved))
    with pytest.raises(UserError, match="cannot read the checkpoint"):
        checkpoint.load(path.parent, 10, 5, 30)


@pytest.mark.parametrize("text", ["[]", "3", "{}", '{"format": 1}'])
def test_another_shape_of_json_is_refused(tmp_path: Path, text: str) -> None:
    path = checkpoint.save(tmp_path, standing(3), arrays(), seed=5, keep_last=2) / "progress.json"
    path.write_text(text)
    with pytest.raises(UserError, match="cannot read the checkpoint"):
        checkpoint.load(path.parent, 10, 5, 30)
