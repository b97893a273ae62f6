"""docs/tokens.md: its code runs and prints what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import failures, run_page
from ranks import ROOT, needs_mpirun


@needs_mpirun
@pytest.mark.slow
def test_the_page_runs(tmp_path: Path) -> None:
    page = ROOT / "docs" / "tokens.md"
    messages = failures(page, run_page(page, tmp_path))
    assert not messages, "\n".join(messages)
    assert "hvdtrain.extras.tokens" not in page.read_text()
