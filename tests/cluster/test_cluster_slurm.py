"""A real SLURM on two hosts: the batch script through a signal and a requeue to the job's end,
scancel, and which srun starts one job."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_hosts import Hosts
from cluster_slurm import Slurm
from faults import ENV, events, outcome, reached, same_end, told
from ranks import FULL, HANG_S, ROOT, Job, needs_mpirun
from test_cluster_hosts import ENGINES, PROBE
from waiting import wait_until

from hvdtrain.errors import REQUEUE, STALLED, USER

pytestmark = [pytest.mark.cluster, needs_mpirun]
SHARES = ("-N2", "--ntasks-per-node=2")
WRAPPER = "jobs/srun-wrapper.sh"

# 720 steps; with pass_s=0.05 they take 40 s, and hardly any processor time
DATA = [
    "data.name=synthetic",
    "data.shape=[8,8,1]",
    "data.samples=960",
    "data.val_samples=32",
    "batch.size=16",
    "batch.evaluate=8",
]
JOB = [
    *DATA,
    "model.name=trouble:Trouble",
    "comm.engine=mpi",
    "optim.name=adam",
    "optim.base_lr=0.002",
    "epochs=12",
    "guard.equal_steps=50",
]
STEPS = 720
# starts in a second, and does not end by itself
NUMPY = [
    *DATA,
    "comm.engine=mpi",
    "framework=numpy",
    "model.name=linear",
    "epochs=9000",
]
KILLED_BY_TIMEOUT = 124


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with Hosts(2) as hosts, Slurm(hosts) as made:
        yield made


def submit(slurm: Slurm, tmp_path: Path, options: list[str], words: list[str]) -> str:
    """The number of a batch job whose run folder is tmp_path/run and whose output is
    tmp_path/log."""
    env = {**ENV, "PYTHON": sys.executable, "RUN": str(tmp_path / "run"), "RESTARTS": "6"}
    command = [
        "sbatch",
        "--parsable",
        *SHARES,
        f"--output={tmp_path}/log",
        *options,
        "jobs/slurm.sbatch",
        *words,
    ]
    return slurm.must(*command, env=env)


def state(slurm: Slurm, number: str, wanted: set[str], limit_s: float = HANG_S) -> dict[str, str]:
    """The job, once it is in one of these states.

    A requeued one waits for 2 s, not for the 20 that its credentials last: a node does not start a
    job in the second that ended it.
    """
    end_s = time.monotonic() + limit_s
    pending_s = 0.0
    while (job := slurm.job(number))["JobState"] not in wanted:
        assert time.monotonic() < end_s, job
        if job["JobState"] != "PENDING" or job["Restarts"] == "0":
            pending_s = time.monotonic()
        elif time.monotonic() > pending_s + 2.0:
            slurm.run("scontrol", "update", f"jobid={number}", "starttime=now")
        time.sleep(0.3)
    return job


def tasks(slurm: Slurm) -> set[int]:
    """The processes on the hosts, except the daemons."""
    assert slurm.hosts
    return {
        pid
        for pid in slurm.hosts.pids()
        if not name_of(pid).startswith(("slurmctld", "slurmd", "slurmscriptd", "munged"))
    }


def emptied(slurm: Slurm) -> float:
    """Seconds until only the daemons run on the hosts."""
    since_s = time.monotonic()
    while left := tasks(slurm):
        assert time.monotonic() < since_s + 300, [name_of(pid) for pid in left]
        time.sleep(0.1)
    return time.monotonic() - since_s


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "munged"  # gone by now


@pytest.mark.every_day
@pytest.mark.parametrize(
    "engine", ENGINES if FULL else ENGINES[:2]
)  # torchdist: test_srun_without_pmi
def test_srun_starts_one_job(slurm: Slurm, engine: str) -> None:
    """Each rank knows its host, its local rank, and the size of the job.

    Of Horovod's starts under this SLURM 22.05 with Open MPI 5.0.11 some hang in MPI_Comm_dup
    (docs/clusters.md); guard.start_s ends such a job, as the next test shows. Here a start that
    hung is repeated, twice at most; any other failure fails the test. One takes 7 s, so the first
    may take 30.
    """
    words = ["srun", "--mpi=pmix", *SHARES, WRAPPER, sys.executable, "-c", PROBE, engine]
    for limit_s in (30, 120, 120):
        if (ran := slurm.run(*words, timeout_s=limit_s)).returncode != KILLED_BY_TIMEOUT:
            break
        print(f"{engine}: a start that hung")
    assert ran.returncode == 0, ran
    assert ran.stdout.strip() == str(
        [[f"n{1 + rank // 2}", rank % 2, 2, [1111.0]] for rank in range(4)]
    ).replace("'", '"')


SCRIPT = """
import os
import sys
import numpy as np
import hvdtrain

assert sys.argv[1:] == ["two words"]
numbers = np.arange(240.0).reshape(60, 4)
result = hvdtrain.train(
    {"model.name": "mlp", "task.name": "regression", "epochs": 2, "batch.size": 12, "comm.engine": "mpi", "run": os.environ["RUN"]},
    train_data={"x": numbers / 240, "y": numbers[:, :1] / 240},
    val_data={"x": numbers[:20] / 240, "y": numbers[:20, :1] / 240},
)
assert 0 <= result.last < 1, result  # the mean squared error
"""  # noqa: E501
OF_HOROVOD = """
import sys
import torch
import hvdtrain.horovod as hvd

hvd.init()
sum_of_ranks = hvd.allreduce(torch.ones(3) * hvd.rank(), op=hvd.Sum)
print(sys.argv[1], hvd.cross_rank(), hvd.local_rank(), sum_of_ranks.tolist())
if sys.argv[1] == "fails" and hvd.rank() == 3:
    raise ValueError("no more")
hvd.barrier()
"""


def test_the_batch_script_starts_a_script(slurm: Slurm, tmp_path: Path) -> None:
    """hvdtrain.train() of a program of the user's own, on four ranks of two hosts:
    jobs/slurm.sbatch train.py ARGUMENTS."""
    (tmp_path / "mine.py").write_text(SCRIPT)
    env = {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "RUN": str(tmp_path / "run")}
    words = [
        "sbatch",
        "--parsable",
        *SHARES,
        f"--output={tmp_path}/log",
        "jobs/slurm.sbatch",
        str(tmp_path / "mine.py"),
        "two words",
    ]
    job = state(slurm, slurm.must(*words, env=env), {"COMPLETED", "FAILED"})
    log = (tmp_path / "log").read_text()
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), log
    assert re.findall(r"^0: ranks   4 \(n1 x 2, n2 x 2\)", log, re.M), log
    assert [event["kind"] for event in events(tmp_path / "run")][-1] == "end"


def test_launch_starts_a_script_through_srun(slurm: Slurm, tmp_path: Path) -> None:
    """In an allocation. Each line has its rank; where one rank fails, its traceback alone ends the
    job."""
    (tmp_path / "mine.py").write_text(OF_HOROVOD)
    launch = [
        "salloc",
        *SHARES,
        sys.executable,
        "-m",
        "hvdtrain",
        "launch",
        "--slurm",
        "-np",
        "4",
        "--",
        str(tmp_path / "mine.py"),
    ]
    said = slurm.must(*launch, "works")
    assert sorted(re.findall(r"works .*", said)) == [
        f"works {host} {local} [6.0, 6.0, 6.0]" for host in (0, 1) for local in (0, 1)
    ], said
    failed = slurm.run(*launch, "fails")
    assert failed.returncode not in (0, KILLED_BY_TIMEOUT), failed
    assert failed.stderr.count("Traceback") == 1 and re.search(
        r"^\[?3.*ValueError: no more$", failed.stderr, re.M
    ), failed.stderr
    emptied(slurm)


def test_a_start_that_hangs_is_ended(slurm: Slurm, tmp_path: Path) -> None:
    """One rank never starts MPI: the others end after guard.start_s, and so does srun."""
    late = 'if [ "$SLURM_PROCID" = 3 ]; then exec sleep 1000; else exec "$@"; fi'
    words = [sys.executable, "-m", "hvdtrain", *NUMPY, "guard.start_s=4", f"run={tmp_path / 'run'}"]
    ran = slurm.run(
        "srun", "--mpi=pmix", "--kill-on-bad-exit=1", *SHARES, "sh", "-c", late, "sh", *words
    )
    assert (
        ran.returncode != KILLED_BY_TIMEOUT and "no progress for 4 s (guard.start_s)" in ran.stderr
    ), ran
    assert f"exit code {STALLED}" in ran.stderr
    emptied(slurm)


def test_srun_without_pmi(slurm: Slurm) -> None:
    """Four jobs of one rank are an error that names the cause; torchdist needs no MPI."""
    ran = slurm.run(
        "srun",
        "--mpi=none",
        *SHARES,
        sys.executable,
        "-m",
        "hvdtrain",
        *NUMPY,
        "run=/nonexistent/run",
    )
    assert ran.returncode == USER, ran
    assert (
        "srun started 4 processes, but the mpi engine sees only itself (size 1)" in ran.stderr
        and "fix: srun --mpi=pmix" in ran.stderr
    )
    table = slurm.must("srun", "--mpi=none", *SHARES, sys.executable, "-c", PROBE, "torchdist")
    assert table.count("1111.0") == 4


def test_pmi_is_picked(slurm: Slurm, tmp_path: Path) -> None:
    assert slurm.must(WRAPPER, "--pmi", env={"PYTHON": sys.executable}) == "pmix"
    (tmp_path / "mpi4py.py").write_text("raise ImportError")
    assert (
        slurm.must(WRAPPER, "--pmi", env={"PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)})
        == "none"
    )
    assert slurm.run(WRAPPER, "--pmi", env={"PYTHON": "/bin/false"}).returncode == USER


@pytest.mark.clock  # SLURM counts time limits in minutes
def test_signal_requeue_and_the_same_end(slurm: Slurm, tmp_path: Path) -> None:
    """SLURM's signal before the time limit stops the job, which is requeued and resumed; its result
    is that of a job without a stop."""
    straight = tmp_path / "straight"
    slurm.must(
        "srun",
        "--mpi=pmix",
        *SHARES,
        sys.executable,
        "-m",
        "hvdtrain",
        *JOB,
        f"run={straight}",
        env=ENV,
    )
    number = submit(slurm, tmp_path, ["--time=1", "--signal=USR2@15"], [*JOB, "model.pass_s=0.05"])
    job = state(slurm, number, {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"})
    log = (tmp_path / "log").read_text()
    emitted = events(tmp_path / "run")
    print(log)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), log + slurm.logs()
    stops = [(event["reason"], event["step"]) for event in emitted if event["kind"] == "stop"]
    starts = [event["step"] for event in emitted if event["kind"] == "start"]
    assert (
        stops
        and {reason for reason, _ in stops} == {"SIGUSR2"}
        and int(job["Restarts"]) >= len(stops)
    ), (stops, job)
    assert starts == [0, *(step for _, step in stops)] and 0 < starts[1] < STEPS
    assert all(event["hosts"] == ["n1", "n2"] for event in emitted if event["kind"] == "start")
    assert outcome(tmp_path / "run") == outcome(straight)
    assert re.search(r"^0: run folder: ", log, re.MULTILINE) and not tasks(slurm)


def test_scancel_leaves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    number = submit(slurm, tmp_path, ["--time=5"], NUMPY)
    wait_until(lambda: events(tmp_path / "run"), "the start of the job")
    assert len(tasks(slurm)) >= 4
    slurm.must("scancel", number)
    print(f"all gone {emptied(slurm):.1f} s after scancel")
    job = state(slurm, number, {"CANCELLED"})
    assert job["Restarts"] == "0", job


def test_without_restarts_left(slurm: Slurm, tmp_path: Path) -> None:
    """The last stop ends the job with 75, and prints how to resume it."""
    number = submit(slurm, tmp_path, ["--export=ALL,RESTARTS=0"], [*NUMPY, "--max-time", "3"])
    job = state(slurm, number, {"FAILED", "COMPLETED"})
    log = (tmp_path / "log").read_text()
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", f"{REQUEUE}:0"), log
    assert (
        f"the same command with RUN={tmp_path}/run resumes the job" in log
        and events(tmp_path / "run")[-1]["kind"] == "stop"
    ), log


ELASTIC = [
    *(
        "data.name=synthetic",
        "data.shape=[16,16,1]",
        "data.samples=1440",
        "data.val_samples=48",
        "batch.size=24",
        "batch.evaluate=12",
    ),
    *(
        "comm.engine=mpi",
        "framework=numpy",
        "model.name=linear",
        "speed.precision=fp64",
        "epochs=9000",
        "checkpoint.every_steps=100",
    ),
]


def test_a_node_is_drained_and_one_is_lost(slurm: Slurm, tmp_path: Path) -> None:
    """jobs/elastic.sbatch: the job leaves a drained node and comes back to it, goes on without one
    that is down, and is requeued on both.

    Its curve and weights are those of one rank that nobody disturbed. A job below its MIN is
    requeued meanwhile.
    """
    run = tmp_path / "run"

    def start(**variables: str) -> str:
        env = {
            **ENV,
            "PYTHON": sys.executable,
            "EVERY": "1",
            "GROW": "2",
            "PATIENCE": "1",
            **variables,
        }
        options = [
            "--nodes=1-2",
            "--ntasks-per-node=2",
            "--time=30",
            f"--output={tmp_path}/{Path(variables['RUN']).name}.log",
        ]
        return slurm.must(
            "sbatch", "--parsable", *options, "jobs/elastic.sbatch", *ELASTIC, env=env
        )

    def trains(ranks: int) -> None:
        end_s = time.monotonic() + 300
        pending_s = 0.0
        while not (
            (lines := told(run)) and lines[-1]["kind"] == "trains" and lines[-1]["ranks"] == ranks
        ):
            assert time.monotonic() < end_s, (
                f"{lines[-3:]}\n{log.read_text()[-3000:]}\n{slurm.job(number)}\n{slurm.logs()}"
            )
            time.sleep(0.2)
            if slurm.job(number)["JobState"] != "PENDING":
                pending_s = time.monotonic()
            elif lines and time.monotonic() > pending_s + 2.0:  # as in state()
                slurm.run("scontrol", "update", f"jobid={number}", "starttime=now")

    log = tmp_path / "run.log"
    number = start(RUN=str(run))
    try:
        trains(4)
        for word, ranks in (("drain", 2), ("resume", 4), ("down", 2), ("resume", 4)):
            since_s = time.monotonic()
            slurm.must("scontrol", "update", "nodename=n2", f"state={word}", "reason=test")
            trains(ranks)
            print(f"{word}: on {ranks} ranks after {time.monotonic() - since_s:.1f} s")
            if word == "down":
                small = start(RUN=str(tmp_path / "small"), MIN="3")
                state(slurm, small, {"RUNNING"})
                assert state(slurm, small, {"PENDING"})["Restarts"] == "1"
                slurm.must("scancel", small)
        slurm.must("scancel", "--signal=USR2", "--batch", number)
        assert state(slurm, number, {"PENDING"})["Restarts"] == "2"
    finally:
        slurm.run("scancel", number)
        slurm.run("scontrol", "update", "nodename=n2", "state=resume")
        emptied(slurm)
    text = log.read_text()
    assert (
        "n2 is no longer offered" in text
        and "2 ranks could be 4" in text
        and "n2 lost" in text
        and "n2 idle again" in text
    ), text
    small_log = (tmp_path / "small.log").read_text()
    assert "2 slots, at least 3 are needed" in small_log, small_log
    assert not (tmp_path / "small").exists()
    with Job(
        0,
        ["-m", "hvdtrain", *ELASTIC, f"run={tmp_path / 'straight'}", f"stop.steps={reached(run)}"],
    ) as straight:
        assert straight.wait().returncode == 0
    same_end(run, tmp_path / "straight", reached(run))


def test_nodes_on_loopback() -> None:
    """Without separate hosts the two nodes are one machine for MPI."""
    with Slurm(None) as slurm:
        table = slurm.must("srun", "--mpi=pmix", *SHARES, sys.executable, "-c", PROBE, "mpi")
    assert table.count("1111.0") == 4


@pytest.mark.parametrize(
    ("env", "gpu"),
    [
        ({"SLURM_LOCALID": "3", "CUDA_VISIBLE_DEVICES": "4,5"}, "5"),
        ({"SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "7"}, "7"),
        ({"SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "2,3", "SLURM_GPUS_PER_TASK": "2"}, "2,3"),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, "2,3"),
    ],
)
def test_wrapper_pins_a_gpu(env: dict[str, str], gpu: str) -> None:
    words = [WRAPPER, "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    assert (
        subprocess.run(
            words, env={**os.environ, **env}, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        == gpu
    )


def test_wrapper_pins_cores() -> None:
    """Each of two ranks gets half of the cores, where the job has all of them and SLURM pinned
    nothing."""
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2:
        pytest.skip("one core")
    words = [WRAPPER, sys.executable, "-c", "import os; print(*sorted(os.sched_getaffinity(0)))"]

    def cores(**env: str) -> list[int]:
        there = {
            **os.environ,
            "SLURM_CPUS_ON_NODE": str(len(mine)),
            "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
            **env,
        }
        done = subprocess.run(
            words, env=there, cwd=ROOT, capture_output=True, text=True, check=True
        )
        return [int(core) for core in done.stdout.split()]

    half = len(mine) // 2
    assert (
        cores(SLURM_LOCALID="0") == mine[:half]
        and cores(SLURM_LOCALID="1") == mine[half : 2 * half]
    )
    assert cores(SLURM_LOCALID="1", SLURM_CPU_BIND_TYPE="mask_cpu:") == mine  # SLURM has pinned it
    assert cores(SLURM_LOCALID="1", SLURM_CPUS_ON_NODE="1") == mine  # others may be here
