"""What an installed hvdtrain gives to programs beside it: the command, torchvision, the report's packages."""

from __future__ import annotations

import configparser
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import entry_points, requires, version
from pathlib import Path
from types import ModuleType

import pytest
from ranks import ROOT

from hvdtrain.core.import_torchvision import define_missing_operators


def program(code: str, folder: Path) -> str:
    """What a program prints that runs in this environment and in another folder, with nothing of this project on its path."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_the_folder_around_a_clone_does_not_shadow_the_package(tmp_path: Path) -> None:
    (tmp_path / "hvdtrain" / "hvdtrain").mkdir(parents=True)  # as the clone is, seen from its parent folder
    assert program("import hvdtrain; print(len(hvdtrain.__version__) > 0)", tmp_path) == "True"


def test_torchvision_imports_in_a_program_that_does_not_know_hvdtrain(tmp_path: Path) -> None:
    found = entry_points(group="torch.backends")["hvdtrain"].load()
    assert found is define_missing_operators
    code = "from torchvision import datasets, models, transforms; print(models.resnet18(num_classes=3).fc.out_features)"
    assert program(code, tmp_path) == "3"


def test_the_command_finds_modules_of_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "mynet.py").write_text("print('imported')")
    (script,) = entry_points(group="console_scripts", name="hvdtrain")
    start = "import sys; sys.path[0] = '/bin'; sys.argv = ['hvdtrain', '--version']\n"
    start += f"from {script.module} import {script.attr}; {script.attr}()"
    assert program(f"{start}; import mynet", tmp_path).splitlines()[-1] == "imported"
    isolated = f"import sys; sys.flags.safe_path or exit('no -P'); {start}"
    ran = subprocess.run(
        [sys.executable, "-P", "-c", f"{isolated}; import mynet"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "No module named 'mynet'" in ran.stderr, ran  # python -P keeps the current folder off the path


def test_the_report_needs_no_extra() -> None:
    plain = {re.split(r"[^\w-]", line)[0] for line in requires("hvdtrain") or () if "extra ==" not in line}
    assert {"matplotlib", "jinja2"} <= plain


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_constraints_has_version_and_hashes_of_everything_that_setup_cfg_names(install: ModuleType) -> None:
    text = (ROOT / "constraints.txt").read_text()
    packages = install.read_lock(text)
    assert install.lock_text(packages) == text
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+( ; .+)?", locked.requirement) for locked in packages)
    assert all(locked.hashes and all(re.fullmatch("sha256:[0-9a-f]{64}", digest) for digest in locked.hashes) for locked in packages)
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    named = install.requirements(list(setup["options.extras_require"]))
    missing = {install.canonical(re.split(r"[^\w.-]", line)[0]) for line in named} - {locked.name for locked in packages}
    assert not missing, f"make lock: {missing}"


def test_this_environment_has_the_versions_of_constraints(install: ModuleType) -> None:
    locked = {package.name: package.version for package in install.read_lock((ROOT / "constraints.txt").read_text())}
    names = {install.canonical(re.split(r"[^\w.-]", line)[0]) for line in install.requirements([])}
    assert {name: version(name).partition("+")[0] for name in names} == {name: locked[name] for name in names}


def wheel(folder: Path, name: str, requires: str = "") -> str:
    """Makes a wheel of an empty module; returns its sha256 as constraints.txt writes it."""
    path, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(f"{name}.py"), "")
        archive.writestr(zipfile.ZipInfo(f"{info}/METADATA"), f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{requires}")
        archive.writestr(zipfile.ZipInfo(f"{info}/WHEEL"), "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD"), "")
    return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.slow
def test_only_files_of_constraints_are_installed(tmp_path: Path, install: ModuleType) -> None:
    clone, index = tmp_path / "clone", tmp_path / "index"
    clone.mkdir()
    index.mkdir()
    shutil.copy(ROOT / "install.py", clone)
    (clone / "setup.cfg").write_text("[options]\ninstall_requires =\n    first\n[options.extras_require]\nmore =\n    third\n")
    first, second, _ = wheel(index, "first", "Requires-Dist: second\n"), wheel(index, "second"), wheel(index, "third")
    here = [install.Locked(f"{name}=={version(name)}", ("sha256:" + "0" * 64,)) for name in ("pip", "setuptools", "wheel")]
    lock = [*here, install.Locked("first==1.0", (first,)), install.Locked("second==1.0", ("sha256:" + "1" * 64, second))]
    (clone / "constraints.txt").write_text(install.lock_text(lock))
    venv.create(tmp_path / "python", symlinks=True)
    python = tmp_path / "python" / "bin" / "python"
    (packages,) = (tmp_path / "python").glob("lib/*/site-packages")
    (packages / "these.pth").write_text(sysconfig.get_paths()["purelib"])  # with pip
    env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}

    def installed(*arguments: str) -> subprocess.CompletedProcess[str]:
        words = [python, "install.py", "--packages-only", *arguments]
        return subprocess.run(words, cwd=clone, env=env, capture_output=True, text=True, check=False)

    released = (index / "second-1.0-py3-none-any.whl").read_bytes()
    (index / "second-1.0-py3-none-any.whl").write_bytes(released + b"planted")
    altered = installed()
    assert altered.returncode and "DO NOT MATCH THE HASHES" in altered.stderr, altered
    assert not (packages / "first.py").exists() and not (packages / "second.py").exists()
    (index / "second-1.0-py3-none-any.whl").write_bytes(released)
    assert installed().returncode == 0
    assert (packages / "first.py").exists() and (packages / "second.py").exists()
    unknown = installed("--extras", "more")
    assert unknown.returncode == 1, unknown
    assert "third 1.0 is not in constraints.txt\n" in unknown.stderr and "ACCEPT=third" in unknown.stderr
    assert not (packages / "third.py").exists()
    accepted = installed("--extras", "more", "--accept", "thi*")
    assert accepted.returncode == 0 and "not compared with constraints.txt: third==1.0\n" in accepted.stdout, accepted
    assert (packages / "third.py").exists()
