"""`predict --data`: tables, arrays, tokens and functions, each row as plain torch says it; and what
is wrong with a file."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import yaml
from ranks import needs_extra
from safetensors.numpy import load_file, save_file

import hvdtrain
from hvdtrain.__main__ import main
from hvdtrain.data.source import NamedArrays
from hvdtrain.errors import UserError
from hvdtrain.extras.predict.data_file import read_data_file
from hvdtrain.extras.science.user_tables.predicted_table import read_numbers

pytestmark = needs_extra("export")
RANDOM = np.random.default_rng(0)
COLUMNS = RANDOM.normal([100.0, -5.0, 0.0], [10.0, 1.0, 0.01], (60, 3))
LABELS = (COLUMNS[:, 0] > 100).astype(np.int64)
CONFIG: dict[str, Any] = {
    "epochs": 9,
    "stop.steps": 20,
    "batch.size": 16,
    "optim.base_lr": 0.5,
    "batch.evaluate": 17,
    "run": "run",
}
FUNCTION = """
import numpy as np
def rows(split, first=0):
    return {"x": np.load("x.npy")[first:]}
"""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def train(y: np.ndarray, **config: Any) -> None:
    data = {"x": COLUMNS, "y": y}
    given = {"loss": config.pop("loss")} if "loss" in config else {}
    hvdtrain.train(
        {**CONFIG, "model.name": "linear"},
        *(f"{key}={value}" for key, value in config.items()),
        train_data=data,
        val_data=data,
        **given,
    )


def outputs() -> torch.Tensor:
    """Of the exported weights, in plain torch."""
    assert main(["export", "run", "--to", "m.safetensors", "--force"]) == 0
    weights = {name: torch.tensor(array) for name, array in load_file("m.safetensors").items()}
    x = torch.tensor((COLUMNS - COLUMNS.mean(0)) / COLUMNS.std(0), dtype=torch.float32)
    return x @ weights["fc.weight"].T + weights["fc.bias"]


def predicted(data: str, *words: str) -> list[list[str]]:
    assert main(["predict", "run", "--data", data, "--to", "said.csv", "--force", *words]) == 0
    with Path("said.csv").open(newline="") as file:
        return list(csv.reader(file))


def test_the_classes_of_a_table_in_every_form(capsys: pytest.CaptureFixture[str]) -> None:
    train(LABELS)
    np.savetxt("plain.csv", COLUMNS, delimiter=",")
    labelled = np.column_stack([COLUMNS[:, :1], LABELS, COLUMNS[:, 1:]])
    np.savetxt("named.csv", labelled, delimiter=",", header="a,label,b,c", comments="", fmt="%.17g")
    np.save("x.npy", COLUMNS)
    np.savez("x.npz", x=COLUMNS, y=LABELS)
    save_file({"x": COLUMNS}, "x.safetensors")
    Path("mine_of_predict.py").write_text(FUNCTION)
    found = outputs().double()
    probability, label = found.softmax(1).max(1)
    assert 0 < LABELS.sum() < 60 and (label.numpy() == LABELS).mean() > 0.8
    for data in (
        "plain.csv",
        "named.csv",
        "x.npy",
        "x.npz",
        "x.safetensors",
        "mine_of_predict:rows",
    ):
        head, *rows = predicted(data)
        assert head == ["sample", "class", "probability", "p_0", "p_1"] and [
            row[0] for row in rows
        ] == [str(sample) for sample in range(60)]
        assert [int(row[1]) for row in rows] == label.tolist()
        np.testing.assert_allclose([float(row[2]) for row in rows], probability, atol=2e-6)
        shares = [[float(cell) for cell in row[3:]] for row in rows]
        np.testing.assert_allclose(shares, found.softmax(1), atol=2e-6)
    assert len(predicted("mine_of_predict:rows", "data.first=50")) == 11
    assert "10 samples -> said.csv" in capsys.readouterr().out


@pytest.mark.parametrize(
    "loss",
    [None, lambda outputs, batch: (outputs - batch["y"]).square().mean(1)],
    ids=["regression", "loss"],
)
def test_numbers(loss: Callable[..., Any] | None) -> None:
    train(
        COLUMNS[:, :2] / 100,
        **({"task.name": "regression"} if loss is None else {"loss": loss}),
        **{"optim.base_lr": 0.01},
    )
    np.save("x.npy", COLUMNS)
    head, *rows = predicted("x.npy")
    assert head == ["sample", "prediction_1", "prediction_2"]
    np.testing.assert_allclose(np.array(rows, float)[:, 1:], outputs(), rtol=1e-4, atol=1e-5)


@needs_extra("trained_models")
def test_tokens() -> None:
    tokens = (np.arange(40)[:, None] + np.arange(9)) % 7
    source = NamedArrays({"tokens": tokens}, {"tokens": 7})
    words = [
        "task.name=language",
        "model.name=gpt",
        "model.layers=1",
        "model.width=16",
        "model.heads=1",
        "optim.name=adam",
    ]
    run = hvdtrain.train(
        {**CONFIG, "stop.steps": 60, "epochs": 99, "optim.base_lr": 0.03},
        *words,
        train_data=source,
        val_data=source,
    )
    np.savetxt("tokens.csv", tokens[:, :-1], delimiter=",", fmt="%d")
    head, *rows = predicted("tokens.csv")
    assert head == ["sample", "token", "probability"]
    logits = hvdtrain.predict(run, tokens)[:, -1]
    assert [int(row[1]) for row in rows] == logits.argmax(1).tolist() == tokens[:, -1].tolist()
    np.testing.assert_allclose(
        [float(row[2]) for row in rows], torch.tensor(logits).double().softmax(1).amax(1), atol=2e-6
    )
    with pytest.raises(
        UserError,
        match=r"the model takes tokens int64 \(9,\) below 7, the data have it as int64 \(8,\)",
    ):
        hvdtrain.evaluate(run, tokens[:, :-1])


def test_what_is_wrong_with_the_command_or_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    train(LABELS)

    def refused(*arguments: str) -> str:
        capsys.readouterr()
        assert main(["predict", "run", "--to", "said.csv", *arguments]) == 2
        assert not Path("said.csv").exists()
        return capsys.readouterr().err

    np.save("x.npy", COLUMNS[:, :2])
    Path("few.csv").write_text("1,2,3\n4,5\n")
    assert "--images and --data are both given" in refused("--data", "x.npy", "--images", "in")
    assert "there is no file no.csv" in refused("--data", "no.csv")
    assert "no module named no_such" in refused("--data", "no_such:rows")
    assert "the model takes x float64 (3,), the data have it as float64 (2,)" in refused(
        "--data", "x.npy"
    )
    assert "row 1 of few.csv has 2 values, the first one 3" in refused("--data", "few.csv")
    hvdtrain.train(
        {**CONFIG, "run": "object"},
        model=torch.nn.Linear(3, 2),
        train_data={"x": COLUMNS, "y": LABELS},
        val_data=(COLUMNS, LABELS),
    )
    assert main(["predict", "object", "--data", "x.npy", "--to", "said.csv"]) == 2
    assert "is an object that only its script defines" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("x.txt", b"1", "x.txt is not a file of numbers"),
        ("x.csv", b"", "x.csv has no rows"),
        ("x.csv", b"a,b\n1,2\n3,cat\n", "row 1, column b of x.csv is 'cat', expected a number"),
        ("x.csv", b"1,\xff\n", "x.csv cannot be read"),
        ("x.npy", b"\x93NUMPY", "x.npy cannot be read"),
        ("x.npz", b"PK\x03\x04", "it is not an .npz archive"),
    ],
)
def test_files_that_are_none(name: str, content: bytes, what: str) -> None:
    Path(name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_data_file(Path(name))
    assert what in caught.value.what


def test_pickled_arrays_are_not_read() -> None:
    np.save("x.npy", np.array([{}, []], object), allow_pickle=True)
    with pytest.raises(UserError, match="Python objects in dtype"):
        read_data_file(Path("x.npy"))


def _table(name: str, *columns: str) -> None:
    """A file with these columns of COLUMNS, the labels and others, in this order."""
    known = {"a": COLUMNS[:, 0], "b": COLUMNS[:, 1], "c": COLUMNS[:, 2], "y": LABELS}
    lines = [",".join(columns)]
    for row in range(len(COLUMNS)):
        lines.append(",".join(str(known.get(column, LABELS)[row]) for column in columns))
    Path(name).write_text("\n".join(lines) + "\n")


def _evaluated(*words: str) -> tuple[float, float]:
    assert main(["evaluate", "run", "--json", "out.json", *words]) == 0
    found = json.loads(Path("out.json").read_text())
    return found["loss"], found["accuracy"]


@needs_extra("evaluate")
@needs_extra("trained_models")
def test_columns_of_every_file_are_found_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """A validation set, a set to evaluate and rows to predict with other columns first."""
    _table("same.csv", "a", "b", "c", "y")
    _table("other.csv", "y", "c", "z", "a", "b")
    Path("data").mkdir()
    shutil.copy("same.csv", "data/train.csv")
    shutil.copy("same.csv", "data/val.csv")
    words = ["data.name=csv", "model.name=linear", *(f"{k}={v}" for k, v in CONFIG.items())]
    assert main([*words, "data.root=data"]) == 0
    straight = _evaluated()
    shutil.copy("other.csv", "data/val.csv")
    assert main([*words, "data.root=data", "run=again"]) == 0
    losses = [hvdtrain.read(run)["val_loss"].dropna().tolist() for run in ("run", "again")]
    assert losses[0] and losses[0] == losses[1]
    assert _evaluated() == straight
    Path("other").mkdir()
    shutil.copy("other.csv", "other/val.csv")
    capsys.readouterr()
    assert _evaluated("data.root=other") == straight
    told = capsys.readouterr().out
    assert "other/val.csv: columns in no field of the training set: z" in told
    numbers = pandas.read_csv("other.csv")
    numbers.drop(columns="z").to_parquet("other.parquet", index=False)
    words = ["data.root=other.parquet", "data.name=parquet", "data.val_share=0.5"]
    assert main(["evaluate", "run", "--json", "of_parquet.json", *words]) == 0
    words[:2] = ["data.root=same.csv", "data.name=csv"]
    assert main(["evaluate", "run", "--json", "of_csv.json", *words]) == 0
    found = [json.loads(Path(f"of_{name}.json").read_text()) for name in ("parquet", "csv")]
    assert found[0]["loss"] == found[1]["loss"]
    straight_frame = hvdtrain.predict("run", numbers[["a", "b", "c"]])
    for frame in (numbers[["c", "a", "b"]], {"x": numbers[["b", "a", "c"]]}):
        np.testing.assert_array_equal(hvdtrain.predict("run", frame), straight_frame)
    said = predicted("same.csv")
    capsys.readouterr()
    assert predicted("other.csv") == said
    assert "other.csv: not inputs of the model: z" in capsys.readouterr().err
    np.savetxt("plain.csv", COLUMNS, delimiter=",", fmt="%.17g")
    assert predicted("plain.csv") == said
    _table("less.csv", "a", "c")
    assert main(["predict", "run", "--data", "less.csv", "--to", "x.csv"]) == 2
    told = capsys.readouterr().err
    assert "less.csv has no column b; it has a, c" in told
    assert "the columns of the training data: a, b, c" in told


@needs_extra("evaluate")
def test_a_run_of_an_earlier_version_goes_on_without_a_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its config.yaml has no data.fields."""
    _table("same.csv", "a", "b", "c", "y")
    Path("data").mkdir()
    for split in ("train", "val"):
        shutil.copy("same.csv", f"data/{split}.csv")
    words = ["data.name=csv", "model.name=linear", "data.root=data"]
    words += [f"{k}={v}" for k, v in CONFIG.items()]
    assert main(words) == 0
    file = Path("run/config.yaml")
    former = yaml.safe_load(file.read_text())
    assert former["data"].pop("fields") == {"x": ["a", "b", "c"], "y": ["y"]}
    file.write_text(yaml.safe_dump(former))
    assert main([*words, "stop.steps=24"]) == 0
    file.write_text(yaml.safe_dump(former))
    capsys.readouterr()
    assert main(["evaluate", "run"]) == 0
    assert "records no columns; x has them in this order: a, b, c" in capsys.readouterr().out
    predicted("same.csv")
    assert "records no columns; taken in this order: a, b, c" in capsys.readouterr().err


def test_rows_to_predict_may_have_truth_values() -> None:
    Path("t.csv").write_text("a,b\nTRUE,1.5\nfalse,2\n")
    np.testing.assert_array_equal(
        read_numbers(Path("t.csv"), {"fields": {"x": ["b", "a"]}}), [[1.5, 1.0], [2.0, 0.0]]
    )
    Path("t.csv").write_text("TRUE,1\nFALSE,2\n")
    np.testing.assert_array_equal(read_data_file(Path("t.csv")), [[1, 1], [0, 2]])
    Path("t.csv").write_text("a;b\n1;2\n")
    np.testing.assert_array_equal(
        read_data_file(Path("t.csv"), {"fields": {"x": "b"}, "delimiter": ";"}), [[2]]
    )
