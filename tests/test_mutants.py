"""The table of wrong changes fits the tree: each text is there once, and so is each test. `make
mutants` runs them."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants import MUTANTS, ROOT, Mutant, Verdict, chosen, of_this_copy, troubles
from simulated_gpu.mutants import GPU_MUTANTS

OF_STEPS = (
    "hvdtrain/frameworks/torch/",
    "hvdtrain/optim/",
    "hvdtrain/extras/dense/",
    "hvdtrain/extras/fully_sharded/",
    "hvdtrain/extras/pipeline/",
    "hvdtrain/extras/servers/",
    "hvdtrain/extras/tensor/",
)


def test_the_text_of_each_change_is_there_once_and_so_are_its_tests() -> None:
    assert troubles(of_this_copy()) == []
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    of_steps = [mutant for mutant in MUTANTS if mutant.file.startswith(OF_STEPS)]
    assert len(of_steps) == 20, "in the strategies and the step"
    assert all(mutant.before != mutant.after for mutant in MUTANTS)


def test_the_changes_that_only_a_gpu_shows_fit_the_tree() -> None:
    assert troubles(GPU_MUTANTS) == []
    assert len({mutant.name for mutant in GPU_MUTANTS}) == len(GPU_MUTANTS) == 15


def test_a_table_that_does_not_fit_is_told_row_by_row(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    (tmp_path / "test_a.py").write_text("def test_x() -> None: ...\n")
    rows = [
        Mutant("twice", "a.py", "x = 1", "x = 2", ("test_a.py::test_x",)),
        Mutant("gone", "b.py", "x", "y", ("test_a.py::test_y", "test_b.py")),
        Mutant("fits", "a.py", "x = 1\nx", "x", ("test_a.py",)),
    ]
    assert troubles(rows, tmp_path) == [
        "twice: a.py has the text to change 2 times, not once: 'x = 1'",
        "gone: b.py has the text to change 0 times, not once: 'x'",
        "gone: there is no test_a.py::test_y",
        "gone: there is no test_b.py",
    ]


def test_a_change_of_an_extra_is_left_out_where_the_extra_is(tmp_path: Path) -> None:
    (tmp_path / "hvdtrain/extras/here").mkdir(parents=True)
    files = ["hvdtrain/extras/here/a.py", "hvdtrain/extras/gone/a.py", "hvdtrain/gone/a.py"]
    rows = [Mutant(file, file, "x", "y", ("test_a.py",)) for file in files]
    assert of_this_copy(rows, tmp_path) == [rows[0], rows[2]]


def test_every_change_is_python_in_the_copy_alone(tmp_path: Path) -> None:
    for mutant in of_this_copy():
        before = (ROOT / mutant.file).read_text()
        copy = tmp_path / mutant.file
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(before)
        mutant.apply(tmp_path)
        compile(copy.read_text(), mutant.file, "exec")
        assert (
            copy.read_text()
            == before.replace(mutant.before, mutant.after)
            != before
            == (ROOT / mutant.file).read_text()
        )


def test_the_first_test_that_fails_is_named() -> None:
    output = "..F\nFAILED tests/a.py::test_x[1] - assert 1 == 2\nFAILED tests/b.py::test_y\n"
    assert Verdict(1, output, 0.1).first_failed == "tests/a.py::test_x[1]"
    assert Verdict(None, "", 600.0).first_failed == "no end within 600 s"
    assert Verdict(0, "3 passed", 1.0).first_failed == ""


def test_a_name_that_is_not_in_the_table_is_told_with_those_that_are() -> None:
    assert [mutant.name for mutant in chosen(["zero.owner"])] == ["zero.owner"]
    with pytest.raises(SystemExit, match=r"mutants: unknown: zero; there are dropout.stream, "):
        chosen(["zero"])
