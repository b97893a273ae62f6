"""Columns of text, dates, truth values and missing cells: the numbers beside scikit-learn's
ColumnTransformer, one message for all problems, and a run that keeps what it has learned."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import stored_data
from pool import alone
from ranks import mpirun, needs_extra, needs_mpirun

import hvdtrain
from hvdtrain.__main__ import main
from hvdtrain.data.source import Source
from hvdtrain.data.user_data.as_source import as_source
from hvdtrain.errors import UserError
from hvdtrain.extras.science.columns.encoded_table import UnencodedTable
from hvdtrain.extras.science.columns.learning import detected
from hvdtrain.extras.science.columns.options import column_options
from hvdtrain.extras.science.columns.raw_table import RawColumn, text_of
from hvdtrain.extras.science.data.datasets import csv, parquet
from hvdtrain.extras.science.user_tables.encoded_frame import frame_to_encode

KINDS = {"patient": "drop", "ward": "category"}


def learned(train: Source, *sources: Source) -> list[np.ndarray]:
    """x of each source, as encoded by what the first one says."""
    record = UnencodedTable(train).compute()
    return [x_of(UnencodedTable(source).finish(record)) for source in (train, *sources)]


def x_of(source: Source) -> np.ndarray:
    return source.read(np.arange(len(source)))["x"]


def of_files(build: Any, folder: Path, **options: Any) -> list[np.ndarray]:
    train = build("", folder, "train", columns=KINDS, **options)
    fields = {name: list(texts) for name, texts in train.columns.items()}
    return learned(train, build("", folder, "val", columns=KINDS, fields=fields, **options))


def of_frames(train: Any, val: Any, **options: Any) -> list[np.ndarray]:
    asked = column_options(KINDS, options.get("missing", "error"), options.get("rare", 0))
    assert asked is not None
    sources = [
        as_source(frame_to_encode(frame, train, asked, "here"), "frame", "here")
        for frame in (train, val[val.columns[::-1]])
    ]
    return learned(*sources)


def by_scikit_learn(train: Any, val: Any, missing: Any, rare: int) -> list[np.ndarray]:
    from sklearn.compose import ColumnTransformer
    from sklearn.impute import SimpleImputer
    from sklearn.preprocessing import OneHotEncoder

    def as_objects(frame: Any) -> Any:
        days = pandas.to_datetime(frame["visit"]).to_numpy().astype("datetime64[s]")
        since = days.astype("int64") / 86400.0
        numbers = frame.assign(
            visit=np.where(np.isnat(days), np.nan, since), smokes=frame["smokes"].astype(float)
        )
        texts = {
            name: frame[name].astype(object).where(frame[name].notna(), np.nan)
            for name in ("sex", "town")
        }
        return numbers.assign(**texts)

    fill: dict[str, Any] = (
        {"strategy": "constant", "fill_value": 0} if missing == 0 else {"strategy": missing}
    )
    each = {}
    for name in train.columns.drop(["patient", "label"]):
        if name in ("sex", "town", "ward"):
            each[name] = OneHotEncoder(
                handle_unknown="infrequent_if_exist",
                min_frequency=rare or None,
                sparse_output=False,
            )
        else:
            each[name] = SimpleImputer(add_indicator=True, **fill)
    found = ColumnTransformer([(name, of, [name]) for name, of in each.items()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # unknown categories, which are meant
        return [found.fit_transform(as_objects(train)), found.transform(as_objects(val))]


@pytest.mark.parametrize(("missing", "rare"), [("mean", 0), ("median", 12), (0, 60), ("mean", 40)])
def test_the_numbers_are_those_of_scikit_learn(missing: Any, rare: int, tmp_path: Path) -> None:
    """A CSV file, a Parquet file and a DataFrame give the same bits. The validation set has a town
    that the training set does not have."""
    train = stored_data.patients(200, 0)
    val = stored_data.patients(90, 1)
    for frame, name in ((train, "train"), (val, "val")):
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
        frame.assign(visit=pandas.to_datetime(frame["visit"])).to_parquet(
            tmp_path / f"{name}.parquet", row_group_size=31
        )
    found = of_files(csv.build, tmp_path, missing=missing, rare=rare)
    for x, expected in zip(found, by_scikit_learn(train, val, missing, rare), strict=True):
        np.testing.assert_allclose(x, expected, rtol=1e-12, atol=0)
    for others in (
        of_files(parquet.build, tmp_path, missing=missing, rare=rare),
        of_frames(train, val, missing=missing, rare=rare),
    ):
        assert [x.tobytes() for x in others] == [x.tobytes() for x in found]


def test_rows_with_missing_cells_are_left_out(tmp_path: Path) -> None:
    frame = stored_data.patients(200, 0)
    frame.to_csv(tmp_path / "train.csv", index=False)
    train = csv.build("csv", tmp_path, "train", columns=KINDS, missing="drop")
    whole = frame.dropna()
    assert len(train) == len(whole) < 150
    encoded = UnencodedTable(train).finish(UnencodedTable(train).compute())
    assert f"{200 - len(whole)} of 200 rows are left out" in "\n".join(encoded.notes)
    assert x_of(encoded)[:, 0].tolist() == whole["age"].tolist()
    labels = encoded.known_labels()
    assert labels is not None
    assert labels.tolist() == (whole["label"] == "well").astype(int).tolist()


def test_what_is_wrong_with_frames(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"a": ["p", "q"], "b": [[1], [2]], "label": ["ill", "well"]})

    def of(kinds: Any, given: Any = frame, train: Any = frame, missing: Any = "error") -> Source:
        asked = column_options(kinds, missing, 0)
        assert asked is not None
        return as_source(frame_to_encode(given, train, asked, "here"), "frame", "here")

    with pytest.raises(UserError, match="data.columns has c, which is not a column of x"):
        of({"c": "drop"})
    with pytest.raises(UserError, match="data.columns drops all columns of x"):
        of({"a": "drop", "b": "drop"})
    with pytest.raises(UserError, match="column label of frame has 'dead'; the classes are ill, "):
        of({"b": "drop"}, frame.assign(label=["ill", "dead"]))
    with pytest.raises(UserError, match="frame has no samples"):
        of({"b": "drop"}, frame.assign(a=None), missing="drop")
    others = UnencodedTable(of({"b": "drop"}, frame.rename(columns={"a": "c"})))
    with pytest.raises(UserError, match="x has the columns c") as caught:
        others.finish(UnencodedTable(of({"b": "drop"})).compute())
    assert caught.value.fix == "those of the training set: a"
    frame.to_parquet(tmp_path / "t.parquet")
    with pytest.raises(UserError, match="column b is list.*, expected one value for each row"):
        parquet.build("parquet", tmp_path / "t.parquet", "train", columns="auto")


TABLE = """\
id,age,when,note,empty,y
a-1,31,2024-05-31,,,0
a-2,old,2024-02-30,,,1
"""


def test_all_problems_of_a_table_are_one_message(tmp_path: Path) -> None:
    rows = [f"a-{n},{n % 40},2024-06-01,fine,,{n % 2}" for n in range(3, 40)]
    (tmp_path / "t.csv").write_text(TABLE + "\n".join(rows) + "\n")
    source = csv.build("csv", tmp_path / "t.csv", "train", columns={"id": "category"})
    with pytest.raises(UserError) as caught:
        UnencodedTable(csv.build("csv", tmp_path / "t.csv", "train", columns="auto")).compute()
    assert caught.value.what.splitlines() == [
        "the table has 5 problems:",
        "    column id: 39 different texts in 39 rows, as an identifier has",
        "    column age: 1 cell is not a number, in line 3 first: 'old'",
        "    column when: 1 cell is not a date, in line 3 first: '2024-02-30'",
        "    column note: 2 cells are empty, in line 2 first",
        "    column empty: no training row has a value",
    ]
    assert caught.value.fix == (
        "data.missing=mean, median or 0 fills empty cells and marks them in a number of their "
        "own; data.missing=drop leaves their rows out; 'data.columns={id: drop, age: category, "
        "when: category, empty: drop}' before training, or correct these cells"
    )
    with pytest.raises(UserError, match="the table has 4 problems"):
        UnencodedTable(source).compute()
    whole = csv.build(
        "csv",
        tmp_path / "t.csv",
        "train",
        columns={"id": "category", "age": "category", "when": "category", "empty": "drop"},
        missing=0,
    )
    assert learned(whole)[0].shape == (39, 39 + 38 + 3 + 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": "age"}, "names no kind of each column"),
        ({"columns": {"age": "text"}}, "data.columns has age as 'text'"),
        ({"columns": {"aeg": "number"}}, "data.columns has aeg, which is not a column of x"),
        ({"columns": {"y": "category"}}, "data.columns has y, which is not a column of x"),
        ({"columns": dict.fromkeys(("id", "age", "when", "note", "empty"), "drop")}, "drops all"),
        ({"missing": "drop"}, "every row has an empty cell"),
        ({"missing": "mode"}, "data.missing='mode' is not a way"),
        ({"rare": -1}, "data.rare=-1 is not a number of rows"),
        ({"columns": "auto", "dtypes": {"x": "int64"}}, "data.dtypes has x as int64"),
        ({"columns": "auto", "fields": {"x": ["age"]}}, "beside another field"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(TABLE)
    with pytest.raises(UserError, match=message):
        csv.build("csv", tmp_path / "t.csv", "train", **options)


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        (("1", "2.5", "-1e3"), "number"),
        (("1", "2", "high"), "number"),
        (("FALSE", "true"), "bool"),
        (("no", "yes"), "bool"),
        (("2024-05-31", "2024-05-31T12:30:00Z", "2024-06-01 08:00"), "date"),
        (("31.05.2024",), "category"),
        (("1", "A"), "category"),
    ],
)
def test_the_kind_of_a_column_is_that_of_most_texts(texts: tuple[str, ...], kind: str) -> None:
    assert detected(texts) == kind


@needs_extra("export")
@needs_extra("predict")
@needs_extra("evaluate")
@needs_extra("trained_models")
def test_a_run_keeps_what_it_has_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """evaluate, predict, run.transform() and export encode other files as the training set."""
    monkeypatch.chdir(tmp_path)
    train = stored_data.patients(200, 0)
    val = stored_data.patients(90, 1)
    train.to_csv("train.csv", index=False)
    val.to_csv("val.csv", index=False)
    job = stored_data.PATIENTS
    run = hvdtrain.train(job, "run=run", "log.display=lines")
    header = capsys.readouterr().out
    x, of_val = of_files(csv.build, tmp_path, missing="mean", rare=12)
    assert f"x has {x.shape[1]} numbers from number age; bool smokes; date visit" in header
    assert "not in x: patient (data.columns)" in header
    ill = int((train["label"] == "ill").sum())
    assert f"classes of the training set: ill {ill}, well {200 - ill}" in header
    missing = int(train["age"].isna().sum())
    assert f"replaced and marked: age {missing} (by {train['age'].mean():.6g})" in header
    columns = Path("run/columns.json").read_bytes()

    straight = hvdtrain.predict(run, val.drop(columns="label"))
    np.testing.assert_array_equal(hvdtrain.predict(run, of_val), straight)
    np.testing.assert_array_equal(hvdtrain.predict(run, val[val.columns[::-1]]), straight)
    standard = (of_val - x.mean(0)) / np.where(x.std(0) > 0, x.std(0), 1)
    np.testing.assert_allclose(run.transform(val), standard, rtol=1e-9, atol=1e-9)
    assert hvdtrain.evaluate(run, val)["loss"] == pytest.approx(
        hvdtrain.evaluate(run, {"x": of_val, "y": (val["label"] == "well").to_numpy() * 1})["loss"]
    )
    capsys.readouterr()
    assert main(["evaluate", "run", "--json", "-"]) == 0
    loss = json.loads(capsys.readouterr().out)["loss"]
    assert loss == pytest.approx(hvdtrain.evaluate(run, val)["loss"], rel=1e-12)

    val.drop(columns=["label", "patient"]).to_csv("new.csv", index=False)
    val.to_parquet("new.parquet")
    np.save("new.npy", of_val)
    said = []
    for name in ("new.csv", "new.parquet", "new.npy"):
        assert main(["predict", "run", "--data", name, "--to", f"{name}.csv"]) == 0
        said.append(Path(f"{name}.csv").read_text())
    assert said[0] == said[1] == said[2]
    lines = said[0].splitlines()
    assert len(lines) == 91 and {line.split(",")[1] for line in lines[1:]} == {"ill", "well"}
    wrong = val.assign(age="old").drop(columns="sex")
    wrong.to_csv("wrong.csv", index=False)
    assert main(["predict", "run", "--data", "wrong.csv", "--to", "-"]) == 2
    assert "wrong.csv has no column sex" in capsys.readouterr().err
    wrong.assign(sex="f").to_csv("wrong.csv", index=False)
    assert main(["predict", "run", "--data", "wrong.csv", "--to", "-"]) == 2
    assert "column age: 90 cells are not a number, in line 2 first: 'old'" in (
        capsys.readouterr().err
    )
    assert main(["export", "run", "--to", "model.safetensors"]) == 0
    from safetensors import safe_open

    with safe_open("model.safetensors", framework="numpy") as file:
        assert file.metadata()["columns"].encode() == columns


@needs_extra("predict")
@needs_extra("evaluate")
def test_a_run_without_what_it_has_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    frame = stored_data.patients(40, 0)
    frame.to_csv("patients.csv", index=False)
    where = {"data.root": "patients.csv", "data.val_share": 0.2, "stop.steps": 1}
    hvdtrain.train(stored_data.PATIENTS | where, "run=run")
    frame[:0].to_csv("new.csv", index=False)
    assert main(["predict", "run", "--data", "new.csv", "--to", "-"]) == 2
    assert "new.csv has no rows" in capsys.readouterr().err
    Path("run/columns.json").write_text('{"columns": [{"name": 1}]}')
    assert main(["evaluate", "run"]) == 2
    assert "the file does not say how columns are encoded" in capsys.readouterr().err
    Path("run/columns.json").unlink()
    assert main(["evaluate", "run"]) == 2
    assert "the file is missing\n  where: run/columns.json" in capsys.readouterr().err


def test_a_script_gives_a_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains what a CSV file of the same rows trains."""
    monkeypatch.chdir(tmp_path)
    train = stored_data.patients(120, 0)
    val = stored_data.patients(60, 1)
    train.to_csv("train.csv", index=False)
    val.to_csv("val.csv", index=False)
    job = {**stored_data.PATIENTS, "stop.steps": 5}
    of_file = hvdtrain.train(job, "run=file")
    for key in ("data.name", "data.root"):
        del job[key]
    of_frame = hvdtrain.train(job, "run=frame", train_data=train, val_data=val)
    assert of_frame.last == of_file.last
    assert stored_data.bits(of_frame.weights) == stored_data.bits(of_file.weights)
    with pytest.raises(UserError, match="need a table, but the data are a dict"):
        hvdtrain.train(job, "run=wrong", train_data={"x": np.ones((9, 2)), "y": np.ones(9)})


@pytest.mark.in_turn
@needs_mpirun
def test_ranks_learn_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stored_data.patients(200, 0).to_csv("train.csv", index=False)
    stored_data.patients(90, 1).to_csv("val.csv", index=False)
    done = mpirun(3, alone("stored_data:train_patients_on_ranks", str(tmp_path)))
    assert done.returncode == 0, done.stderr
    run = hvdtrain.train(stored_data.PATIENTS, "run=run")
    on_ranks = np.load("on-ranks.npz")
    for name, array in run.weights.items():
        np.testing.assert_allclose(on_ranks[name], array, rtol=1e-11, atol=1e-13)
    assert Path("on-ranks/columns.json").read_bytes() == Path("run/columns.json").read_bytes()


def test_a_whole_number_is_the_same_category_with_and_without_its_point() -> None:
    """A frame's column of whole numbers with a missing cell is of floats, and its CSV has 1.0."""
    of_csv = RawColumn.of(["1.0", "-2.0", "", "x.0", "1"])
    of_frame = RawColumn.of([text_of(value) for value in (1.0, -2.0, None, "x.0", 1)])
    assert of_csv.texts == of_frame.texts == ("", "-2", "1", "x.0")
    assert of_csv.rows.tolist() == of_frame.rows.tolist()
