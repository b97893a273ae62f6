"""labs/: each lab's quick form runs, and writes the figures that its page shows."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from ranks import ROOT, needs_mpirun, python

from hvdtrain.__main__ import main
from hvdtrain.errors import DONE, UserError

LABS = sorted((ROOT / "labs").glob("[0-9]-*/lab.py"))


def test_each_lab_is_listed_and_another_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    from hvdtrain.cli.lab import lab

    assert main(["lab"]) == DONE
    listed = capsys.readouterr().out
    index = (ROOT / "labs" / "README.md").read_text()
    for path in LABS:
        assert f"{path.parent.name[0]}  Lab " in listed and f"[{path.parent.name[0]}]({path.parent.name}/README.md)" in index
    with pytest.raises(UserError, match="there is no lab 99"):
        lab(["99"])


@pytest.mark.slow
@needs_mpirun
@pytest.mark.parametrize("path", LABS, ids=lambda path: path.parent.name)
def test_a_lab_writes_the_figures_of_its_page(path: Path, tmp_path: Path) -> None:
    done = python(["-m", "hvdtrain", "lab", path.parent.name[0], "--quick", "--out", str(tmp_path)], timeout_s=300)
    assert done.returncode == 0, done
    shown = re.findall(r"!\[[^]]+\]\(([a-z-]+\.png)\)", (path.parent / "README.md").read_text())
    assert shown
    for name in shown:
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG" == (path.parent / name).read_bytes()[:4]


def test_the_paths_of_lab_1_are_those_of_both_frameworks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(LABS[0].parent))
    monkeypatch.delitem(sys.modules, "lab", raising=False)
    import lab

    lab.check_frameworks()
    assert capsys.readouterr().out.count("NumPy and torch differ by") == 2
    assert lab.noise(4) == pytest.approx(lab.noise(16) * 2, rel=0.1)
    monkeypatch.setattr(lab, "by_autograd", lambda w, x, y: 1.001 * lab.by_hand(w, x, y))
    with pytest.raises(AssertionError):
        lab.check_frameworks()
    monkeypatch.delitem(sys.modules, "lab")


def test_a_gradient_step_costs_what_lab_1_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps fall and epochs rise with the batch."""
    monkeypatch.syspath_prepend(str(LABS[0].parent))
    monkeypatch.delitem(sys.modules, "lab", raising=False)
    import lab

    monkeypatch.setattr(lab, "SEEDS", 3)
    small, large = lab.time_to_loss(4), lab.time_to_loss(256)
    assert small.steps > large.steps and small.epochs < large.epochs / 4
    lab.write(tmp_path / "t.csv", lab.Reached._fields, [small, large])
    assert (tmp_path / "t.csv").read_text().splitlines()[1].startswith("4,")
    monkeypatch.delitem(sys.modules, "lab")
