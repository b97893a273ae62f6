"""Scientific data files and their keys: mistakes that would have given wrong numbers, fewer
samples or a traceback."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import stored_data
from ranks import needs_extra

import hvdtrain
from hvdtrain.__main__ import main
from hvdtrain.data.user_data.as_source import as_source
from hvdtrain.errors import UserError
from hvdtrain.extras.science.data.datasets import csv, npz, parquet
from hvdtrain.extras.science.stored import class_names
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
    assert caught.value.where == "split_val"


def test_a_run_of_blocks_does_not_go_on_in_another_order(tmp_path: Path) -> None:
    run = hvdtrain.train(
        {"run": str(tmp_path / "run"), "stop.steps": 20, "data.shuffle": "blocks"}, *JOB
    )
    with pytest.raises(UserError, match="the checkpoint has another data.shuffle"):
        hvdtrain.train(f"resume={run.folder}", "data.shuffle=full", "stop.steps=30")


@pytest.mark.parametrize("word", ["data.shuffle_window=4", "data.shuffle_block=7"])
def test_keys_of_blocks_need_them(word: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{word} has no effect without data.shuffle=blocks"):
        hvdtrain.train({"run": str(tmp_path / "run")}, *JOB, word)


def test_outputs_that_are_no_numbers_are_not_among_the_first() -> None:
    found = right_terms(np.full((4, 10), np.nan), np.arange(4), 5)
    assert not found["among_top"].any()


@needs_extra("maps")
def test_segmentation_of_arrays_with_a_mean_of_ones_own(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    data = {
        "x": draw.integers(0, 256, (12, 8, 8, 3), np.uint8),
        "y": draw.integers(0, 3, (12, 8, 8)),
    }
    words = [
        "task.name=segmentation",
        "model.name=unet",
        "model.widths=[4,8]",
        "batch.size=6",
        "data.mean=[0.5,0.5,0.5]",
    ]
    run = hvdtrain.train(
        {"run": str(tmp_path / "run"), "stop.steps": 2},
        *words,
        "data.std=[0.5,0.5,0.5]",
        train_data=data,
        val_data=data,
    )
    np.testing.assert_allclose(
        run.transform(data["x"]), data["x"].transpose(0, 3, 1, 2) / 127.5 - 1, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("name", ["", "__index_level_0__", "when"])
def test_the_index_of_pandas_is_not_an_input(name: str, tmp_path: Path) -> None:
    frame = pandas.DataFrame({"a": [0.5, 1.5, 2.5], "b": [1.0, 2.0, 3.0], "y": [0, 1, 1]})
    if name:
        frame = frame.set_index(
            pandas.Index([5, 3, 9], name=None if name.startswith("_") else name)
        )
    frame.to_parquet(tmp_path / "t.parquet")
    source = parquet.build("parquet", tmp_path / "t.parquet", "train")
    np.testing.assert_array_equal(source.read(np.arange(3))["x"], frame[["a", "b"]].to_numpy())
    notes = [note for note in source.notes if "not in x" in note]  # type: ignore[attr-defined]
    assert [name in note for note in notes] == ([True] if name else [])
    if name:
        chosen = parquet.build(
            "parquet", tmp_path / "t.parquet", "train", fields={"x": name, "y": "y"}
        )
        assert chosen.read(np.arange(3))["x"].tolist() == [5, 3, 9]


def test_a_column_that_numbers_the_rows_is_not_an_input(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"a": [0.5, 1.5, 2.5], "y": [0, 1, 1]}, index=[5, 3, 9])
    frame.to_csv(tmp_path / "a.csv")
    (tmp_path / "r.csv").write_text('"","a","y",\n"row 1",0.5,0,\n"row 2",1.5,1,\n"row 3",2.5,1,\n')
    for name in ("a.csv", "r.csv"):
        source = csv.build("csv", tmp_path / name, "train")
        assert source.read(np.arange(3))["x"].tolist() == [0.5, 1.5, 2.5]
        assert "Unnamed: 0" in source.notes[0]
    read = pandas.read_csv(tmp_path / "a.csv")
    read.to_csv(tmp_path / "b.csv", index=False)
    assert csv.build("csv", tmp_path / "b.csv", "train").read(np.arange(3))["x"].tolist() == [
        0.5,
        1.5,
        2.5,
    ]
    with pytest.raises(UserError, match="'Unnamed: 0' of data is the index of a pandas table"):
        as_source(read, "data", "train_data")
    with pytest.raises(UserError, match="which of y, target of data is y") as caught:
        as_source(frame.assign(target=frame.y), "data", "train_data")
    assert "frame.drop(columns=['target'])" in caught.value.fix


@pytest.mark.parametrize("library", ["npz", "csv", "parquet"])
def test_the_column_of_the_split_has_a_value_for_each_sample(library: str, tmp_path: Path) -> None:
    path = tmp_path / f"t.{library}"
    columns = stored_data.columns_of_split()
    if library == "npz":
        np.savez(path, **columns)
    else:
        frame = pandas.DataFrame(columns)
        frame.to_csv(path, index=False) if library == "csv" else frame.to_parquet(path)
    build = {"npz": npz.build, "csv": csv.build, "parquet": parquet.build}[library]
    stored_data.check_column_of_split(library, build, path)


def test_integers_that_are_too_large_for_int64(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"a": np.full(4, 2**63 + 5, np.uint64), "y": np.arange(4.0)})
    frame.to_parquet(tmp_path / "t.parquet")
    source = parquet.build("parquet", tmp_path / "t.parquet", "train", fields={"x": "a", "y": "y"})
    with pytest.raises(UserError, match="field x of sample 2 has 9223372036854775813"):
        source.read(np.array([2, 3]))


def test_values_of_the_split_that_are_missing_or_in_neither_set(tmp_path: Path) -> None:
    parts = ["train", "val", "test", "holdout", "train", "val"]
    frame = pandas.DataFrame(
        {
            "x": np.arange(6.0),
            "y": np.arange(6.0),
            "part": parts,
            "day": pandas.date_range("2020-01-01", periods=6),
        }
    )
    frame.assign(gaps=[None, *parts[1:]], number=[np.nan, 1, 1, 1, 2, 2]).to_parquet(
        tmp_path / "t.parquet"
    )

    def of(column: str, **options: object) -> object:
        return parquet.build(
            "parquet",
            tmp_path / "t.parquet",
            "train",
            fields={"x": "x", "y": "y"},
            split_by=column,
            **options,
        )  # type: ignore[arg-type]

    source = of("part")
    assert len(source) == 2  # type: ignore[arg-type]
    assert any(
        "2 samples are in neither set: data.split_by=part has holdout, test" in note
        for note in source.notes
    )  # type: ignore[arg-type]
    assert len(of("day", split_val=["2020-01-02 00:00:00"])) == 5  # type: ignore[arg-type]
    (tmp_path / "t.csv").write_text(
        "a,y,year,day\n1,0,2001,2001-05\n2,0,2003,2003-11-30\n3,1,2004,x:y\n"
    )
    for column, value, expected in (
        ("year", "2002:2003", [2]),
        ("year", "2003:", [2, 3]),
        ("year", ":2001", [1]),
        ("day", "2001:2003-11", [1, 2]),
        ("day", "2002:2003-12-31", [2]),
        ("day", "x:y", [3]),
    ):
        found = csv.build(
            "csv",
            tmp_path / "t.csv",
            "val",
            fields={"x": "a", "y": "y"},
            split_by=column,
            split_val=[value],
        )
        assert found.read(np.arange(len(found)))["x"].tolist() == expected
    for value, message in (
        ("2005:2009", "no sample is in 2005:2009: year is 2001 to 2004"),
        ("a:b", "has a:b, but the column has numbers"),
    ):
        with pytest.raises(UserError, match=message):
            csv.build(
                "csv",
                tmp_path / "t.csv",
                "val",
                fields={"x": "a", "y": "y"},
                split_by="year",
                split_val=[value],
            )
    (tmp_path / "t.csv").write_text("a,y,part\n1,0,TRUE\n2,0,FALSE\n3,1,TRUE\n")
    for value in (True, 1, "TRUE"):
        found = csv.build("csv", tmp_path / "t.csv", "val", split_by="part", split_val=[value])
        assert found.read(np.arange(2))["x"].tolist() == [1, 3]
    with pytest.raises(UserError, match="part has true and false: which") as caught:
        csv.build("csv", tmp_path / "t.csv", "val", split_by="part")
    assert caught.value.fix == "data.split_val=[true]"
    for column in ("gaps", "number"):
        with pytest.raises(UserError, match=f"{column} lacks 1 values"):
            of(column, split_val=["val"])
    np.savez(
        tmp_path / "t.npz",
        x=np.zeros(4),
        y=np.zeros(4),
        part=np.zeros((4, 2)),
        gaps=np.array([1, 2, np.nan, 2]),
    )
    with pytest.raises(
        UserError, match=r"part is of shape \(4, 2\), expected one value for each sample"
    ):
        npz.build("npz", tmp_path / "t.npz", "train", split_by="part", split_val=[1])
    with pytest.raises(UserError, match="data.split_by=gaps lacks 1 values"):
        npz.build(
            "npz",
            tmp_path / "t.npz",
            "train",
            fields={"x": "x", "y": "y"},
            split_by="gaps",
            split_val=[1],
        )


def write_table(
    library: str, name: str, labels: list[Any], kind: str = "category", **more: object
) -> None:
    frame = pandas.DataFrame({"a": np.arange(len(labels)) * 1.0, "label": labels, **more})
    if library == "csv":
        frame.to_csv(f"{name}.csv", index=False)
    else:
        frame.astype({"label": kind}).to_parquet(f"{name}.parquet", row_group_size=5)


@needs_extra("predict")
@needs_extra("evaluate")
@pytest.mark.parametrize("library", ["csv", "parquet"])
def test_names_of_classes_in_a_table(
    library: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Sorted names of the training set are the classes, also of a set that lacks some."""
    monkeypatch.chdir(tmp_path)
    build = csv.build if library == "csv" else parquet.build

    write = partial(write_table, library)
    write("train", ["dog", "cat", "emu", "cat"] * 3)
    write("val", ["emu", "dog"], "str")
    train, val = (build(library, Path(), split) for split in ("train", "val"))
    assert train.read(np.array([0, 1, 6, 11]))["y"].tolist() == [1, 0, 2, 0]
    assert val.read(np.arange(2))["y"].tolist() == [2, 1]
    assert train.fields["y"].values == 3
    job = [f"data.name={library}", "data.root=.", "stop.steps=2", "run=run", "framework=numpy"]
    hvdtrain.train({}, *job, "model.name=linear", "batch.size=4", "log.display=lines")
    assert "3 classes: cat, dog, emu" in capsys.readouterr().out
    assert "class_names:\n  - cat\n  - dog\n  - emu\n" in Path("run/config.yaml").read_text()
    np.save("x.npy", np.arange(4.0)[:, None])
    assert main(["predict", "run", "--data", "x.npy", "--to", "-"]) == 0
    assert {line.split(",")[1] for line in capsys.readouterr().out.split()[1:]} <= {
        "cat",
        "dog",
        "emu",
    }
    (tmp_path / "other").mkdir()
    write("other/val", ["emu", "dog"])
    losses = []
    for root in (".", "other"):  # classes are those of the run, whatever the file has
        assert main(["evaluate", "run", "--json", "-", f"data.root={root}"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert losses[0] == losses[1]
    write("other/val", ["emu", "yak"])
    assert main(["evaluate", "run", "data.root=other"]) == 2
    assert "the model does not know yak" in capsys.readouterr().err
    write("val", ["emu", "yak"])
    with pytest.raises(UserError, match="has the class 'yak'; the training set has cat, dog, emu"):
        build(library, Path(), "val")
    write("other/val", [0, 1])
    assert main(["evaluate", "run", "data.root=other"]) == 2
    assert "y has no names of classes, as the run has: cat, dog, emu" in capsys.readouterr().err
    write("train", ["dog", None, "cat"])
    with pytest.raises(UserError, match="lacks 1 values|has class names, but also ''"):
        build(library, Path(), "train")
    write("train", ["dog", "cat"], town=["Rome", "Oslo"])
    with pytest.raises(UserError, match="column town.* expected .*") as caught:
        build(library, Path(), "train")
    assert "data.fields={x: [a], y: label}" in caught.value.fix
    with pytest.raises(UserError, match="predicts numbers, but y contains strings: cat, dog"):
        hvdtrain.train(
            {},
            *job,
            "task.name=regression",
            "data.fields={x: a, y: label}",
            "data.val_share=0.5",
            "model.name=linear",
        )


@needs_extra("evaluate")
@pytest.mark.parametrize("library", ["csv", "parquet"])
def test_names_of_classes_that_are_not_as_others(
    library: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    build = csv.build if library == "csv" else parquet.build
    write = partial(write_table, library)
    write("train", ["e", "E", "+", "."])
    assert build(library, Path(), "train").class_names == ("+", ".", "E", "e")
    write("train", ["no-data", "true", "false"])
    write("val", ["true", "false"], "str")
    assert build(library, Path(), "val").read(np.arange(2))["y"].tolist() == [2, 0]
    write("val", [0, 1], "int64")
    with pytest.raises(UserError, match="has the class '0'; the training set has false, no-data"):
        build(library, Path(), "val")
    with monkeypatch.context() as patch:
        patch.setattr(class_names, "_MOST_NAMES", 2)
        with pytest.raises(UserError, match="has at least 3 different strings: are they classes"):
            build(library, Path(), "train")
    if library == "parquet":
        for labels, kind, message in (
            (["1", "10", "2"], "int64", "contains numbers as text, such as '1'"),
            (["1.5", "-2e3"], "float64", "contains numbers as text, such as '-2e3'"),
            (["cat", "7"], "as class_7", "mixes class names with numbers, such as 7"),
        ):
            write("train", labels)
            with pytest.raises(UserError, match=message) as caught:
                build(library, Path(), "train")
            assert kind in caught.value.fix
        write("train", [0, 1, 2], "int64", names=[["a"], ["b"], ["c"]])
        with pytest.raises(UserError, match="column names is list") as caught:
            build(library, Path(), "train")
        assert "cat.codes" not in caught.value.fix
    write("train", ["dog", "${x}", "cat"] * 2)  # a name that config.yaml cannot have
    write("val", ["cat"])
    job = [f"data.name={library}", "data.root=.", "stop.steps=1", "run=run", "framework=numpy"]
    hvdtrain.train({}, *job, "model.name=linear", "batch.size=4")
    assert main(["evaluate", "run"]) == 0
    (tmp_path / "other").mkdir()
    write("other/val", ["cat", "dog"])
    capsys.readouterr()
    assert main(["evaluate", "run", "data.root=other"]) == 2
    assert "2 classes by name, the run 3 without names" in capsys.readouterr().err


def test_names_of_classes_of_npz_are_refused_with_the_words_that_count_them(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", x=np.ones((2, 3)), y=np.array(["cat", "dog"]))
    with pytest.raises(UserError, match="y has strings") as error:
        npz.build("npz", tmp_path / "t.npz", "train")
    assert "the numbers that np.unique(y, return_inverse=True)[1] returns" in error.value.fix


def test_a_file_of_one_array_is_not_called_damaged(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.ones((2, 3)))
    with pytest.raises(UserError, match=r"one array of numpy.save, not an .npz archive") as error:
        npz.build("npz", tmp_path / "t.npy", "train")
    assert error.value.fix == "an array for each field: numpy.savez('t', x=..., y=...)"
