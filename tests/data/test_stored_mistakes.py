"""Files of science and their keys, where a mistake would have given wrong numbers, fewer samples or a traceback."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hvdtrain
from hvdtrain.data.datasets import csv, hdf5
from hvdtrain.errors import UserError
from hvdtrain.tasks.label_counts import right_terms

JOB = ["model.name=linear", "batch.size=60", "log.display=lines"]


def test_a_line_with_more_columns_in_a_later_block_is_an_error(tmp_path: Path) -> None:
    lines = ["a,b,y", *["1.5,2.5,3"] * 40_000]
    lines[39_000] = "1,500,2,3"
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    source = csv.build("csv", tmp_path / "t.csv", "train")
    with pytest.raises(UserError, match="the line has 4 columns, the first line 3") as caught:
        source.read(np.array([38_999]))
    assert caught.value.where.endswith(":39001")


def test_a_table_without_lines_has_no_samples(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y\n")
    with pytest.raises(UserError, match="the files have no samples"):
        csv.build("csv", tmp_path / "t.csv", "train")


@pytest.mark.parametrize("values", [["a", 2], [2, 77], [2, 300]])
def test_a_value_of_the_split_that_no_sample_has(values: list[object], tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y,part\n" + "".join(f"{n},{n},{n % 3}\n" for n in range(9)))
    with pytest.raises(UserError, match="no sample has") as caught:
        csv.build("csv", tmp_path / "t.csv", "val", split_by="part", split_val=values)  # type: ignore[arg-type]
    assert caught.value.where == "data.split_val"


def test_missing_integers_are_an_error_and_missing_floats_nan() -> None:
    raw, missing = np.array([1, -9999], np.int16), {"_FillValue": np.int16(-9999)}
    with pytest.raises(UserError, match="1 numbers are missing"):
        hdf5._values_of(raw, missing, np.dtype("int16"), "u of f.nc")
    packed = hdf5._values_of(raw, missing | {"scale_factor": 0.1}, np.dtype("float32"), "u of f.nc")
    np.testing.assert_array_equal(packed, np.array([0.1, np.nan], np.float32))


def test_a_run_of_blocks_does_not_go_on_in_another_order(tmp_path: Path) -> None:
    run = hvdtrain.train({"run": str(tmp_path / "run"), "stop.steps": 20, "data.shuffle": "blocks"}, *JOB)
    with pytest.raises(UserError, match="the checkpoint has another data.shuffle"):
        hvdtrain.train(f"resume={run.folder}", "data.shuffle=full", "stop.steps=30")


@pytest.mark.parametrize("word", ["data.shuffle_window=4", "data.shuffle_block=7"])
def test_keys_of_blocks_need_them(word: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{word.partition('=')[0]} needs data.shuffle=blocks"):
        hvdtrain.train({"run": str(tmp_path / "run")}, *JOB, word)


def test_outputs_that_are_no_numbers_are_not_among_the_first() -> None:
    found = right_terms(np.full((4, 10), np.nan), np.arange(4), 5)
    assert not found["among_top"].any()


def test_segmentation_of_arrays_with_a_mean_of_ones_own(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    data = {"x": draw.integers(0, 256, (12, 8, 8, 3), np.uint8), "y": draw.integers(0, 3, (12, 8, 8))}
    words = ["task.name=segmentation", "model.name=unet", "model.widths=[4,8]", "batch.size=6", "data.mean=[0.5,0.5,0.5]"]
    run = hvdtrain.train({"run": str(tmp_path / "run"), "stop.steps": 2}, *words, "data.std=[0.5,0.5,0.5]", train_data=data, val_data=data)
    np.testing.assert_allclose(run.transform(data["x"]), data["x"].transpose(0, 3, 1, 2) / 127.5 - 1, rtol=0, atol=1e-6)
