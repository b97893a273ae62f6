"""Scientific data files: CSV, npz and Parquet give the samples and train the weights that arrays in
memory do; each block is decoded once."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stored_data
from pool import alone
from ranks import ROOT, mpirun, needs_extra, needs_mpirun

import hvdtrain
from hvdtrain.config.read import configure
from hvdtrain.data.array_files import array_files_in
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError
from hvdtrain.extras.science.data.datasets import csv, npz, parquet
from hvdtrain.extras.science.stored.selection import select
from hvdtrain.extras.science.stored.source import StoredSource
from hvdtrain.extras.science.stored.text_tables import lines as table_lines
from hvdtrain.training.datasets import build_source

needs_pyarrow = pytest.mark.skipif(
    not importlib.util.find_spec("pyarrow"), reason="pyarrow is not installed"
)
FORMATS = ["npz", "csv", pytest.param("parquet", marks=needs_pyarrow)]
RANDOM = np.random.default_rng(3)
U = RANDOM.normal(size=(101, 6, 5, 4)).astype("f4")
LABELS = RANDOM.integers(0, 5, 101).astype(">i2")
LOADTXT = np.loadtxt
DRAWN = RANDOM.integers(0, 101, 40)


def stored(source: Source) -> StoredSource:
    found = array_files_in(source)
    assert found is not None
    return found


@pytest.mark.in_turn
@pytest.mark.parametrize("name", FORMATS)
def test_a_job_on_files_trains_the_weights_of_a_job_on_arrays(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, also where it stops in the middle of an epoch and goes on."""
    monkeypatch.chdir(tmp_path)
    stored_data.write(tmp_path, name)
    expected = stored_data.bits(
        stored_data.weights(None, "flat" if name in ("csv", "parquet") else "arrays")
    )
    assert stored_data.bits(stored_data.weights(name, "files")) == expected
    stored_data.weights(name, "stopped", "stop.steps=5")
    resumed = hvdtrain.train("resume=stopped", "stop.steps=null", "data.readers=2")
    assert stored_data.bits(resumed.weights) == expected


@pytest.mark.in_turn
@needs_mpirun
def test_ranks_train_the_weights_of_ranks_on_arrays(tmp_path: Path) -> None:
    names = ["", "npz"]
    stored_data.write(tmp_path, "npz")
    done = mpirun(2, alone("stored_data:train_on_ranks", str(tmp_path), names))
    assert done.returncode == 0, done.stderr
    found = [
        stored_data.bits(np.load(tmp_path / f"weights-{name or 'arrays'}.npz")) for name in names
    ]
    assert found[0] and all(one == found[0] for one in found)


def test_arrays_of_npz_stored_or_compressed_or_by_columns(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=U, y=LABELS)
    np.savez_compressed(tmp_path / "b.npz", x=U, y=LABELS)
    np.savez(tmp_path / "c.npz", x=np.asfortranarray(U), y=LABELS)
    for name in "abc":
        batch = npz.build("npz", tmp_path / f"{name}.npz", "train").read(DRAWN)
        assert (
            batch["x"].tobytes() == U[DRAWN].tobytes()
            and batch["y"].tolist() == LABELS[DRAWN].tolist()
        )


def test_a_table_of_text_over_several_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_lines, "_BLOCK_BYTES", 300)
    monkeypatch.setattr(table_lines, "_PIECE_BYTES", 1000)
    numbers = RANDOM.normal(size=(101, 3))
    for end, cell in itertools.product(("", "\n"), ('"a, b"', '"a,\n""b""\n\n"')):
        rows = [
            f"{a!r},{cell},{b!r},{c!r},{y},TRUE"
            for (a, b, c), y in zip(numbers.tolist(), LABELS.tolist(), strict=True)
        ]
        (tmp_path / "a.csv").write_text("a,text,b,c,label,d\n" + "\n".join(rows) + end)
        source = csv.build(
            "csv", tmp_path / "a.csv", "train", fields={"x": ["a", "b", "c"], "y": "label"}
        )
        batch = source.read(DRAWN)
        assert (
            batch["x"].tobytes() == numbers[DRAWN].tobytes()
            and batch["y"].tolist() == LABELS[DRAWN].tolist()
        )
        assert (
            len(source) == 101
            and len(stored(source).samples.parts[0].arrays["x"][0].array.edges) > 10
        )  # type: ignore[union-attr]
    (tmp_path / "b.csv").write_text("a;b;label\n1;2.5;0\n2;3;1\n")
    batch = csv.build("csv", tmp_path / "b.csv", "train", delimiter=";").read(np.arange(2))
    assert batch["x"].tolist() == [[1.0, 2.5], [2.0, 3.0]] and batch["y"].tolist() == [0, 1]
    (tmp_path / "c.csv").write_text("a\te\t0\tlabel\n1\ttrue\t5\tFALSE\n2\tFalse\t6\tTrue\n")
    source = csv.build("csv", tmp_path / "c.csv", "train", delimiter="tab")
    batch = source.read(np.arange(2))
    assert batch["x"].tolist() == [[1.0, 1.0, 5.0], [2.0, 0.0, 6.0]]
    assert batch["y"].tolist() == [0, 1] and batch["y"].dtype == np.int64
    assert "column label has TRUE and FALSE" in source.notes[1]


@needs_pyarrow
def test_columns_of_parquet_and_what_is_damaged(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    wide = U.reshape(101, -1)
    lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(wide.ravel()), wide.shape[1])
    table = {
        "u": lists,
        "a": wide[:, 0],
        "b": wide[:, 1].astype("f8"),
        "label": LABELS.astype("i2"),
        "fold": ["train"] * 90 + ["val"] * 11,
    }
    table |= {
        "text": ["a"] * 101,
        "holes": [None, *range(100)],
        "uneven": [[1.0]] * 50 + [[1.0, 2.0]] * 51,
    }
    pyarrow.parquet.write_table(
        pyarrow.table(table), path, row_group_size=40, write_page_checksum=True
    )

    def read(
        x: str | list[str], split: Any = "train", rows: np.ndarray = DRAWN, **options: Any
    ) -> Any:
        return parquet.build("parquet", path, split, fields={"x": x, "y": "label"}, **options).read(
            rows
        )

    assert (
        read("u")["x"].tobytes() == wide[DRAWN].tobytes()
        and read("u")["y"].tolist() == LABELS[DRAWN].tolist()
    )
    assert read(["a", "b"])["x"].tobytes() == wide[:, :2][DRAWN].astype("f8").tobytes()
    assert (
        read("u[:, 5:1:-1]", "val", np.arange(11), split_by="fold")["x"].tobytes()
        == wide[90:, 5:1:-1].tobytes()
    )
    assert "column text is string, expected" in error_of(lambda: read("text"))
    assert "column 'holes' of a.parquet lacks 1 values" in error_of(lambda: read("holes"))
    found = error_of(lambda: read("uneven"))
    assert "lists of 1 to 2" in found and "data.name=mine:rows data.pad={uneven: 0}" in found
    assert "has no column c; it has u, a, b" in error_of(lambda: read("c"))
    raw = bytearray(path.read_bytes())
    raw[1000:1400] = bytes(400)
    path.write_bytes(raw)
    assert "cut off or damaged: row group 0" in error_of(lambda: read("u"))
    assert "it is not a Parquet file" in error_of(
        lambda: read("u", rows=truncated(path, 0.9) and DRAWN)
    )


@pytest.mark.parametrize("layout", ["HWC", "CHW", "HW"])
def test_stored_pixels_are_images_as_arrays_in_memory_are(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    x = RANDOM.integers(
        0, 256, {"HWC": (60, 8, 9, 3), "CHW": (60, 3, 8, 9), "HW": (60, 8, 9)}[layout], np.uint8
    )
    y = np.arange(60) % 3
    np.savez(tmp_path / "train.npz", x=x, y=y)
    np.savez(tmp_path / "validation.npz", x=x[:6], y=y[:6])
    job = {
        "model.name": "mlp",
        "model.widths": [4],
        "epochs": 1,
        "batch.size": 16,
        "augment.flip": True,
    }
    expected = hvdtrain.train(
        job, "run=arrays", train_data={"x": x, "y": y}, val_data={"x": x[:6], "y": y[:6]}
    )
    found = hvdtrain.train(job, "run=files", "data.name=npz", f"data.root={tmp_path}")
    assert stored_data.bits(found.weights) == stored_data.bits(expected.weights)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "task",
    [
        "regression",
        pytest.param("multilabel", marks=needs_extra("multilabel")),
        pytest.param("segmentation", marks=needs_extra("maps")),
    ],
)
@needs_extra("trained_models")
def test_pixels_with_their_channels_first_are_images_of_every_task(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of files, of files with an array for each channel, and of arrays: the weights of a job on (n,
    H, W, C)."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(5)
    x = random.integers(0, 256, (24, 8, 8, 3), np.uint8)
    samples = 24
    targets = {
        "regression": (samples,),
        "multilabel": (samples, 4),
        "segmentation": (samples, 8, 8),
    }
    y = random.integers(0, 2, targets[task])
    y = y.astype(np.float32) if task == "regression" else y
    turned = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    np.savez("a.npz", x=turned, r=turned[:, 0], g=turned[:, 1], b=turned[:, 2], y=y)
    model = {"model.name": "unet", "model.widths": [4], "task.classes": 2}
    job = {
        **(model if task == "segmentation" else {"model.name": "linear"}),
        "task.name": task,
        "epochs": 1,
        "batch.size": 8,
        "speed.precision": "fp64",
    }
    stored = {"data.name": "npz", "data.root": "a.npz", "data.val_share": 0.25}
    runs = [
        hvdtrain.train({**job, "run": "own", "data.val_share": 0.25}, train_data={"x": x, "y": y}),
        hvdtrain.train(
            {**job, "run": "own_turned", "data.val_share": 0.25}, train_data={"x": turned, "y": y}
        ),
        hvdtrain.train({**job, **stored, "run": "whole"}),
        hvdtrain.train(
            {**job, **stored, "run": "channels", "data.fields": {"x": ["r", "g", "b"], "y": "y"}}
        ),
    ]
    for run in runs:
        for name, weights in runs[0].weights.items():
            # a convolution adds by its input's memory order
            np.testing.assert_allclose(run.weights[name], weights, rtol=1e-10, atol=1e-13)
        np.testing.assert_array_equal(run.transform(turned), run.transform(x))
        np.testing.assert_allclose(
            hvdtrain.predict(run, {"x": turned}),
            hvdtrain.predict(run, {"x": x}),
            rtol=1e-10,
            atol=1e-13,
        )


def test_splits_by_files_and_by_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "b.npz", x_train=U, y_train=LABELS, x_val=U[:9], y_val=LABELS[:9])
    named = [
        npz.build("npz", tmp_path / "b.npz", split, fields={"x": "x_{split}", "y": "y_{split}"})
        for split in ("train", "val")
    ]  # type: ignore[arg-type]
    assert [len(source) for source in named] == [101, 9]
    folder = tmp_path / "many"
    (folder / "val").mkdir(parents=True)
    for number, rows in enumerate((slice(0, 40), slice(40, 40), slice(40, 101))):
        np.savez(folder / f"train-{number}.npz", x=U[rows], y=LABELS[rows])
        np.savez(folder / "val" / f"{number}.npz", x=U[rows][:2], y=LABELS[rows][:2])
    batch = npz.build("npz", folder, "train").read(DRAWN)
    assert batch["x"].tobytes() == U[DRAWN].tobytes() and len(npz.build("npz", folder, "val")) == 4


def truncated(path: Path, share: float) -> Path:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    return path


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    assert caught.value.where and caught.value.fix
    return str(caught.value)


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "train.parquet").touch()
    assert "pip install 'hvdtrain[parquet]'" in error_of(
        lambda: parquet.build("parquet", tmp_path, "train")
    )


def test_blocks_that_do_not_fit_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(table_lines, "_BLOCK_BYTES", 50_000)
    numbers = RANDOM.integers(0, 2, (3000, 80))
    lines = [
        ",".join(f"c{i}" for i in range(79)) + ",y",
        *(",".join(map(str, row)) for row in numbers.tolist()),
    ]
    (tmp_path / "train.csv").write_text("\n".join(lines))
    (tmp_path / "val.csv").write_text("\n".join(lines[:9]))
    job = [
        "data.name=csv",
        "data.root=.",
        "data.cache_mb=1",
        "model.name=mlp",
        "model.widths=[2]",
        "stop.steps=1",
    ]
    hvdtrain.train({}, "run=full", *job)
    assert (
        "the training set is 2 MB, and data.cache_mb=1: blocks are decoded about 1.3 times in an "
        "epoch" in capsys.readouterr().out
    )
    hvdtrain.train({}, "run=blocks", "data.shuffle=blocks", "data.shuffle_window=2", *job)
    found = capsys.readouterr().out
    assert "shuffled by 2 blocks of 313" in found and "again and again" not in found


@needs_extra("staging")
def test_a_folder_of_files_is_staged_and_a_file_alone_is_not(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("train", "val"):
        np.savez(tmp_path / "data" / f"{name}.npz", x=U, y=LABELS)
    config = configure(
        None, ["data.name=npz", f"data.root={tmp_path}/data", f"data.stage={tmp_path}/stage"]
    )
    source = build_source(config, "train")
    assert (
        source.read(DRAWN)["x"].tobytes() == U[DRAWN].tobytes()
        and f"{tmp_path}/stage" in stored(source).where
    )
    file = configure(
        None,
        ["data.name=npz", f"data.root={tmp_path}/data/train.npz", f"data.stage={tmp_path}/stage"],
    )
    assert "data.stage copies a folder" in error_of(lambda: build_source(file, "train"))


def test_damaged_and_foreign_npz_files(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x=U, y=LABELS)
    assert "a.npz contains all samples, without a validation set" in error_of(
        lambda: npz.build("npz", path, "val")
    )
    for share in (0.0, 0.5, 0.99):
        np.savez(tmp_path / "b.npz", x=U, y=LABELS)
        assert "cut off or damaged" in error_of(
            lambda share=share: npz.build("npz", truncated(tmp_path / "b.npz", share), "train")
        )  # type: ignore[misc]
    for write in (np.savez, np.savez_compressed):
        write(tmp_path / "c.npz", x=np.array([print, None], object), y=np.zeros(2))
        assert "objects are never read: unpickling them could run code" in error_of(
            lambda: npz.build("npz", tmp_path / "c.npz", "train")
        )
    np.savez_compressed(tmp_path / "d.npz", x=U, y=LABELS)
    raw = bytearray((tmp_path / "d.npz").read_bytes())
    raw[5000:5200] = bytes(200)
    (tmp_path / "d.npz").write_bytes(raw)
    assert "cut off or damaged" in error_of(
        lambda: npz.build("npz", tmp_path / "d.npz", "train").read(np.arange(3))
    )
    np.savez_compressed(tmp_path / "e.npz", x=np.zeros((300, 1000)), y=np.zeros(300))
    assert "data.cache_mb=5" in error_of(
        lambda: npz.build("npz", tmp_path / "e.npz", "train", cache_mb=1)
    )
    (tmp_path / "two").mkdir()
    np.savez(tmp_path / "two" / "train-0.npz", x=U, y=LABELS)
    np.savez(tmp_path / "two" / "train-1.npz", x=U[:, :5], y=LABELS)
    assert "x is float32 (5, 5, 4), but float32 (6, 5, 4)" in error_of(
        lambda: npz.build("npz", tmp_path / "two", "train")
    )
    assert "no files val/*.npz" in error_of(lambda: npz.build("npz", tmp_path / "two", "val"))
    assert "needs data.root" in error_of(lambda: npz.build("npz", None, "val"))


def loadtxt_of_old_numpy(text: Any, dtype: Any, **options: Any) -> np.ndarray:
    """Below 2.4 it reads 1.5 as the integer 1."""
    return LOADTXT(text, np.float64, **options).astype(dtype)


def test_damaged_tables_of_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(text: str, **options: Any) -> Any:
        (tmp_path / "a.csv").write_text(text)
        return csv.build("csv", tmp_path / "a.csv", "train", **options).read(np.arange(2))

    assert "y has 0.5, which int64 cannot represent" in error_of(
        lambda: of("a,y\n1,0\n2,0.5\n", dtypes={"y": "int64"})
    )
    assert "the line has 3 columns, the first line 2" in error_of(lambda: of("a,y\n1,0\n1,2,3\n"))
    assert (
        "a.csv:3\n" in (found := error_of(lambda: of("a,y\n1,0\n,1\n")))
        and "could not convert" in found
    ) or "invalid literal" in found
    assert "no names of columns" in error_of(lambda: of("1.5,2\n1,0\n"))
    assert of("400.5,y\n1,0\n2,1\n")["x"].tolist() == [1, 2]
    assert of("1.5,2\n1,0\n2,1\n", fields={"x": "1.5", "y": "2"})["y"].tolist() == [0, 1]
    assert of("a,y\n1,1.0e+00\n2,2.0e+00\n\r\n\n")["y"].tolist() == [1, 2]
    assert of('a,b,y\n1,"b\n",1\n2,b,2\n\n\n', fields={"x": "a", "y": "y"})["y"].tolist() == [1, 2]
    assert "no samples" in error_of(lambda: of("a,y\n\n\n"))
    assert "two columns of the same name, y" in error_of(lambda: of("y,y\n1,0\n"))
    named = {"x": "a", "y": "y"}
    assert of("a,b,b,y\n1,p,p,0\n2,p,p,1\n", fields=named)["x"].tolist() == [1, 2]
    assert "data.fields={x: [A, b], y: Label}" in error_of(lambda: of("A,b,Label\n1,2,0\n"))
    for text, message in {
        "a,town,y\n1,Rome,0\n": "data.fields={x: [a], y: y} leaves it out",
        "a,y\n1,NA\n": "column y: expected a number: could not convert 'NA'",
        "a;y\n1;0\n": "data.delimiter=';'; numbers need a decimal point",
        'a,y\n"1,500",0\n': "thousands=','",
        "a,y,\n1,0,,\n": "remove the delimiter at the ends of lines",
        'a,b,y\n1,2,0\n1,"2,0\n1,2,0\n': "a.csv:3\n  fix: close the quote",
        "# of me\na,y\n1,0\n": "remove what is above them",
        "a,y\r1,0\r": "the lines end in carriage returns without newlines",
        "a y\n1 0\n": "data.delimiter=space",
        "a,label,target\n1,cat,0\n": "{x: [a], y: label}; or data.fields={x: [a], y: target}",
        'a,y\n"r1",1,0\n': "R's write.table(col.names=NA)",
        "a,y\n1,#N/A\n": "fill it",
        'a,y\n"0,125",0\n': "sep=',', decimal=',')",
        'a,y\n"1.234,56",0\n': "decimal=',', thousands='.')",
    }.items():
        assert message in error_of(lambda text=text: of(text))  # type: ignore[misc]
    decimal = error_of(lambda: of("a;y\n1,5;0\n", delimiter=";"))
    assert "pandas.read_csv(FILE, sep=';', decimal=',')" in decimal
    for raw, message in {
        "a,ö\n1,0\n".encode("latin-1"): "iconv -f WINDOWS-1252",
        "a,y\n1,0\n".encode("utf-16"): "iconv -f UTF-16",
        b"\x1f\x8b\n": "gunzip",
    }.items():
        (tmp_path / "b.csv").write_bytes(raw)
        assert message in error_of(lambda: csv.build("csv", tmp_path / "b.csv", "train"))
    assert "which arrays are x and y? The file has a, b" in error_of(lambda: of("a,b\n1,0\n"))
    assert "has no column c; it has a, y" in error_of(
        lambda: of("a,y\n1,0\n", fields={"x": "c", "y": "y"})
    )
    with monkeypatch.context() as patch:
        patch.setattr(table_lines, "_BLOCK_BYTES", 4)
        patch.setattr(np, "loadtxt", loadtxt_of_old_numpy)
        assert of("a,y\n1,0\n2,1.0\n")["y"].tolist() == [0, 1]
        assert (
            "a.csv:3\n" in (found := error_of(lambda: of("a,y\n1,0\n2,0.5\n")))
            and "a whole number, as the first lines have" in found
            and "data.dtypes={y: float64}" in found
        )
        floats = of("a,y\n1,0\n2,0.5\n", dtypes={"y": "float64"})
        assert floats["y"].tolist() == [0, 0.5]
    assert "the line has no column" in error_of(lambda: of("a,y\n1,0\n\n1,1\n"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("0", "does not begin with a slice"),
        (":, x", "cannot be read"),
        (":, ::0", "a step of 0"),
        (":, :, :", "3 axes"),
        (":, 5:2", "nothing"),
    ],
)
def test_words_that_select_nothing(words: str, message: str) -> None:
    assert message in error_of(lambda: select(words, (9, 5), f"u[{words}]", "a.h5"))


@pytest.mark.in_turn
def test_files_damaged_at_random_are_read_or_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tests" / "support" / "fuzz_stored.py"),
            str(tmp_path),
            "3",
            "150",
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
