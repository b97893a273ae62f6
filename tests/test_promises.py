"""tests/promises.md: each promise of docs/reliability.md has its test, which exists; and what the
page calls a default is the default."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from ranks import needs_all_files

from hvdtrain.config.sections.checkpoint import CheckpointConfig
from hvdtrain.config.sections.guard import GuardConfig
from hvdtrain.training import run_lock
from hvdtrain.training.checkpoint.saver import RETRY_S

ROOT = Path(__file__).parents[1]
PROMISES = ROOT / "tests" / "promises.md"
PAGES = [
    *sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]),
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    PROMISES,
]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
TABLE = PROMISES.read_text()


@functools.cache
def names_of_tests() -> set[str]:
    """Of all files."""
    return {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }


@needs_all_files
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    text = re.sub(r"\S*tests/[\w/]*", "", page.read_text())  # files: the next test looks for them
    named = set(re.findall(r"\btest_\w+\b(?!\()", text))  # test_step() is a method of Keras
    assert not named - names_of_tests()


@needs_all_files
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_file_that_a_page_names_exists(page: Path) -> None:
    files = re.findall(r"\btests/[\w/]+\.py", page.read_text())
    assert not [name for name in files if not (ROOT / name).exists()]


def test_commands_are_quoted_for_zsh() -> None:
    """There, brackets without quotes are a pattern of file names, and the command does not
    start."""
    lines = [
        line
        for page in [*PAGES, *sorted((ROOT / "configs").rglob("*.yaml"))]
        for line in page.read_text().splitlines()
    ]
    commands = [
        line
        for line in lines
        if re.match(r"[#$ ]*(\S*python\S* -m hvdtrain|hvdtrain|mpirun|srun|make) ", line)
    ]
    unquoted = [
        line
        for line in commands
        if re.search(r"=[^ ]*\[", re.sub(r"'[^']*'|\"[^\"]*\"", "", line.partition(" # ")[0]))
    ]
    assert len(commands) > 40 and not unquoted


def test_every_promise_has_a_test_and_every_section_a_promise() -> None:
    rows = [line.strip("| ").split(" | ") for line in TABLE.splitlines() if line.startswith("| ")][
        1:
    ]
    assert len(rows) > 40
    assert not [promise for promise, names in rows if not re.search(r"`test_\w+`", names)]
    begun = [found[1] for promise, _ in rows if (found := re.match(r"\*\*([^*]+)\*\*", promise))]
    sections = re.findall("^## (.+)$", PAGE, re.MULTILINE)
    pairs = [(a.split()[0].lower(), b) for a, b in zip(begun, sections, strict=True)]
    assert all(a in b.lower() for a, b in pairs), (begun, sections)


def test_the_defaults_that_the_page_names_are_those_of_the_code() -> None:
    guard = GuardConfig()
    checkpoint = CheckpointConfig()
    named = {
        "guard.stall_s=300": guard.stall_s == 300,
        "guard.start_s=600": guard.start_s == 600,
        "guard.equal_steps=100": guard.equal_steps == 100,
        "guard.nonfinite_limit=20": guard.nonfinite_limit == 20,
        "checkpoint.every_minutes=10": checkpoint.every_minutes == 10,
        "keep_last=2": checkpoint.keep_last == 2,
        "tries again every 30 s": RETRY_S == 30,
        "renews every 5 s": run_lock.BEAT_S == 5,
        "after 60 s without a sign of life": run_lock.STALE_S == 60,
        "300 s at most": run_lock.WAIT_S == 300,
        "with a line every 30 s": run_lock.SAY_S == 30,
    }
    page = " ".join(PAGE.split())
    assert not [words for words, is_so in named.items() if not is_so or words not in page]
