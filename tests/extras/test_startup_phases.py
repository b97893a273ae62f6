"""The duration of the start: its phases add up and are reported; and estimates of the job's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks
from ranks import HANG_S, needs_mpirun

from hvdtrain.config.read import configure
from hvdtrain.core.progress import Progress
from hvdtrain.events.log import Event, Log
from hvdtrain.extras.startup.durations import _age_s, _stat, launcher, phases, summary
from hvdtrain.extras.startup.gauge import StartGauge
from hvdtrain.training.health.heartbeat import Heartbeat

JOB = ["data.name=synthetic", "data.samples=64", "model.name=mlp", "max_steps=12", "resume=no"]


def test_phases_are_those_between_the_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat = Heartbeat()
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for phase, seconds, step in [
        ("connecting the ranks", 0.5, 0), ("reading the data", 2.0, 0), ("building the model", 0.25, 0),  # noqa: E501
        ("reading the checkpoint", 0.125, 0),
        ("reading samples", 0.5, 7), ("step", 1.0, 7), ("reading samples", 9.0, 8), ("step", 9.0, 8), ("synchronizing", 9.0, 9),  # noqa: E501
    ]:  # fmt: skip
        heartbeat.beat(phase, 0, step)
        now[0] += seconds
    found = phases(heartbeat)
    before = {name: found.pop(name) for name in ("launcher", "Python") if name in found}
    assert found == {
        "ranks": 0.5,
        "data": 2.0,
        "model": 0.25,
        "state": 0.125,
        "first samples": 0.5,
        "first step": 1.0,
    }
    assert all(seconds >= 0 for seconds in before.values())
    assert (
        summary({"ranks": 0.5, "data": 2.04, "state": 0.01})
        == "start   2.5 s to the end of the first step: ranks 0.5, data 2.0"
    )
    assert summary({"data": 0.04, "model": 0.02}) == "start   0.1 s to the end of the first step"


class Kept:
    """A sink."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)


def after_two_steps(first_s: float, second_s: float, *arguments: str) -> list[Event]:
    """Of a job of 20 epochs of 6,400 samples, 64 in a step, that resumes from step 100: 1,898 steps
    are left after its second one."""
    kept = Kept()
    clock = iter([5.0, 5.0 + first_s, 5.0 + first_s + second_s])
    first_step = StartGauge(configure(None, arguments), Log([kept]), lambda: next(clock))
    for step in (100, 101, 102, 103, 104):  # the clock is read three times
        first_step.before_step(Progress(6400, 128_000, step, 64 * step))
    return kept.events


@pytest.mark.parametrize(
    ("second_s", "arguments", "line"),
    [
        (64.0, [], "the second 64 s; about 34 h at that rate"),  # 1,898 x 64 s = 33.7 h
        (192.0, [], "the second 192 s; about 4 days at that rate"),
        (1.0, [], "the second 1 s; about 32 min at that rate"),
        (1.0, ["max_steps=142"], "the second 1 s; about 40 s at that rate"),
        (0.99, ["log.every_steps=11"], "the second 0.99 s; about 31 min at that rate"),
        (64.0, ["speed.compile=default"], "the second 64 s; about 34 h at that rate"),
    ],
)
def test_slow_steps_say_how_long_the_job_takes(
    second_s: float, arguments: list[str], line: str
) -> None:
    (event,) = after_two_steps(300.0, second_s, *arguments)
    expected = ("first_step", 102, [f"first step 300 s, {line}"], 300.0, second_s)
    assert (
        event.kind,
        event.step,
        event.fields["lines"],
        event.fields["step_s"],
        event.fields["second_s"],
    ) == expected


def test_a_slow_first_step_is_no_rate() -> None:
    assert after_two_steps(300.0, 0.99) == [] == after_two_steps(300.0, 9.9, "log.every_steps=1")


def test_a_process_has_an_age() -> None:
    age = _age_s(os.getpid())
    assert age is not None and 0 <= age < 24 * 3600
    time.sleep(0.05)
    again = _age_s(os.getpid())
    assert again is not None and 0.04 < again - age < 300
    assert _stat(os.getpid())[0].startswith("py") and _stat(2**30) is None


@pytest.mark.parametrize(
    ("above", "by_srun", "began"),  # the place of the launcher
    [
        ("mpirun bash sshd", False, 0),  # one host
        ("sh prted mpirun python", False, 2),  # a wrapper below; `launch` above
        (
            "hydra_pmi_proxy hydra_bstrap_pr mpiexec.hydra mpirun bash",
            False,
            3,
        ),  # Intel MPI; Linux keeps 15 letters of a name
        (
            "mpirun bash slurmstepd slurmd",
            False,
            0,
        ),  # sbatch, mpirun: slurmstepd runs the script, which had other commands
        ("prterun slurmstepd slurmd", False, 0),  # the script's last command, by exec
        ("slurmstepd slurmd", True, 0),  # srun
        ("bash slurmstepd slurmd", True, 1),
        ("bash slurmstepd slurmd", False, None),  # sbatch, and no launcher
        ("prted slurmstepd slurmd", True, 0),  # mpirun's own daemon on another host
        ("mpirun bash mpirun bash", False, 0),
        ("bash sshd", False, None),
    ],
)
def test_the_launcher_of_this_start(above: str, by_srun: bool, began: int | None) -> None:
    """The uppermost of the row of launchers nearest above us, not the outermost of all."""
    assert launcher(((name, place) for place, name in enumerate(above.split())), by_srun) == began


def test_earlier_commands_of_a_batch_script_are_no_part_of_the_start(tmp_path: Path) -> None:
    """slurmstepd -> mpirun -> sh -> us, where the script slept before: mpirun's age counts, not
    slurmstepd's; srun's step has its own."""
    code = (
        "import os; from hvdtrain.extras.startup.durations import _age_s, _launcher_age_s as "
        "age; print(age(), _age_s(os.getpid()))"
    )
    for name in ("slurmstepd", "mpirun"):
        shutil.copy(shutil.which("bash") or "", tmp_path / name)
    us = f"sh -c '{sys.executable} -c \"{code}\"; true'; true"
    (tmp_path / "inner").write_text(us)
    scripts = [f"sleep 5; {tmp_path}/mpirun {tmp_path}/inner; true", f"sleep 5; {us}"]
    step = {
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "SLURM_NODEID": "0",
    }
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM_", "OMPI_", "PMI"))
    }
    jobs = [
        (scripts[0], {}),
        (scripts[1], {}),
        (scripts[1], step),
        (scripts[1], step | {"SLURM_PTY_PORT": "1"}),
    ]
    running = [
        subprocess.Popen(
            [tmp_path / "slurmstepd", "-c", script],
            env=clean | more,
            stdout=subprocess.PIPE,
            text=True,
        )
        for script, more in jobs
    ]
    of_mpirun, of_script, of_step, of_shell = [
        job.communicate(timeout=HANG_S)[0].split() for job in running
    ]
    assert of_script[0] == of_shell[0] == "None"
    before_mpirun, before_step = (
        float(of_launcher) - float(ours) for of_launcher, ours in (of_mpirun, of_step)
    )
    # mpirun has begun just before us, and the step before it slept
    assert -0.1 < before_mpirun < 4.9 < before_step


@needs_mpirun
def test_a_job_reports_its_start_once(tmp_path: Path) -> None:
    result = ranks.mpirun(
        2,
        ["-m", "hvdtrain", *JOB, "comm.engine=mpi", "log.every_steps=1", f"run={tmp_path}"],
        is_warm=False,
    )
    assert result.returncode == 0, result.stderr
    (event,) = [
        line
        for line in map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
        if line["kind"] == "started"
    ]
    assert (
        list(event["start_s"])[:2] == ["launcher", "Python"]
        and sum(event["start_s"].values()) < result.seconds + 0.5
    )
    assert event["start_s"]["ranks"] > 0 and event["start_s"]["first step"] > 0
    assert result.stdout.count("s to the end of the first step: ") == 1
