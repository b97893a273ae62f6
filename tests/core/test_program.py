"""The command that is printed is one that the user's shell finds: by name, by its path, or with
this interpreter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.core.process import command_line

SCRIPTS = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]


def bash(line: str, path: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": path, "HOME": os.environ.get("HOME", "/")}
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, check=False, env=environment
    )


@pytest.mark.skipif(not (SCRIPTS / "hvdtrain").exists(), reason="hvdtrain is not installed")
def test_the_name_where_the_path_has_this_environment_and_else_the_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    another = tmp_path / "another environment"  # whose hvdtrain would be another version
    another.mkdir()
    shutil.copy(SCRIPTS / "hvdtrain", another)
    for path, expected in (
        (f"{SCRIPTS}:/usr/bin:/bin", "hvdtrain --version"),
        ("/usr/bin:/bin", f"{SCRIPTS}/hvdtrain --version"),
        (f"{another}:/usr/bin:/bin", f"{SCRIPTS}/hvdtrain --version"),
    ):
        monkeypatch.setenv("PATH", path)
        monkeypatch.chdir(tmp_path)
        assert command_line("--version") == expected
        assert bash(expected, path).stdout.startswith("hvdtrain ")
    environment = tmp_path / ".venv"
    environment.symlink_to(SCRIPTS.parent)
    monkeypatch.setattr(sys, "executable", str(environment / "bin/python"))
    assert command_line("report", "a b") == ".venv/bin/hvdtrain report 'a b'", "as after make train"


def test_from_its_source_the_command_names_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "with space" / "python"
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path))
    assert command_line("report", "run") == f"'{python}' -m hvdtrain report run"
