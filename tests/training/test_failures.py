"""One failed rank ends all ranks, in seconds, with its own traceback, printed once."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest
from ranks import ONE_ENGINE, Job, Result, mpirun, needs_extra
from waiting import wait_until

LIMIT_S = 20.0  # 0.5 s after a kill and 2 s after an exception where nothing else runs
TRAIN = ["-m", "hvdtrain", "model.name=faulty:Faulty", "epochs=1000000", "log.every_s=0.5"]


def words(tmp_path: Path, engine: str, *more: str) -> list[str]:
    return [*TRAIN, f"comm.engine={engine}", f"run={tmp_path / 'run'}", *more]


def env() -> dict[str, str]:
    return {
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "support")]
        )
    }


@pytest.mark.parametrize("engine", ONE_ENGINE["mpi"])
def test_an_exception_on_one_rank_ends_all(tmp_path: Path, engine: str) -> None:
    options = "model.bad_rank=1", "model.bad_step=50", f"model.stamp={tmp_path / 'stamp'}"
    result = mpirun(2, words(tmp_path, engine, *options), env=env())
    assert result.returncode == 1, result
    assert result.stderr.count("ArithmeticError: forward 50 was made to fail") == 1, result.stderr
    assert result.stderr.count("Traceback") == 1, result.stderr
    assert f"rank 1 on {socket.gethostname()}: the error above ends the job" in result.stderr
    assert "engine " + engine in result.stdout


@pytest.mark.parametrize("engine", ONE_ENGINE["horovod"])
def test_a_rank_that_leaves_early_ends_all(tmp_path: Path, engine: str) -> None:
    options = (
        "model.bad_rank=1",
        "model.bad_step=50",
        f"model.stamp={tmp_path / 'stamp'}",
        "model.leave=true",
    )
    result = mpirun(2, words(tmp_path, engine, *options), env=env())
    assert result.returncode == 1, result
    assert "SystemExit: 0" in result.stderr
    assert f"rank 1 on {socket.gethostname()}" in result.stderr


@pytest.mark.parametrize("engine", ONE_ENGINE["mpi"])
def test_a_killed_rank_ends_all(tmp_path: Path, engine: str) -> None:
    result, seconds = kill_rank_1(tmp_path, engine)
    print(f"{engine}: all gone {seconds:.1f} s after kill -9, exit code {result.returncode}")
    assert result.returncode not in (0, 124)


@pytest.mark.clock
@pytest.mark.parametrize("engine", ONE_ENGINE["horovod"])
def test_all_ranks_end_within_seconds(tmp_path: Path, engine: str) -> None:
    """After a kill, and after an exception."""
    assert kill_rank_1(tmp_path / "killed", engine)[1] < LIMIT_S
    stamp = tmp_path / "stamp"
    result = mpirun(
        2,
        words(tmp_path, engine, "model.bad_rank=1", "model.bad_step=50", f"model.stamp={stamp}"),
        env=env(),
    )
    seconds = time.time() - float(stamp.read_text())
    print(f"{engine}: all gone {seconds:.1f} s after the exception, exit code {result.returncode}")
    assert seconds < LIMIT_S


def kill_rank_1(folder: Path, engine: str) -> tuple[Result, float]:
    """Kills it while the job trains; the seconds until every process is gone."""
    with Job(2, words(folder, engine), env=env()) as job:
        wait_until(lambda: job.output().count("\n") > 8, "the job trains")
        pids = job.pids()
        assert sorted(pids) == [0, 1]
        killed = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        result = job.wait()
        wait_until(lambda: not job.processes(), "all processes are gone")
        return result, time.monotonic() - killed


@needs_extra("image_files")
def test_a_user_error_on_all_ranks_is_printed_once(tmp_path: Path) -> None:
    result = mpirun(
        2,
        words(tmp_path, "mpi", "data.name=folder", f"data.root={tmp_path / 'nowhere'}"),
        env=env(),
    )
    assert result.returncode == 2, result
    assert result.stderr.count("nowhere") == 1, result.stderr
    assert "Traceback" not in result.stderr


@needs_extra("image_files")
@pytest.mark.parametrize("engine", ONE_ENGINE["horovod"])
def test_a_user_error_on_one_rank_names_it(tmp_path: Path, engine: str) -> None:
    """Rank 0 waits in the engine's start for a rank that found no data."""
    code = (
        "import os, sys; from hvdtrain.__main__ import main; "
        "from hvdtrain.comm.launcher_variables import placement; "
        f"sys.exit(main(['run={tmp_path / 'run'}', 'comm.engine={engine}'] + ['data.name=folder', "
        "'data.root=/nowhere']"
        " * placement(os.environ).rank))"
    )
    result = mpirun(2, ["-c", code], env=env())
    assert result.returncode == 2, result
    assert "/nowhere" in result.stderr
    assert f"rank 1 on {socket.gethostname()}" in result.stderr


def test_ranks_that_were_given_different_jobs_are_refused(tmp_path: Path) -> None:
    code = (
        "import os, sys; from hvdtrain.__main__ import main; "
        "from hvdtrain.comm.launcher_variables import placement; "
        f"sys.exit(main(['run={tmp_path / 'run'}', 'comm.engine=mpi', f'seed={{1 + "
        f"placement(os.environ).rank}}']))"
    )
    result = mpirun(2, ["-c", code], env=env())
    assert result.returncode == 2, result
    assert result.stderr.count("seed differs between ranks: 1 on rank 0, 2 on rank 1") == 1, (
        result.stderr
    )
