"""Building Horovod: what must be there, how a build is named in the cache, and its proof by two ranks."""

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

from hvdtrain.cli.horovod import build, proof
from hvdtrain.cli.horovod.build import Here
from hvdtrain.errors import USER, UserError

HERE = Here("2.13.0+cpu", "openmpi-5.0.11", Path("/site/openmpi/bin/mpirun"))
VARIABLES = {"HOROVOD_WITH_MPI": "1"}


@pytest.mark.parametrize(
    ("version", "here", "variables"),
    [
        ("0.28.2", HERE, VARIABLES),
        ("0.28.1", HERE._replace(torch="2.13.0+cu130"), VARIABLES),
        ("0.28.1", HERE._replace(mpi="openmpi-4.1.6"), VARIABLES),
        ("0.28.1", HERE._replace(mpirun=Path("/other/openmpi/bin/mpirun")), VARIABLES),
        ("0.28.1", HERE._replace(mpirun=Path(sys.prefix) / "bin/mpirun"), VARIABLES),
        ("0.28.1", HERE, {**VARIABLES, "HOROVOD_GPU_OPERATIONS": "NCCL"}),
    ],
    ids=["horovod", "torch", "mpi", "place of the mpi", "mpi inside", "nccl"],
)
def test_a_build_is_named_by_all_that_it_must_fit(version: str, here: Here, variables: dict[str, str]) -> None:
    key = build.wheel_key("0.28.1", HERE, VARIABLES)
    assert key == build.wheel_key("0.28.1", HERE, dict(VARIABLES))
    assert key.startswith(f"horovod-0.28.1-cpython-{sys.version_info[0]}{sys.version_info[1]}-torch-2.13.0+cpu-openmpi-5.0.11-")
    assert key != build.wheel_key(version, here, variables)


def test_a_wheel_in_the_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "hvdtrain" / "horovod" / build.wheel_key("0.28.1", HERE, VARIABLES)
    folder.mkdir(parents=True)
    (folder / "horovod-0.28.1-any.whl").touch()
    assert build.wheel("0.28.1", HERE, VARIABLES, rebuild=False) == folder / "horovod-0.28.1-any.whl"
    assert "built before" in capsys.readouterr().out


def test_a_second_builder_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "hvdtrain" / "horovod" / build.wheel_key("0.28.1", HERE, VARIABLES)
    folder.mkdir(parents=True)
    ask = "from pathlib import Path; from hvdtrain.cli.horovod.build import Here, wheel\n"
    ask += f"print(wheel('0.28.1', Here(*{HERE[:2]}, Path({str(HERE.mpirun)!r})), {VARIABLES}, rebuild=False))"
    with filelock.FileLock(f"{folder}.lock"):
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        second = subprocess.Popen([sys.executable, "-c", ask], env=env, stdout=subprocess.PIPE, text=True)
        assert second.stdout is not None
        assert second.stdout.readline() == f"another process builds it, waiting: {folder}.lock\n"
        (folder / "horovod-0.28.1-any.whl").touch()
    said, _ = second.communicate(timeout=60)
    assert said.splitlines()[-1] == str(folder / "horovod-0.28.1-any.whl")


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
def test_the_mpi_is_known_by_its_own_words(output: str, name: str) -> None:
    assert build.mpi_name(output) == name


@pytest.mark.parametrize(
    ("programs", "packages", "first_line", "fix"),
    [
        ([], [], "no mpirun here", "fix: load the site's MPI module, or: pip install openmpi"),
        (["mpirun"], [], "torch is not installed in this Python", "fix: pip install 'hvdtrain[horovod]'"),
        (["mpirun"], ["torch"], "no C++ compiler here, Horovod has to be compiled", "fix: install g++ 9 or later, or set CXX"),
        (["mpirun", "g++"], ["torch"], "no mpicxx here", "fix: install the MPI's development files"),
        (["mpirun", "g++", "mpicxx"], ["torch"], "setuptools is not installed in this Python", "fix: pip install 'hvdtrain[horovod]'"),
        (
            ["mpirun", "g++", "mpicxx"],
            ["torch", *build.NEEDED],
            "cmake is not installed in this Python",
            "pip install 'hvdtrain[horovod]'",
        ),
    ],
)
def test_what_is_missing_is_named(programs: list[str], packages: list[str], first_line: str, fix: str, tmp_path: Path) -> None:
    python = bare_python(tmp_path, programs, packages)
    env = {"PATH": str(tmp_path / "path"), "PYTHONPATH": f"{ROOT}:{tmp_path / 'packages'}", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([python, "-m", "hvdtrain.cli.horovod"], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == USER, done
    assert done.stderr.splitlines()[0] == first_line
    assert fix in done.stderr
    assert "Traceback" not in done.stderr


def test_two_ranks_that_say_they_are_proved_are() -> None:
    proof.run_proof([sys.executable, "-c", "print('proved on rank 1'); print('proved on rank 0')"], os.environ, 60)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("print('no MPI here'); raise SystemExit(3)", "exit status 3\nno MPI here"),
        ("print('proved on rank 0')", "exit status 0\nproved on rank 0"),
        ("print('proved on rank 0'); print('proved on rank 1'); raise SystemExit(1)", "exit status 1"),
    ],
)
def test_a_proof_that_fails_is_a_user_error(program: str, said: str) -> None:
    with pytest.raises(UserError) as failed:
        proof.run_proof([sys.executable, "-c", program], os.environ, 60)
    assert said in str(failed.value)
    assert "mpirun -np 2 hostname" in failed.value.fix


def test_a_proof_that_hangs_ends_with_its_children(tmp_path: Path) -> None:
    child_file = tmp_path / "pid"
    program = f"""
import pathlib, subprocess, time
print("waiting", flush=True)
pathlib.Path({str(child_file)!r}).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
time.sleep(600)"""
    began = time.monotonic()
    with pytest.raises(UserError, match="no end after 1 s\nwaiting"):
        proof.run_proof([sys.executable, "-c", program], os.environ, 1)
    child = int(child_file.read_text())
    while not gone(child) and time.monotonic() < began + 20:
        time.sleep(0.1)
    assert gone(child)


def test_a_start_that_hangs_is_made_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(proof, "LIMIT_S", 1)
    mpirun, mark = tmp_path / "mpirun", tmp_path / "mark"
    mpirun.write_text(f"#!/bin/sh\n[ -e {mark} ] || {{ touch {mark}; exec sleep 600; }}\necho proved on rank 0; echo proved on rank 1\n")
    mpirun.chmod(0o755)
    assert proof.prove(mpirun, mpi_inside=False).startswith("proved in ")
    assert "no end after 1 s" in (said := capsys.readouterr().err) and said.endswith("once more\n")
    mpirun.write_text("#!/bin/sh\nexec sleep 600\n")
    with pytest.raises(UserError, match="no end after 1 s"):
        proof.prove(mpirun, mpi_inside=False)


def test_a_users_environment_wins_in_the_proof() -> None:
    env = proof.small_machine({"OMPI_MCA_btl": "ofi", "OMP_NUM_THREADS": "8"}, mpi_inside=True)
    assert (env["OMPI_MCA_btl"], env["OMP_NUM_THREADS"], env["OMPI_ALLOW_RUN_AS_ROOT"]) == ("ofi", "8", "1")
    assert "OMPI_MCA_btl" not in proof.small_machine({}, mpi_inside=False)


def test_the_installed_horovod_was_built_for_this_torch_and_proves_itself() -> None:
    if build.installed_version("horovod") is None:
        compilers = [name for name in ("c++", "g++", "clang++") if shutil.which(name)]
        assert not compilers, f"{compilers} found, but Horovod is not installed: python -m hvdtrain.cli.horovod"
        pytest.skip("Horovod is not installed, for there is no C++ compiler")
    here = build.look()
    assert build.installed_version("horovod") == build.VERSION
    assert build.built_for_torch() == here.torch
    assert "summed as expected" in proof.prove(here.mpirun, here.mpi_inside)


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
