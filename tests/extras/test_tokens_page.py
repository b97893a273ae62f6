"""docs/tokens.md: its code runs and prints what the page shows; and the benchmark that it names."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from pages import failures, run_page
from ranks import ROOT, needs_mpirun

PAGE = ROOT / "docs" / "tokens.md"


@needs_mpirun
@pytest.mark.slow
def test_the_page_runs(tmp_path: Path) -> None:
    messages = failures(PAGE, run_page(PAGE, tmp_path))
    assert not messages, "\n".join(messages)


def test_the_page_says_what_was_measured() -> None:
    rows = list(
        map(json.loads, (ROOT / "benchmarks" / "token_files.jsonl").read_text().splitlines())
    )
    newest = [row for row in rows if row["commit"] == rows[-1]["commit"]]
    ratios = {
        files: [row["to by hand"] for row in newest if row["files"] == files] for files in (1, 8)
    }
    claim = (
        f"{min(ratios[1]):.1f} to {max(ratios[1]):.1f} times as many tokens in a second of the "
        f"processor, and with eight files {min(ratios[8]):.1f} to {max(ratios[8]):.1f} times"
    )
    assert claim in " ".join(PAGE.read_text().split())


def test_the_benchmark_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = importlib.import_module("token_files")
    monkeypatch.setattr(benchmark, "BATCHES", 20)
    row = benchmark.measure(tmp_path, benchmark.write(tmp_path, 1, 2), 64, 2)
    assert row["files"] == row["n"] == 2 and row["to by hand"] > 0
