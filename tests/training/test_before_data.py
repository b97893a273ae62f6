"""Mistakes that a job reports before it reads its data, and a run whose data are elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from ranks import needs_extra

from hvdtrain.__main__ import main
from hvdtrain.core.extras import tables

DATA = """\
import numpy as np

def never():
    print("the data are read")
    return {"x": np.zeros((64, 4), np.float32), "y": np.arange(64) % 2}

class Wrong:
    pass
"""


@pytest.mark.parametrize(
    "wrong, what",
    [
        ("model.name=slow_data:nothing", "slow_data has no nothing"),
        ("model.name=no_such_module:Net", "no module named no_such_module"),
        pytest.param(
            "model.weights=nowhere.safetensors",
            "there is no nowhere.safetensors",
            marks=needs_extra("pretrained"),
        ),
        ("optim.name=slow_data:nothing", "slow_data has no nothing"),
        ("task.name=slow_data:nothing", "slow_data has no nothing"),
        ("recipe.function=slow_data:nothing", "slow_data has no nothing"),
        ("hooks=[slow_data:nothing]", "slow_data has no nothing"),
        ("speed.device=xpu", "no XPU device is visible"),
        ("run=slow_data.py/run", "cannot write the run folder: [Errno 20] Not a directory: "),
    ],
)
def test_a_mistake_is_reported_before_the_data_are_read(
    wrong: str,
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "slow_data.py").write_text(DATA)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "slow_data", None)  # removed again, whoever imports it
    del sys.modules["slow_data"]
    job = ["data.name=slow_data:never", "data.val_share=0.25", "batch.size=16", "max_steps=1"]
    assert main([*job, "run=out", "model.name=mlp", wrong]) == 2
    shown = capsys.readouterr()
    assert what in shown.err and wrong.partition("=")[0] in shown.err
    assert "the data are read" not in shown.out and not (tmp_path / "out").exists()
    if wrong.startswith("run="):
        assert f"'{tmp_path}/slow_data.py'" in shown.err
    if wrong.startswith("speed"):  # the same job without a mistake does read them
        assert main([*job, "run=out", "model.name=mlp"]) == 0
        assert "the data are read" in capsys.readouterr().out


@needs_extra("evaluate")
@pytest.mark.skipif(".csv" not in tables(), reason="this copy reads no tables")
def test_a_run_is_evaluated_on_another_table_and_says_where_its_own_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"{place / 40:.3f},{place * 7 % 40 / 40:.3f},{place // 20}" for place in range(40)]
    (tmp_path / "own.csv").write_text("\n".join(["a,b,y", *rows]))
    (tmp_path / "other.csv").write_text("\n".join(["a,b,y", *rows[15:25]]))
    job = ["data.name=csv", "data.root=own.csv", "data.val_share=0.25", "data.share=0.5"]
    assert main([*job, "run=run", "model.name=mlp", "max_steps=3", "batch.size=10"]) == 0
    capsys.readouterr()

    def evaluated(*words: str) -> tuple[int, str]:
        assert main(["evaluate", "run", "--json", "-", *words]) == 0
        found = json.loads(capsys.readouterr().out)
        return found["count"], found["split"]

    assert evaluated() == (10, "val")
    assert evaluated("--split", "train") == (16, "train")  # half of 15 of each class, data.share
    assert evaluated("data.root=other.csv") == (10, "all")
    assert evaluated("data.root=own.csv") == (40, "all")
    assert main(["evaluate", "run", "data.root=other.csv", "--split", "val"]) == 2
    assert "contains all samples, without a validation set" in capsys.readouterr().err
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for words in (["evaluate", "../run"], ["resume=../run", "max_steps=6"]):
        assert main(words) == 2
        assert (
            "own.csv is a path in the folder where the run was started, not in "
            f"{tmp_path / 'elsewhere'}\n" in capsys.readouterr().err
        )
    Path("runs").touch()  # a resumed job does not write there
    assert main(["resume=../run", "data.root=../own.csv", "max_steps=6"]) == 0
