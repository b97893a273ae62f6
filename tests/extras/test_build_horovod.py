"""Building Horovod: what a build needs, its name in the cache, and its verification by two
ranks."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import filelock
import pytest
from ranks import HANG_S, ROOT
from waiting import wait_until

from hvdtrain.errors import DONE, USER, UserError
from hvdtrain.extras.build_horovod import build, wheel
from hvdtrain.extras.build_horovod.build import BuildTarget

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
def test_a_build_is_named_by_everything_that_it_must_fit(
    version: str, target: BuildTarget, variables: dict[str, str]
) -> None:
    key = build.wheel_key("0.28.1", TARGET, VARIABLES)
    assert key == build.wheel_key("0.28.1", TARGET, dict(VARIABLES))
    assert key.startswith(
        f"horovod-0.28.1-cpython-{sys.version_info[0]}{sys.version_info[1]}-torch-2.13.0+cpu-openmpi-5.0.11-"
    )
    assert key != build.wheel_key(version, target, variables)


def wheel_in(cache_home: Path) -> Path:
    """A wheel as a build leaves it in the cache."""
    folder = cache_home / "hvdtrain" / "horovod" / build.wheel_key("0.28.1", TARGET, VARIABLES)
    for private in (folder.parent, folder):
        build.private_folder(private, print)
    wheel = folder / "horovod-0.28.1-any.whl"
    wheel.write_bytes(b"compiled")
    build.record(wheel)
    return wheel


def test_a_wheel_in_the_cache_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wheel = wheel_in(tmp_path)
    assert build.cached_wheel("0.28.1", TARGET, VARIABLES, rebuild=False) == wheel
    assert capsys.readouterr().out == f"from the cache: {wheel}\n"
    assert build.cache_folder() == tmp_path / "hvdtrain" / "horovod"


def planted(wheel: Path) -> None:
    wheel.write_bytes(b"something else")


def unrecorded(wheel: Path) -> None:
    (wheel.parent / "SHA256SUMS").unlink()


def record_of_another(wheel: Path) -> None:
    record = wheel.parent / "SHA256SUMS"
    record.write_text(record.read_text().replace(wheel.name, "horovod-0.28.0-any.whl"))


def linked(wheel: Path) -> None:
    wheel.replace(wheel.parent / "elsewhere")
    wheel.symlink_to("elsewhere")


def writable_by_others(wheel: Path) -> None:
    wheel.chmod(0o602)


def writable_by_the_group(wheel: Path) -> None:
    wheel.chmod(0o620)


def in_a_folder_that_others_write(wheel: Path) -> None:
    wheel.parent.chmod(0o777)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (planted, "its sha256 is not that of SHA256SUMS"),
        (record_of_another, "its sha256 is not that of SHA256SUMS"),
        (unrecorded, "there is no SHA256SUMS beside it"),
        (linked, "it is not a regular file"),
        (writable_by_others, "others can write it"),
        (writable_by_the_group, "others can write it"),
        (in_a_folder_that_others_write, "others can write in"),
    ],
)
def test_a_cached_wheel_that_anybody_may_have_changed_is_not_used(
    change: Callable[[Path], None], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = wheel_in(tmp_path)
    assert build.usable_wheel(wheel.parent, print) == wheel
    change(wheel)
    build.private_folder(wheel.parent, print)
    assert build.usable_wheel(wheel.parent, print) is None
    assert reason in capsys.readouterr().out
    assert not list(wheel.parent.glob("*.whl"))
    assert stat.S_IMODE(wheel.parent.stat().st_mode) == 0o700


def test_a_cache_of_another_user_is_refused(tmp_path: Path) -> None:
    wheel = wheel_in(tmp_path)
    (tmp_path / "link").symlink_to(wheel.parent)
    with pytest.raises(UserError, match="is a link, not a folder"):
        build.private_folder(tmp_path / "link", print)
    if os.geteuid():
        pytest.skip("only root can give files to another user")
    os.chown(wheel, 12345, -1)
    assert build.usable_wheel(wheel.parent, print) is None
    os.chown(wheel.parent, 12345, -1)
    with pytest.raises(
        UserError, match="belongs to user 12345, who could put any program in it; this is user 0"
    ):
        build.private_folder(wheel.parent, print)


def test_a_second_builder_waits_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = build.cache_folder() / build.wheel_key("0.28.1", TARGET, VARIABLES)
    folder.mkdir(parents=True)
    ask = (
        "from pathlib import Path; from hvdtrain.extras.build_horovod.build import BuildTarget, "
        "cached_wheel\n"
    )
    ask += (
        f"print(cached_wheel('0.28.1', BuildTarget(*{TARGET[:2]}, Path({str(TARGET.mpirun)!r})), "
        f"{VARIABLES}, rebuild=False))"
    )
    with filelock.FileLock(f"{folder}.lock"):
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        second = subprocess.Popen(
            [sys.executable, "-c", ask], env=env, stdout=subprocess.PIPE, text=True
        )
        assert second.stdout is not None
        assert (
            second.stdout.readline()
            == f"waiting for another process that builds it: {folder}.lock\n"
        )
        wheel = wheel_in(tmp_path)
    output, _ = second.communicate(timeout=HANG_S)
    assert output.splitlines()[-1] == str(wheel)


def test_the_users_variables_win() -> None:
    ours = build.build_variables({}, nccl=True)
    assert ours["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert ours["HOROVOD_WITHOUT_TENSORFLOW"] == ours["HOROVOD_WITH_PYTORCH"] == "1"
    env = {
        "HOROVOD_GPU_OPERATIONS": "MPI",
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_GLOO": "1",
        "HOROVOD_CYCLE_TIME": "0.1",
    }
    users = build.build_variables(env, nccl=True)
    assert users["HOROVOD_GPU_OPERATIONS"] == "MPI"
    assert users["HOROVOD_WITH_TENSORFLOW"] == users["HOROVOD_WITHOUT_GLOO"] == "1"
    assert (
        not {"HOROVOD_WITHOUT_TENSORFLOW", "HOROVOD_WITH_GLOO", "HOROVOD_CYCLE_TIME"} & users.keys()
    )


def test_a_surrounding_make_does_not_reach_the_build() -> None:
    env = {
        "PATH": "/usr/bin",
        "MAKEFLAGS": "n --jobserver-auth=3,4",
        "MAKELEVEL": "1",
        "CMAKE_BUILD_PARALLEL_LEVEL": "3",
    }
    built = build.build_environment(env, VARIABLES)
    assert built["MAKEFLAGS"] == "-j3"
    assert "MAKELEVEL" not in built
    assert built["PATH"].endswith(f"{Path(sys.executable).parent}:/usr/bin")
    assert built["HOROVOD_WITH_MPI"] == "1"


@pytest.mark.parametrize(
    ("output", "name"),
    [
        (
            "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n",
            "openmpi-5.0.11",
        ),
        ("mpirun (Open MPI) 4.1.7rc1\n", "openmpi-4.1.7rc1"),
        (
            "mpirun.openmpi (OpenRTE) 4.1.4\n\nReport bugs to "
            "http://www.open-mpi.org/community/help/\n",
            "openmpi-4.1.4",
        ),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20231005 (id: 74c4a23)\n",
            "intelmpi-2021.11",
        ),
        (
            "HYDRA build details:\n    Version:                                 4.2.0\n    "
            "Release Date: Fri\n",
            "mpich-4.2.0",
        ),
        ("", "mpi-e3b0c442"),
    ],
)
def test_the_mpi_is_identified_by_its_version_text(output: str, name: str) -> None:
    assert build.mpi_name(output) == name


@pytest.mark.parametrize(
    ("programs", "packages", "first_line", "fix"),
    [
        ([], [], "no mpirun found", "fix: load the site's MPI module, or: pip install openmpi"),
        (
            ["mpirun"],
            [],
            "torch is not installed in this Python",
            "fix: pip install 'hvdtrain[horovod]'",
        ),
        (
            ["mpirun"],
            ["torch"],
            "no C++ compiler found, and Horovod must be compiled",
            "fix: install g++ 9 or later, or set CXX",
        ),
        (
            ["mpirun", "g++"],
            ["torch"],
            "no mpicxx found",
            "fix: install the MPI's development files",
        ),
        (
            ["mpirun", "g++", "mpicxx"],
            ["torch"],
            "setuptools is not installed in this Python",
            "fix: pip install 'hvdtrain[horovod]'",
        ),
        (
            ["mpirun", "g++", "mpicxx"],
            ["torch", *build.BUILD_PACKAGES],
            "cmake is not installed in this Python",
            "pip install 'hvdtrain[horovod]'",
        ),
    ],
)
def test_a_missing_requirement_is_named(
    programs: list[str], packages: list[str], first_line: str, fix: str, tmp_path: Path
) -> None:
    python = bare_python(tmp_path, programs, packages)
    env = {
        "PATH": str(tmp_path / "path"),
        "PYTHONPATH": f"{ROOT}:{tmp_path / 'packages'}",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    done = subprocess.run(
        [python, "-m", "hvdtrain.cli.horovod"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == USER, done
    assert done.stderr.splitlines()[0] == first_line
    assert fix in done.stderr
    assert "Traceback" not in done.stderr
    without = subprocess.run(
        [python, "-m", "hvdtrain.cli.horovod", "--or-without"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert without.returncode == DONE, without
    said, _, again = without.stdout.splitlines()
    assert (
        said == f"Horovod is left out, and training takes the mpi engine. {first_line}"
        and again.startswith("  to try again: make horovod; ")
    )
    assert (tmp_path / "python" / ".without-horovod").read_text() == done.stderr


def test_a_command_that_verifies_both_ranks_passes() -> None:
    wheel.verify_command(
        [sys.executable, "-c", "print('verified on rank 1'); print('verified on rank 0')"],
        os.environ,
        HANG_S,
    )


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("print('no MPI here'); raise SystemExit(3)", "exit status 3\nno MPI here"),
        ("print('verified on rank 0')", "exit status 0\nverified on rank 0"),
        (
            "print('verified on rank 0'); print('verified on rank 1'); raise SystemExit(1)",
            "exit status 1",
        ),
    ],
)
def test_a_failed_verification_is_a_user_error(program: str, message: str) -> None:
    with pytest.raises(UserError) as failed:
        wheel.verify_command([sys.executable, "-c", program], os.environ, HANG_S)
    assert message in str(failed.value)
    assert "mpirun -np 2 hostname" in failed.value.fix


def test_a_verification_that_hangs_ends_with_its_children(tmp_path: Path) -> None:
    child_file = tmp_path / "pid"
    program = f"echo waiting; sleep 2000 & echo $! > {child_file}; wait"
    with pytest.raises(UserError, match="not finished after 2 s\nwaiting"):
        wheel.verify_command(["sh", "-c", program], os.environ, 2)
    child = int(child_file.read_text())
    wait_until(lambda: gone(child), "the end of the program's child")


def test_a_start_that_hangs_is_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mpirun = tmp_path / "mpirun"
    mark = tmp_path / "mark"
    mpirun.write_text(
        f"#!/bin/sh\n[ -e {mark} ] || {{ touch {mark}; exec sleep 2000; }}\necho verified on rank "
        "0; echo verified on rank 1\n"
    )
    mpirun.chmod(0o755)
    assert wheel.verify(mpirun, mpi_inside=False, limit_s=3).startswith("verified in ")
    assert "not finished after 3 s" in (stderr := capsys.readouterr().err) and stderr.endswith(
        "trying again\n"
    )
    mpirun.write_text("#!/bin/sh\nexec sleep 2000\n")
    with pytest.raises(UserError, match="not finished after 0.2 s"):
        wheel.verify(mpirun, mpi_inside=False, limit_s=0.2)


def test_the_users_environment_wins_in_the_verification() -> None:
    env = wheel.environment_anywhere(
        {"OMPI_MCA_btl": "ofi", "OMP_NUM_THREADS": "8"}, mpi_inside=True
    )
    assert (env["OMPI_MCA_btl"], env["OMP_NUM_THREADS"], env["OMPI_ALLOW_RUN_AS_ROOT"]) == (
        "ofi",
        "8",
        "1",
    )
    assert "OMPI_MCA_btl" not in wheel.environment_anywhere({}, mpi_inside=False)


def test_the_version_of_torch_is_known_without_its_import() -> None:
    code = (
        "import sys; from hvdtrain.extras.build_horovod.build import torch_version\n"
        "print(torch_version(), 'torch' in sys.modules)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", f"{code}import torch; print(torch.__version__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    found, loaded, version = said.stdout.split()
    assert (found, loaded) == (version, "False")


def test_the_installed_horovod_was_built_for_this_torch_and_passes_verification() -> None:
    if build.installed_version("horovod") is None:
        if build.LEFT_OUT.exists():
            pytest.skip(
                f"Horovod could not be built: {' '.join(build.LEFT_OUT.read_text().split())}"
            )
        compilers = [name for name in ("c++", "g++", "clang++") if shutil.which(name)]
        assert not compilers, (
            f"{compilers} found, but Horovod is not installed: python -m hvdtrain.cli.horovod"
        )
        pytest.skip("Horovod is not installed: no C++ compiler")
    target = build.detect_target()
    assert build.installed_version("horovod") == build.VERSION
    assert build.built_for_torch() == target.torch
    assert "summed as expected" in wheel.verify(target.mpirun, target.mpi_inside)


def bare_python(folder: Path, programs: list[str], packages: list[str]) -> str:
    """A new Python environment with nothing but these programs on its path and the metadata of
    these packages beside filelock."""
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
