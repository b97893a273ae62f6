"""Building Horovod: what a build needs, its name in the cache, and its verification by two ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

import filelock
import pytest
from ranks import ROOT

from hvdtrain.cli.horovod import build, verify
from hvdtrain.cli.horovod.build import BuildTarget
from hvdtrain.errors import USER, UserError

TARGET = BuildTarget("2.13.0+cpu", "openmpi-5.0.11", Path("/site/openmpi/bin/mpirun"))
VARIABLES = {"HOROVOD_WITH_MPI": "1"}


@pytest.mark.parametrize(
    ("version", "target", "variables"),
    [
        ("0.28.2", TARGET, VARIABLES),
        ("0.28.1", TARGET._replace(torch="2.13.0+cu130"), VARIABLES),
        ("0.28.1", TARGET._replace(mpi="openmpi-4.1.6"), VARIABLES),
        ("0.28.1", TARGET._replace(mpirun=Path("/other/openmpi/bin/mpirun")), VARIABLES),
        ("0.28.1", TARGET._replace(mpirun=Path(sys.prefix) / "bin/mpirun"), VARIABLES),
        ("0.28.1", TARGET, {**VARIABLES, "HOROVOD_GPU_OPERATIONS": "NCCL"}),
    ],
    ids=["horovod", "torch", "mpi", "path of the mpi", "mpi inside", "nccl"],
)
def test_a_build_is_named_by_everything_that_it_must_fit(version: str, target: BuildTarget, variables: dict[str, str]) -> None:
    key = build.wheel_key("0.28.1", TARGET, VARIABLES)
    assert key == build.wheel_key("0.28.1", TARGET, dict(VARIABLES))
    assert key.startswith(f"horovod-0.28.1-cpython-{sys.version_info[0]}{sys.version_info[1]}-torch-2.13.0+cpu-openmpi-5.0.11-")
    assert key != build.wheel_key(version, target, variables)


def test_a_wheel_in_the_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "hvdtrain" / "horovod" / build.wheel_key("0.28.1", TARGET, VARIABLES)
    folder.mkdir(parents=True)
    (folder / "horovod-0.28.1-any.whl").touch()
    assert build.cached_wheel("0.28.1", TARGET, VARIABLES, rebuild=False) == folder / "horovod-0.28.1-any.whl"
    assert "from the cache: " in capsys.readouterr().out


def test_a_second_builder_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "hvdtrain" / "horovod" / build.wheel_key("0.28.1", TARGET, VARIABLES)
    folder.mkdir(parents=True)
    ask = "from pathlib import Path; from hvdtrain.cli.horovod.build import BuildTarget, cached_wheel\n"
    ask += f"print(cached_wheel('0.28.1', BuildTarget(*{TARGET[:2]}, Path({str(TARGET.mpirun)!r})), {VARIABLES}, rebuild=False))"
    with filelock.FileLock(f"{folder}.lock"):
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        second = subprocess.Popen([sys.executable, "-c", ask], env=env, stdout=subprocess.PIPE, text=True)
        assert second.stdout is not None
        assert second.stdout.readline() == f"waiting for another process that builds it: {folder}.lock\n"
        (folder / "horovod-0.28.1-any.whl").touch()
    output, _ = second.communicate(timeout=60)
    assert output.splitlines()[-1] == str(folder / "horovod-0.28.1-any.whl")


def test_the_users_variables_win() -> None:
    ours = build.build_variables({}, nccl=True)
    assert ours["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert ours["HOROVOD_WITHOUT_TENSORFLOW"] == ours["HOROVOD_WITH_PYTORCH"] == "1"
    env = {"HOROVOD_GPU_OPERATIONS": "MPI", "HOROVOD_WITH_TENSORFLOW": "1", "HOROVOD_WITHOUT_GLOO": "1", "HOROVOD_CYCLE_TIME": "0.1"}
    users = build.build_variables(env, nccl=True)
    assert users["HOROVOD_GPU_OPERATIONS"] == "MPI"
    assert users["HOROVOD_WITH_TENSORFLOW"] == users["HOROVOD_WITHOUT_GLOO"] == "1"
    assert not {"HOROVOD_WITHOUT_TENSORFLOW", "HOROVOD_WITH_GLOO", "HOROVOD_CYCLE_TIME"} & users.keys()


def test_a_surrounding_make_does_not_reach_the_build() -> None:
    env = {"PATH": "/usr/bin", "MAKEFLAGS": "n --jobserver-auth=3,4", "MAKELEVEL": "1", "CMAKE_BUILD_PARALLEL_LEVEL": "3"}
    built = build.build_environment(env, VARIABLES)
    assert built["MAKEFLAGS"] == "-j3"
    assert "MAKELEVEL" not in built
    assert built["PATH"].endswith(f"{Path(sys.executable).parent}:/usr/bin")
    assert built["HOROVOD_WITH_MPI"] == "1"


@pytest.mark.parametrize(
    ("output", "name"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n", "openmpi-5.0.11"),
        ("mpirun (Open MPI) 4.1.7rc1\n", "openmpi-4.1.7rc1"),
        ("mpirun.openmpi (OpenRTE) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n", "openmpi-4.1.4"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20231005 (id: 74c4a23)\n", "intelmpi-2021.11"),
        ("HYDRA build details:\n    Version:                                 4.2.0\n    Release Date: Fri\n", "mpich-4.2.0"),
        ("", "mpi-e3b0c442"),
    ],
)
def test_the_mpi_is_identified_by_its_version_text(output: str, name: str) -> None:
    assert build.mpi_name(output) == name


@pytest.mark.parametrize(
    ("programs", "packages", "first_line", "fix"),
    [
        ([], [], "no mpirun found", "fix: load the site's MPI module, or: pip install openmpi"),
        (["mpirun"], [], "torch is not installed in this Python", "fix: pip install 'hvdtrain[horovod]'"),
        (["mpirun"], ["torch"], "no C++ compiler found, and Horovod must be compiled", "fix: install g++ 9 or later, or set CXX"),
        (["mpirun", "g++"], ["torch"], "no mpicxx found", "fix: install the MPI's development files"),
        (["mpirun", "g++", "mpicxx"], ["torch"], "setuptools is not installed in this Python", "fix: pip install 'hvdtrain[horovod]'"),
        (
            ["mpirun", "g++", "mpicxx"],
            ["torch", *build.BUILD_PACKAGES],
            "cmake is not installed in this Python",
            "pip install 'hvdtrain[horovod]'",
        ),
    ],
)
def test_a_missing_requirement_is_named(programs: list[str], packages: list[str], first_line: str, fix: str, tmp_path: Path) -> None:
    python = bare_python(tmp_path, programs, packages)
    env = {"PATH": str(tmp_path / "path"), "PYTHONPATH": f"{ROOT}:{tmp_path / 'packages'}", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([python, "-m", "hvdtrain.cli.horovod"], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == USER, done
    assert done.stderr.splitlines()[0] == first_line
    assert fix in done.stderr
    assert "Traceback" not in done.stderr


def test_a_command_that_verifies_both_ranks_passes() -> None:
    verify.verify_command([sys.executable, "-c", "print('verified on rank 1'); print('verified on rank 0')"], os.environ, 60)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("print('no MPI here'); raise SystemExit(3)", "exit status 3\nno MPI here"),
        ("print('verified on rank 0')", "exit status 0\nverified on rank 0"),
        ("print('verified on rank 0'); print('verified on rank 1'); raise SystemExit(1)", "exit status 1"),
    ],
)
def test_a_failed_verification_is_a_user_error(program: str, message: str) -> None:
    with pytest.raises(UserError) as failed:
        verify.verify_command([sys.executable, "-c", program], os.environ, 60)
    assert message in str(failed.value)
    assert "mpirun -np 2 hostname" in failed.value.fix


def test_a_verification_that_hangs_ends_with_its_children(tmp_path: Path) -> None:
    child_file = tmp_path / "pid"
    program = f"""
import pathlib, subprocess, time
print("waiting", flush=True)
pathlib.Path({str(child_file)!r}).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
time.sleep(600)"""
    began = time.monotonic()
    with pytest.raises(UserError, match="not finished after 1 s\nwaiting"):
        verify.verify_command([sys.executable, "-c", program], os.environ, 1)
    child = int(child_file.read_text())
    while not gone(child) and time.monotonic() < began + 20:
        time.sleep(0.1)
    assert gone(child)


def test_a_start_that_hangs_is_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mpirun, mark = tmp_path / "mpirun", tmp_path / "mark"
    mpirun.write_text(
        f"#!/bin/sh\n[ -e {mark} ] || {{ touch {mark}; exec sleep 600; }}\necho verified on rank 0; echo verified on rank 1\n"
    )
    mpirun.chmod(0o755)
    assert verify.verify(mpirun, mpi_inside=False, limit_s=1).startswith("verified in ")
    assert "not finished after 1 s" in (stderr := capsys.readouterr().err) and stderr.endswith("trying again\n")
    mpirun.write_text("#!/bin/sh\nexec sleep 600\n")
    with pytest.raises(UserError, match="not finished after 1 s"):
        verify.verify(mpirun, mpi_inside=False, limit_s=1)


def test_the_users_environment_wins_in_the_verification() -> None:
    env = verify.environment_anywhere({"OMPI_MCA_btl": "ofi", "OMP_NUM_THREADS": "8"}, mpi_inside=True)
    assert (env["OMPI_MCA_btl"], env["OMP_NUM_THREADS"], env["OMPI_ALLOW_RUN_AS_ROOT"]) == ("ofi", "8", "1")
    assert "OMPI_MCA_btl" not in verify.environment_anywhere({}, mpi_inside=False)


def test_the_installed_horovod_was_built_for_this_torch_and_passes_verification() -> None:
    if build.installed_version("horovod") is None:
        compilers = [name for name in ("c++", "g++", "clang++") if shutil.which(name)]
        assert not compilers, f"{compilers} found, but Horovod is not installed: python -m hvdtrain.cli.horovod"
        pytest.skip("Horovod is not installed: no C++ compiler")
    target = build.detect_target()
    assert build.installed_version("horovod") == build.VERSION
    assert build.built_for_torch() == target.torch
    assert "summed as expected" in verify.verify(target.mpirun, target.mpi_inside)


def bare_python(folder: Path, programs: list[str], packages: list[str]) -> str:
    """A new Python environment with nothing but these programs on its path and the metadata of these packages beside filelock."""
    venv.create(folder / "python", symlinks=True)
    for part in ("path", "packages"):
        (folder / part).mkdir()
    for program in programs:
        (folder / "path" / program).symlink_to(shutil.which("true") or "/bin/true")
    (folder / "packages" / "filelock").symlink_to(Path(filelock.__file__).parent)
    for package in packages:
        metadata = folder / "packages" / f"{package}-1.0.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    return str(folder / "python" / "bin" / "python")


def gone(pid: int) -> bool:
    """Whether no such process is left, or only its entry in the table."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
