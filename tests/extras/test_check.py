"""hvdtrain check under real launchers: ranks that differ, one process, a rank that fails, a rank
that is late."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ranks import ROOT, mpirun, needs_horovod, needs_mpirun, python

import hvdtrain
from hvdtrain.config.read import configure
from hvdtrain.extras.check.dry_run import try_run_folder

CHECK = ["-m", "hvdtrain", "check"]
SMALL = ["framework=numpy", "model.name=linear"]  # needs no torch
MNIST = [*SMALL, "data.name=mnist", "data.root=data", "data.download=false", "batch.size=4"]

# Prepares each rank by {rank: Preparation}, then becomes `check` with the arguments.
WRAPPER = """
import json, os, sys, time
rank, preparations, arguments = os.environ["OMPI_COMM_WORLD_RANK"], json.loads(sys.argv[1]), sys.argv[2:]
code, more_arguments, environ = preparations.get(rank, ["", [], None])
exec(code)
os.environ.update(environ or {})
os.execv(sys.executable, [sys.executable, "-m", "hvdtrain", "check", *arguments, *more_arguments])
"""  # noqa: E501


class Preparation(NamedTuple):
    """What is special about one rank."""

    code: str = ""  # Python, run before check
    arguments: tuple[str, ...] = ()
    environ: dict[str, str] | None = None


def wrapped(preparations: dict[int, Preparation], arguments: list[str]) -> list[str]:
    return ["-c", WRAPPER, json.dumps(preparations), *arguments]


def findings(tree: dict[str, Any]) -> dict[str, tuple[str, str, str]]:
    return {
        finding["what"]: (finding["level"], finding["where"], finding["fix"])
        for finding in tree["findings"]
    }


def write_mnist(folder: Path, samples: int) -> None:
    for prefix in ("train", "t10k"):
        raw = folder / "data/MNIST/raw"
        raw.mkdir(parents=True, exist_ok=True)
        images = (
            bytes.fromhex("00000803")
            + samples.to_bytes(4, "big")
            + bytes.fromhex("0000000400000003")
        )
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(images + bytes(range(12)) * samples)
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(
            bytes.fromhex("00000801") + samples.to_bytes(4, "big") + bytes(samples)
        )


def test_one_process(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = python([*CHECK, *SMALL, "--json", str(out), f"run={tmp_path}/run/of/mine"])
    assert result.returncode == 0, result
    lines = result.stdout.splitlines()
    assert lines[0] == "hvdtrain check: 1 rank: nothing to compare"
    assert lines[2].split() == [
        "rank",
        "host",
        "local",
        "device",
        "cores",
        "threads",
        "engine",
        "launcher",
        "pid",
    ]
    assert lines[3].split()[0] == "0" and "single" in lines[3] and "none" in lines[3]
    assert (
        f"run       {tmp_path}/run/of/mine, " in result.stdout
        and "data      1,437 training samples" in result.stdout
    )
    tree = json.loads(out.read_text())
    assert set(tree) == {"exit_code", "engine", "findings", "speed", "run", "cores", "ranks"}
    assert tree["exit_code"] == 0 and tree["cores"] == []
    assert (
        tree["engine"] == "single: no launcher"
        and tree["run"]["locks"] is True
        and tree["speed"] == {"engine": None, "mpi": None}
    )
    rank = tree["ranks"][0]
    assert rank["versions"]["hvdtrain"] == hvdtrain.__version__ and rank["cores"] == sorted(
        os.sched_getaffinity(0)
    )
    sizes = {
        "training samples": 1437,
        "validation samples": 360,
        "image shape": [8, 8, 1],
        "classes": 10,
    }
    assert rank["data"].items() >= sizes.items()
    digests = {
        key: value for key, value in rank["data"].items() if key.startswith("digest of the ")
    }
    assert len(digests) == len({*digests.values()}) == 4, (
        "labels and images, for training and validation"
    )
    assert not list(tmp_path.glob("**/.hvdtrain-check*")) and not (tmp_path / "run").exists(), (
        "a check leaves nothing behind"
    )


def test_errors_and_warnings_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    overrides = [
        *SMALL,
        "data.name=mnist",
        f"data.root={tmp_path}/nowhere",
        "data.download=false",
        f"run={tmp_path}/file/run",
    ]
    result = python([*CHECK, *overrides, "--json", "-"], env={"XDG_CACHE_HOME": f"{tmp_path}/file"})
    assert result.returncode == 2, result
    tree = json.loads(result.stdout)
    found = findings(tree)
    assert tree["exit_code"] == 2
    assert [finding["level"] for finding in tree["findings"]] == ["error", "error", "warning"]
    run = f"cannot write the run folder {tmp_path}/file/run: Not a directory"
    assert found[run] == ("error", "run, command line", "give run= a folder that can be written")
    assert found[f"cannot write in {tmp_path}/file/hvdtrain: Not a directory"][2].startswith(
        "give XDG_CACHE_HOME= a folder on a local disk"
    )
    assert any(str(tmp_path / "nowhere") in what + where for what, (_, where, _) in found.items())


def test_a_run_folder_that_is_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to("nowhere")
    facts, (finding,) = try_run_folder(configure(None, [f"run={tmp_path}/run"]))
    assert facts["locks"] is None and finding.level == "error"
    assert finding.what == f"cannot write the run folder {tmp_path}/run: No such file or directory"
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.in_turn
@needs_mpirun
def test_ranks_that_differ(tmp_path: Path) -> None:
    """One start of four ranks, each with a mistake of its own: every one is named, with its rank,
    and the code is 2."""
    write_mnist(tmp_path / "most", 8)
    write_mnist(tmp_path / "fewer", 6)
    (tmp_path / "none").mkdir()
    shutil.copytree(
        ROOT / "hvdtrain", tmp_path / "code/hvdtrain", ignore=shutil.ignore_patterns("__pycache__")
    )
    with (tmp_path / "code/hvdtrain/core/progress.py").open("a") as file:
        file.write("# another line\n")
    (tmp_path / "code/hvdtrain/mine.py").write_text('"""Mine."""\n')
    stay = f"os.chdir({str(tmp_path / 'most')!r})"
    pin = "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])"
    preparations = {
        0: Preparation(stay, environ={"PYTHONHASHSEED": "5"}),
        1: Preparation(f"{stay}; {pin}", arguments=("seed=2",)),
        2: Preparation(
            f"os.chdir({str(tmp_path / 'fewer')!r}); {pin}",
            environ={"PYTHONPATH": str(tmp_path / "code")},
        ),
        3: Preparation(f"os.chdir({str(tmp_path / 'none')!r})", environ={"OMP_NUM_THREADS": "64"}),
    }
    result = mpirun(
        4, wrapped(preparations, ["comm.engine=mpi", *MNIST, "--json", str(tmp_path / "out.json")])
    )
    assert result.returncode == 2, result
    tree = json.loads((tmp_path / "out.json").read_text())
    found = findings(tree)
    host = os.uname().nodename
    code = found["hvdtrain's code differs: core/progress.py, mine.py (only there)"]
    assert code[:2] == ("error", f"rank 2 on {host}; 3 other ranks agree")
    assert found["the configuration differs: seed is 2 instead of 1"][:2] == (
        "error",
        f"rank 1 on {host}; 3 other ranks agree",
    )
    assert found["training samples: 6 instead of 8"][:2] == ("error", f"rank 2 on {host}")
    labels = next(
        where
        for what, (_, where, _) in found.items()
        if what.startswith("digest of the training labels: ")
    )
    assert labels == f"rank 2 on {host}"
    assert found["PYTHONHASHSEED is 5; other ranks: not set"][:2] == ("error", f"rank 0 on {host}")
    missing = next(where for what, (_, where, _) in found.items() if "MNIST" in what + where)
    assert missing.startswith(f"rank 3 on {host}")
    assert any(what.startswith("OMP_NUM_THREADS=64 starts 67 threads") for what in found)
    if len(os.sched_getaffinity(0)) > 1:
        assert any(what.startswith("2 ranks share 1 core (") for what in found)
    assert [facts["rank"] for facts in tree["ranks"]] == [0, 1, 2, 3] and len(
        {facts["pid"] for facts in tree["ranks"]}
    ) == 4
    assert [bool(facts["data"]) for facts in tree["ranks"]] == [True, True, True, False]
    # the mpi engine is plain MPI itself
    assert tree["speed"]["engine"]["bytes_per_s"] > 1e6 and tree["speed"]["mpi"] is None
    for what in found:
        assert f": {what}\n  where: " in result.stdout
    assert "10 errors" in result.stdout and "the job would fail or run incorrectly" in result.stdout


APART = """
import os
import torch
class Apart(torch.nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.fc = torch.nn.Linear(shape[0] * shape[1] * shape[2], classes)
        self.factor = 1.5 if os.environ.get("APART") == "1" else 1.0
    def forward(self, x):
        return self.fc(x.flatten(1)) * self.factor
"""


@pytest.mark.slow
@needs_mpirun
def test_a_model_with_other_outputs_on_one_rank(tmp_path: Path) -> None:
    """Its code, the data and the configuration are the same: it reads a variable that nobody knows
    of."""
    (tmp_path / "apart.py").write_text(APART)
    path = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    preparations = {0: Preparation(environ=path), 1: Preparation(environ={**path, "APART": "1"})}
    result = mpirun(
        2, wrapped(preparations, ["comm.engine=mpi", "model.name=apart:Apart", "--json", "-"])
    )
    assert result.returncode == 2, result
    found = findings(json.loads(result.stdout))
    ((what, where, fix),) = (
        (what, where, fix) for what, (level, where, fix) in found.items() if level == "error"
    )
    assert what.startswith(
        "the model gives other outputs on some ranks before the first step: its loss for a fixed "
        "batch is "
    ), what
    assert where.startswith(f"rank 1 on {os.uname().nodename}, against") and fix.startswith(
        "give every rank the same model"
    ), (where, fix)


@pytest.mark.in_turn
@needs_mpirun
@needs_horovod
def test_horovod_beside_plain_mpi(tmp_path: Path) -> None:
    result = mpirun(2, [*CHECK, *SMALL, "comm.engine=horovod", "--json", "-"])
    assert result.returncode == 0, result
    tree = json.loads(result.stdout)
    assert not [finding for finding in tree["findings"] if finding["level"] == "error"]
    note = "comm.engine=mpi is faster for small models (0.8 of the step time)"
    assert (
        tree["engine"] == f"horovod: comm.engine=horovod; {note}"
        and [facts["engine"] for facts in tree["ranks"]] == ["horovod"] * 2
    )
    for name in ("engine", "mpi"):
        speed = tree["speed"][name]
        assert speed["latency_s"] > 0 and speed["bytes_per_s"] == pytest.approx(
            2**24 / speed["seconds"]
        )
    for facts in tree["ranks"]:
        assert facts["libraries"]["horovod"] == facts["libraries"]["mpi4py"] and facts[
            "launcher_mpi"
        ] in facts["libraries"]["mpi4py"].replace(" v", " ")
        assert facts["launcher"] == "Open MPI's mpirun" and facts["local_size"] == 2


STEP = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "7",
}


@pytest.mark.in_turn
def test_srun_that_starts_n_jobs_of_one_rank() -> None:
    """srun without --mpi: every process would train alone. Rank 0 reports it, the others are
    silent."""
    argv = [*CHECK, *SMALL, "comm.engine=mpi"]
    first = python(
        argv, env={**STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    )
    assert first.returncode == 2, first
    assert (
        first.stdout.startswith("hvdtrain check: rank 0 alone\n")
        and "MPI       started by srun without PMI" in first.stdout
    )
    where = f"  where: rank 0 on {os.uname().nodename}; comm.engine=mpi; mpi4py uses "
    assert (
        f"error: srun started 4 processes, but the mpi engine sees only itself (size 1)\n{where}"
        in first.stdout
    )
    assert "  fix: srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH, Intel MPI); or " in first.stdout
    other = python(
        argv, env={**STEP, "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
    )
    assert (other.returncode, other.stdout, other.stderr) == (2, "", "")


@pytest.mark.in_turn
def test_a_launcher_that_contradicts_itself() -> None:
    environ = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "3",
    }
    result = python(
        [*CHECK, "--json", "-"],
        env={**environ, "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"},
    )
    assert (result.returncode, result.stdout) == (
        2,
        "",
    ) and "torchrun set some of its variables" in result.stderr  # rank 1 in short
    result = python([*CHECK, "--json", "-"], env={"RANK": "0", "WORLD_SIZE": "2"})
    assert (
        result.returncode == 2
        and "LOCAL_RANK=0 LOCAL_WORLD_SIZE=1" in json.loads(result.stdout)["findings"][0]["fix"]
    )


@needs_mpirun
@pytest.mark.slow
def test_a_rank_that_cannot_start_or_never_connects(tmp_path: Path) -> None:
    """A rank that fails prints its error; where a rank never connects, rank 0 reports that and no
    rank waits forever."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py/__init__.py").write_text("raise ImportError('not on this host')\n")
    result = mpirun(
        2,
        wrapped(
            {1: Preparation(environ={"PYTHONPATH": f"{tmp_path}:{ROOT}"})},
            [*SMALL, "comm.engine=mpi", "--limit", "800"],
        ),
    )
    assert result.returncode == 2 and "waited" not in result.stderr, result
    assert (
        f"the mpi engine cannot load mpi4py: not on this host (rank 1 on {os.uname().nodename}; "
        "comm.engine=mpi); fix: " in result.stderr
    )
    result = mpirun(
        2,
        wrapped({1: Preparation("time.sleep(2000)")}, [*SMALL, "comm.engine=mpi", "--limit", "4"]),
    )
    assert result.returncode == 2, result
    assert "hvdtrain check: error: rank 0 waited 4 s for other ranks to connect\n" in result.stderr


@pytest.mark.in_turn
def test_the_command_line() -> None:
    result = python([*CHECK, *SMALL, "--json"])
    assert result.returncode == 0 and json.loads(result.stdout)["exit_code"] == 0, (
        "without a value it is the standard output"
    )
    result = python([*CHECK, "--limit"])
    assert result.returncode == 2 and "expected one argument" in result.stderr
    result = python([*CHECK, "batch.sise=3"])
    assert result.returncode == 2 and "1 error: " in result.stdout and "batch.size" in result.stdout
    result = python([*CHECK, *SMALL, "--json", "/nowhere/out.json"])
    assert (
        result.returncode == 2
        and "cannot write /nowhere/out.json: No such file or directory" in result.stderr
    )
