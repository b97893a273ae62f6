"""The wheel and the source archive: what an index shows of them, that both have every file that a
command needs, and that pip installs the wheel in an empty environment."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest

from hvdtrain.core.extras import commands

ROOT = Path(__file__).parent.parent
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_{}(sys.argv[1]))"


def build(kind: str, source: Path, out: Path) -> Path:
    """Builds the wheel or the sdist of a folder."""
    pytest.importorskip("setuptools")
    done = subprocess.run(
        [sys.executable, "-c", BUILD.format(kind), str(out)],
        cwd=source,
        check=True,
        capture_output=True,
        text=True,
    )
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves files in the folder that it builds in."""
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "hvdtrain", source / "hvdtrain", ignore=shutil.ignore_patterns("__pycache__")
    )
    return build("sdist", source, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source archive, as `make dist` and pip do."""
    folder = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(sdist, folder, filter="data")
    (source,) = folder.iterdir()
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


@pytest.mark.in_turn
def test_an_index_shows_description_classifiers_and_links(wheel: Path) -> None:
    shown = metadata_of(wheel)
    assert shown["Description-Content-Type"] == "text/markdown"
    description = shown.get_payload(decode=True)
    assert (
        isinstance(description, bytes)
        and description.decode().strip() == (ROOT / "README.md").read_text().strip()
    )
    classifiers = shown.get_all("Classifier") or []
    assert {"Operating System :: POSIX :: Linux", "Programming Language :: Python :: 3.11"} <= set(
        classifiers
    )
    assert shown.get_all("Project-URL") and set(shown["Requires-Python"].split(",")) == {
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


def names_in_source_archive() -> list[str]:
    lines = (ROOT / "MANIFEST.in").read_text().splitlines()
    return [
        name for line in lines if line.startswith(("graft", "include")) for name in line.split()[1:]
    ]


def test_the_source_archive_takes_folders_and_files_that_exist() -> None:
    """setuptools only warns of a line that matches nothing."""
    names = names_in_source_archive()
    assert {"tests", "docs", "constraints.txt"} <= set(names)
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_image_that_runs_tests_copies_what_the_source_archive_has() -> None:
    """Tests read these files, some while they are collected."""
    stage = (ROOT / "Containerfile").read_text().partition(" AS test\n")[2].partition("\nFROM ")[0]
    copied = {
        word for line in stage.splitlines() if line.startswith("COPY ") for word in line.split()[1:]
    }
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    for name in [*names_in_source_archive(), "LICENSE", "README.md", "pyproject.toml", "setup.cfg"]:
        assert name in copied and f"!{name}" in ignored, name


@pytest.mark.slow
def test_pip_installs_the_wheel_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """With everything that it requires, in the versions that pip chooses; a job trains, and a
    report has figures."""
    run = partial(subprocess.run, cwd=tmp_path, check=True, text=True, capture_output=True)
    run([sys.executable, "-m", "venv", "env"])
    python = tmp_path / "env" / "bin" / "python"
    version = metadata.version("torch").partition("+")[0]
    run([python, "-m", "pip", "install", "-q", wheel, f"torch=={version}"])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = tmp_path / "env" / "bin" / "hvdtrain"
    trained = run([command, "run=digits", "epochs=1"], env=environment).stdout
    assert "done (epochs=1)" in trained
    if "report" in commands():
        run([command, "report", "digits"], env=environment)
        assert list(tmp_path.glob("**/report.html"))
    run([python, "-m", "pip", "check"])
