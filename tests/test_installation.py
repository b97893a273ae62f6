"""What an installed hvdtrain gives to programs beside it: the command, the report's packages; and
what it leaves as it is."""

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
from packaging.requirements import Requirement
from ranks import ROOT

MODULE_WITH_TORCHVISION = """
import torch
from torchvision.transforms import v2


class Pictures(torch.utils.data.Dataset):
    classes = 2

    def __init__(self, split):
        self.transform = v2.RandomHorizontalFlip()

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.transform(torch.full((1, 4, 4), index / 8)), index % 2


def net():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
"""


def program(code: str, folder: Path) -> str:
    """What a program prints that runs in this environment and in another folder, with nothing of
    this project on its path."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_the_folder_around_a_clone_does_not_shadow_the_package(tmp_path: Path) -> None:
    # as the clone is, seen from its parent folder
    (tmp_path / "hvdtrain" / "hvdtrain").mkdir(parents=True)
    assert program("import hvdtrain; print(len(hvdtrain.__version__) > 0)", tmp_path) == "True"


def test_an_import_of_torch_does_not_import_hvdtrain(tmp_path: Path) -> None:
    """An entry point of the group torch.backends makes `import torch` fail for every program once
    the clone is moved or renamed."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert list(setup["options.entry_points"]) == ["console_scripts"]


@pytest.mark.in_turn
def test_user_modules_import_torchvision(tmp_path: Path) -> None:
    """Also its CUDA build beside a CPU build of torch: in the command line's process and in
    workers, without torch.backends."""
    (tmp_path / "mine.py").write_text(MODULE_WITH_TORCHVISION)
    words = [
        "data.name=mine:Pictures",
        "model.name=mine:net",
        "data.workers=1",
        "batch.size=4",
        "max_steps=1",
        "speed.precision=fp32",
    ]
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "hvdtrain", *words]
    ran = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_the_command_finds_modules_of_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "mynet.py").write_text("print('imported')")
    (script,) = entry_points(group="console_scripts", name="hvdtrain")
    start = "import sys; sys.path[0] = '/bin'; sys.argv = ['hvdtrain', '--version']\n"
    start += f"from {script.module} import {script.attr}; {script.attr}()"
    assert program(f"{start}; import mynet", tmp_path).splitlines()[-1] == "imported"
    isolated = f"import sys; sys.flags.safe_path or exit('no -P'); {start}"
    ran = subprocess.run(
        [sys.executable, "-P", "-c", f"{isolated}; import mynet"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    # python -P keeps the current folder off the path
    assert "No module named 'mynet'" in ran.stderr, ran


def test_the_report_needs_no_extra() -> None:
    plain = {
        re.split(r"[^\w-]", line)[0]
        for line in requires("hvdtrain") or ()
        if "extra ==" not in line
    }
    assert {"matplotlib", "jinja2"} <= plain


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_constraints_has_version_and_hashes_of_everything_that_setup_cfg_names(
    install: ModuleType,
) -> None:
    text = (ROOT / "constraints.txt").read_text()
    packages = install.read_lock(text)
    assert install.lock_text(packages) == text
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+( ; .+)?", locked.requirement) for locked in packages)
    assert all(
        locked.hashes
        and all(re.fullmatch("sha256:[0-9a-f]{64}", digest) for digest in locked.hashes)
        for locked in packages
    )
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    named = install.requirements(list(setup["options.extras_require"]))
    missing = {install.canonical(re.split(r"[^\w.-]", line)[0]) for line in named} - {
        locked.name for locked in packages
    }
    assert not missing, f"make lock: {missing}"


def test_this_environment_has_the_versions_of_constraints(install: ModuleType) -> None:
    locked = {
        package.name: package.version
        for package in install.read_lock((ROOT / "constraints.txt").read_text())
    }
    names = {install.canonical(re.split(r"[^\w.-]", line)[0]) for line in install.requirements([])}
    if any(Path(sys.prefix).glob(".ready-*-torch-*")):  # make TORCH=...
        names -= {"torch"}
    assert {name: version(name).partition("+")[0] for name in names} == {
        name: locked[name] for name in names
    }


def wheel(folder: Path, name: str, requires: str = "", version: str = "1.0") -> str:
    """Makes a wheel of an empty module; returns its sha256 as constraints.txt writes it."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(f"{name}.py"), "")
        archive.writestr(
            zipfile.ZipInfo(f"{info}/METADATA"),
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        )
        archive.writestr(
            zipfile.ZipInfo(f"{info}/WHEEL"),
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD"), "")
    return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.slow
def test_only_files_of_constraints_are_installed(tmp_path: Path, install: ModuleType) -> None:  # noqa: PLR0915
    clone = tmp_path / "clone"
    index = tmp_path / "index"
    clone.mkdir()
    index.mkdir()
    shutil.copy(ROOT / "install.py", clone)
    (clone / "setup.cfg").write_text(
        "[options]\ninstall_requires =\n    first\n[options.extras_require]\nmore =\n    third\n"
    )
    first = wheel(index, "first", "Requires-Dist: second\n")
    second = wheel(index, "second")
    _ = wheel(index, "third")
    here = [
        install.Locked(f"{name}=={version(name)}", ("sha256:" + "0" * 64,))
        for name in ("pip", "setuptools", "wheel")
    ]
    lock = [
        *here,
        install.Locked("first==1.0", (first,)),
        install.Locked("second==1.0", ("sha256:" + "1" * 64, second)),
    ]
    (clone / "constraints.txt").write_text(install.lock_text(lock))
    venv.create(tmp_path / "python", symlinks=True)
    python = tmp_path / "python" / "bin" / "python"
    (packages,) = (tmp_path / "python").glob("lib/*/site-packages")
    (packages / "these.pth").write_text(sysconfig.get_paths()["purelib"])  # with pip
    env = {
        **os.environ,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_CACHE_DIR": "1",
    }

    def installed(*arguments: str) -> subprocess.CompletedProcess[str]:
        words = [python, "install.py", "--packages-only", *arguments]
        return subprocess.run(
            words, cwd=clone, env=env, capture_output=True, text=True, check=False
        )

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
    assert (
        "third 1.0 is not in constraints.txt\n" in unknown.stderr
        and "ACCEPT=third" in unknown.stderr
    )
    assert not (packages / "third.py").exists()
    accepted = installed("--extras", "more", "--accept", "thi*")
    assert (
        accepted.returncode == 0
        and "not compared with constraints.txt: third==1.0\n" in accepted.stdout
    ), accepted
    assert (packages / "third.py").exists()

    with (clone / "setup.cfg").open("a") as setup:
        setup.write("[metadata]\nname = clone\nversion = 1\n")
    (clone / "pyproject.toml").write_text(
        "[build-system]\nrequires = []\nbuild-backend = 'setuptools.build_meta'\n"
    )
    tools = [
        install.Locked(f"{n}=={version(n)}", (wheel(index, n, version=version(n)),))
        for n in ("pip", "setuptools", "wheel")
    ]
    (clone / "constraints.txt").write_text(install.lock_text([*tools, *lock[3:]]))
    filled = installed(
        "--extras",
        "more",
        "--accept",
        "thi*",
        "--wheelhouse",
        str(tmp_path / "house"),
        "--without",
        "wheel",
    )
    assert filled.returncode == 0 and "6 wheels, 0 MB in " in filled.stdout, filled
    names = [
        line.partition("  ")[2].partition("-")[0]
        for line in (tmp_path / "house" / "SHA256SUMS").read_text().splitlines()
    ]
    assert names == ["clone", "first", "pip", "second", "setuptools", "third"]
    for module in ("first", "third"):
        (packages / f"{module}.py").unlink()
        shutil.rmtree(packages / f"{module}-1.0.dist-info")
    env |= {"PIP_FIND_LINKS": os.devnull}
    done = installed("--from", str(tmp_path / "house"), "--extras", "more", "--accept", "thi*")
    assert (
        done.returncode == 0
        and (packages / "first.py").exists()
        and (packages / "third.py").exists()
    ), done
    for name, said in (("horovod", "not in SHA256SUMS: "), ("first", "missing or damaged: ")):
        (tmp_path / "house" / f"{name}-1.0-py3-none-any.whl").write_bytes(b"planted")
        refused = installed("--from", str(tmp_path / "house"))
        assert (
            refused.returncode == 1 and f"{said}{name}-1.0-py3-none-any.whl\n" in refused.stderr
        ), refused
    (tmp_path / "house" / "SHA256SUMS").unlink()
    assert "there is no SHA256SUMS\n" in installed("--from", str(tmp_path / "house")).stderr


def test_another_torch_comes_with_what_its_builds_need(
    install: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchvision is left out where no release of it fits that torch."""
    fits = {"torch==2.14.1": 0, "torch==2.99.0": 1}
    monkeypatch.setattr(
        install.subprocess,
        "run",
        lambda words, **_: subprocess.CompletedProcess(words, fits[words[-2]]),
    )
    wanted = ["torch>=2.9", "numpy>=1.26", "torchvision>=0.24"]
    assert install.with_torch(None, wanted, ["x"]) == (wanted, ["x"])
    assert install.with_torch("2.14.1", wanted, ["x"]) == (
        [*wanted, "torch==2.14.1"],
        ["x", *install.TORCH, "setuptools"],
    )
    assert install.with_torch("2.99.0", wanted, []) == (
        ["torch>=2.9", "numpy>=1.26", "torch==2.99.0"],
        [*install.TORCH, "setuptools"],
    )
    assert (
        capsys.readouterr().out == "torchvision is left out: no release of it fits torch==2.99.0\n"
    )
    assert all(
        install.matches(name, install.TORCH)
        for name in ("torch", "triton", "nvidia-cublas-cu12", "cuda-bindings")
    )
    assert not install.matches("torchmetrics", install.TORCH)


def test_no_torch_from_2_9_on_is_replaced(install: ModuleType) -> None:
    """What NVIDIA's images have calls itself 2.9.0a0, which `>=2.9` would refuse; pip asks so of
    what is installed."""
    (torch,) = (
        found for line in install.requirements([]) if (found := Requirement(line)).name == "torch"
    )
    releases = (
        "2.9.0a0+145a3a7bda.nv25.10",
        "2.9.1+rocm7.1",
        "2.10.0a0+b558c986e8.nv25.11",
        "2.13.0+cpu",
    )
    assert all(torch.specifier.contains(release, prereleases=True) for release in releases)
    assert not any(
        torch.specifier.contains(release, prereleases=True)
        for release in ("2.8.0", "2.8.0a0+34c6371d24.nv25.8")
    )


@pytest.mark.in_turn
def test_make_shows_a_sites_packages_to_its_environment(tmp_path: Path) -> None:
    """Of a Python in a virtual environment, too, where --system-site-packages means those of the
    Python under it."""
    venv.create(tmp_path / "site", symlinks=True)
    (packages,) = (tmp_path / "site").glob("lib/*/site-packages")
    (packages / "of_site.py").touch()
    words = [
        "make",
        "-s",
        f"VENV={tmp_path / 'ours'}",
        "TORCH=site",
        f"PYTHON={tmp_path / 'site/bin/python'}",
        str(tmp_path / "ours/.python"),
    ]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    code = "import of_site; print(of_site.__file__)"
    said = subprocess.run(
        [str(tmp_path / "ours/bin/python"), "-c", code],
        env={},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == str(packages / "of_site.py")


def test_a_sites_packages_are_those_outside_of_the_environment(
    install: ModuleType, tmp_path: Path
) -> None:
    venv.create(tmp_path / "python", symlinks=True)
    (packages,) = (tmp_path / "python").glob("lib/*/site-packages")
    for folder, name in (
        (packages, "Ours_x"),
        (tmp_path / "site", "torch"),
        (tmp_path / "site", "numpy"),
    ):
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    code = (
        "import install; print(install.of_site()); print(install.with_torch('site', "
        "['torch>=2.9', 'torchvision', 'numpy'], ['x']))"
    )

    def said(**env: str) -> subprocess.CompletedProcess[str]:
        python = [str(tmp_path / "python/bin/python"), "-c", code]
        return subprocess.run(
            python,
            cwd=ROOT,
            env={**env, "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            check=False,
        )

    found, taken = said(PYTHONPATH=str(tmp_path / "site")).stdout.splitlines()
    assert "'numpy', 'torch'" in found and "ours-x" not in found
    assert taken.startswith("(['torch>=2.9', 'numpy'], ['x', ") and "'torch'" in taken
    without = said()
    assert without.returncode == 1 and "this Python has no torch of a site's\n" in without.stderr, (
        without
    )


@pytest.mark.in_turn
def test_a_sites_torch_keeps_the_setuptools_that_it_wants(
    tmp_path: Path, install: ModuleType
) -> None:
    """torch 2.11 wants setuptools<82, and constraints.txt has a newer one."""
    house = tmp_path / "house"
    site = tmp_path / "site"
    clone = tmp_path / "clone"
    for folder in (house, site, clone):
        folder.mkdir()
    for name, wants, of in (
        ("torch", "Requires-Dist: setuptools<82\n", "2.11.0"),
        ("setuptools", "", "81.0"),
        ("wheel", "", "0.45"),
    ):
        wheel(site, name, wants, of)
        zipfile.ZipFile(site / f"{name}-{of}-py3-none-any.whl").extractall(site)
    for path in Path(sysconfig.get_paths()["purelib"]).glob("pip*"):
        (site / path.name).symlink_to(path)
    shutil.copy(ROOT / "install.py", clone)
    (clone / "setup.cfg").write_text(
        "[options]\ninstall_requires =\n    torch>=2.9\n    first\n[options.extras_require]\n"
    )
    lock = [
        install.Locked(f"{name}=={of}", (wheel(house, name, "", of),))
        for name, of in (("first", "1.0"), ("setuptools", "84.0"))
    ]
    (clone / "constraints.txt").write_text(install.lock_text(lock))
    venv.create(tmp_path / "python", symlinks=True)
    (packages,) = (tmp_path / "python").glob("lib/*/site-packages")
    (packages / "site.pth").write_text(str(site))
    env = {
        "PATH": os.environ["PATH"],
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(house),
        "PIP_CONFIG_FILE": os.devnull,
    }
    words = [tmp_path / "python/bin/python", "install.py", "--packages-only", "--torch", "site"]
    done = subprocess.run(words, cwd=clone, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    assert (packages / "first.py").exists() and not (packages / "setuptools.py").exists()


@pytest.mark.slow
def test_a_cpu_build_is_taken_where_there_is_no_gpu(
    tmp_path: Path, install: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for build in ("1.0", "1.0+cpu", "1.0+cu130"):
        wheel(tmp_path, "torch", version=build)
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(name, value)
    assert install.cpu_builds([("torch", "1.0+cu130"), ("numpy", "1.0")]) == ["torch==1.0+cpu"]
    assert install.cpu_builds([("torch", "1.0+cpu"), ("torchvision", "1.0")]) == []
