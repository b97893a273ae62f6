"""The wheel: what an index shows of it, and that it has every file that a command needs."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves files in the folder that it builds in."""
    pytest.importorskip("setuptools")
    source = tmp_path_factory.mktemp("source")
    out = tmp_path_factory.mktemp("wheel")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "hvdtrain", source / "hvdtrain", ignore=shutil.ignore_patterns("__pycache__")
    )
    subprocess.run(
        [sys.executable, "-c", BUILD, str(out)], cwd=source, check=True, capture_output=True
    )
    (path,) = out.glob("*.whl")
    return path


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_an_index_shows_description_classifiers_and_links(wheel: Path) -> None:
    metadata = metadata_of(wheel)
    assert metadata["Description-Content-Type"] == "text/markdown"
    description = metadata.get_payload(decode=True)
    assert (
        isinstance(description, bytes)
        and description.decode().strip() == (ROOT / "README.md").read_text().strip()
    )
    classifiers = metadata.get_all("Classifier") or []
    assert {"Operating System :: POSIX :: Linux", "Programming Language :: Python :: 3.11"} <= set(
        classifiers
    )
    assert metadata.get_all("Project-URL") and set(metadata["Requires-Python"].split(",")) == {
        ">=3.11",
        "<3.15",
    }


def test_a_wheel_has_every_file_of_the_package_and_runs(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    files = {
        path.relative_to(ROOT)
        for path in (ROOT / "hvdtrain").rglob("*")
        if path.suffix in (".py", ".html", ".npz")
    }
    assert files == {
        path.relative_to(tmp_path / "site")
        for path in (tmp_path / "site/hvdtrain").rglob("*")
        if path.is_file()
    }
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import hvdtrain, runpy; "
        "print(hvdtrain.__file__)\n"
    )
    code += "sys.argv = ['hvdtrain', 'list']; runpy.run_module('hvdtrain', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.startswith(
        str(tmp_path / "site/hvdtrain/__init__.py")
    ), done
    assert "wide_resnet" in done.stdout
