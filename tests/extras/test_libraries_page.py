"""docs/transformers.md runs as it is written, and prints what it shows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pages import failures, run_page
from ranks import ROOT, needs_extra

from hvdtrain.core.extras import document_files
from hvdtrain.core.import_torchvision import define_missing_operators

pytestmark = [
    pytest.mark.in_turn,
    pytest.mark.skipif(not document_files(), reason="this copy reads no JSON lines"),
    *(needs_extra(name) for name in ("export", "pretrained", "sample")),
]

define_missing_operators()  # transformers imports torchvision
pytest.importorskip("transformers", reason="transformers is not installed: make test-keras")
PAGE = ROOT / "docs" / "transformers.md"
# of each process that the page starts: what define_missing_operators() did above
BEFORE_TORCHVISION = """
import sys

class BeforeTorchvision:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(BeforeTorchvision)
            from hvdtrain.core.import_torchvision import define_missing_operators

            define_missing_operators()

sys.meta_path.insert(0, BeforeTorchvision)
"""


def test_the_page_runs_and_prints_the_output_that_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(BEFORE_TORCHVISION)
    paths = [str(site), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    messages = failures(PAGE, run_page(PAGE, tmp_path, is_warm=False))
    assert not messages, "\n".join(messages)
