"""What a supervisor decides: when a job is started again, on which hosts, and when it is given
up."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest
import yaml
from ranks import HANG_S, ROOT, environment, needs_mpirun

from hvdtrain.errors import BUG, DIVERGED, DONE, LOST, MEMORY, REQUEUE, STALLED, USER, UserError
from hvdtrain.extras.launch import hosts, supervisor
from hvdtrain.extras.launch.command import USAGE, launch
from hvdtrain.extras.launch.hosts import (
    FORGOTTEN_S,
    NO_PROGRESS,
    SHORTEST_S,
    Ended,
    Failure,
    HostBook,
    Probes,
    RestartDecision,
    choose,
    decide,
    left_out_s,
    of_file,
    of_script,
    reason_to_change,
    reason_to_give_up,
    this_machine,
)
from hvdtrain.extras.launch.mpirun import Host
from hvdtrain.extras.launch.program import value_of
from hvdtrain.extras.launch.run import LauncherRun
from hvdtrain.extras.launch.supervisor import JobEvents, Record

KILLED = 128 + signal.SIGKILL
TERMINATED = 128 + signal.SIGTERM
CRASHED = 128 + signal.SIGSEGV
COMES_BACK = """
import os, pathlib, signal, sys

rank, first = int(os.environ["OMPI_COMM_WORLD_RANK"]), pathlib.Path(sys.argv[1])
print("start of", rank)
if rank == 1 and not first.exists():
    first.touch()
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2:] == ["wrong"]:
    raise ValueError("again and again")
"""
N1 = Host("n1", 2)
N2 = Host("n2", 2)
N3 = Host("n3", 4)


@pytest.mark.parametrize(
    ("ended", "decision"),
    [
        (Ended(DONE, "end", 300), RestartDecision("finish", DONE)),
        (Ended(DONE, "", 40), RestartDecision("failed", DONE)),  # mpirun has lost a host
        (
            Ended(DONE, "end", -1),
            RestartDecision("failed", DONE),
        ),  # the end is that of an earlier start
        (Ended(REQUEUE, "stop", 40), RestartDecision("finish", REQUEUE)),  # its time limit
        (Ended(REQUEUE, "stop", 40, asked=True), RestartDecision("change", DONE)),
        (Ended(128 + signal.SIGUSR2, "", 40, asked=True), RestartDecision("change", DONE)),
        (Ended(DONE, "end", 300, asked=True), RestartDecision("finish", DONE)),  # it was faster
        (Ended(KILLED, "", 40, asked=True), RestartDecision("failed", KILLED)),
        (Ended(REQUEUE, "stop", 40, stopped=True), RestartDecision("finish", REQUEUE)),
        (Ended(REQUEUE, "stop", 40, stopped=True, asked=True), RestartDecision("finish", REQUEUE)),
        (
            Ended(TERMINATED, "", 40, stopped=True),
            RestartDecision("finish", TERMINATED),
        ),  # a second signal
        (Ended(DONE, "", 40, stopped=True), RestartDecision("finish", REQUEUE)),
        (Ended(LOST, "stop", 40), RestartDecision("failed", LOST)),  # guard.lost=restart
        (Ended(DIVERGED, "failed", 40), RestartDecision("failed", DIVERGED)),
    ],
)
def test_what_the_end_of_a_start_means(ended: Ended, decision: RestartDecision) -> None:
    assert decide(ended) == decision


@pytest.mark.parametrize("code", [BUG, USER, DIVERGED, MEMORY, STALLED, CRASHED])
def test_a_job_that_fails_twice_at_the_same_step_is_not_started_a_third_time(code: int) -> None:
    again = Failure(code, 40)
    assert not reason_to_give_up([again], is_first_start=code != USER)
    assert reason_to_give_up([again, again], False) == "it failed twice at step 40 by its own error"
    assert (
        reason_to_give_up([again, Failure(KILLED, 40), Failure(BUG, 40)], False)
        == "it failed twice at step 40 by its own error"
    )
    assert not reason_to_give_up([again, Failure(code, 60)], False)
    assert (
        reason_to_give_up([Failure(code, -1)] * 2, False)
        == "it failed twice before its first step by its own error"
    )


def test_a_mistake_in_the_command_is_not_started_again() -> None:
    assert reason_to_give_up([Failure(USER, -1)], True) == "it ended by an error that you can fix"


@pytest.mark.parametrize("code", [DONE, LOST, KILLED, TERMINATED])
def test_a_rank_that_is_lost_again_and_again(code: int) -> None:
    """It is no error of the job, as long as there is a new step now and then."""
    same = [Failure(code, 40)] * NO_PROGRESS
    assert not reason_to_give_up(same[1:], False)
    assert reason_to_give_up(same, False) == f"it failed {NO_PROGRESS} times without a new step"
    assert not reason_to_give_up([*same[1:], Failure(code, 41)], False)
    assert reason_to_give_up([Failure(code, 50), *same[1:]], False)


def test_hosts_of_a_start() -> None:
    assert choose([N1, N2], None) == (N1, N2)
    assert choose([N1, N2, N3], 5) == (N1, N2, Host("n3", 1))
    assert choose([N1, N2, N3], 4) == (N1, N2)
    assert choose([], 4) == ()


@pytest.mark.parametrize(
    ("running", "ranks", "offered", "chosen", "why"),
    [
        ([N1, N2], 4, [N1, N2], [N1, N2], ""),
        ([N1], 2, [N1, N2], [N1, N2], "2 ranks could be 4"),
        ([N1], 2, [N1, N2], [N1], ""),  # n2 does not answer
        ([N1, N2], 3, [N1, N2], [N1, N2], "3 ranks could be 4"),  # guard.lost=shrink has lost one
        ([N1, N2], 4, [N1], [N1], "n2 is no longer offered"),
        ([N2, N3], 6, [N1], [N1], "n2, n3 are no longer offered"),
        ([N1, N2], 4, [], [], ""),  # fewer than --min: it keeps what it has
        ([N1, Host("n3", 4)], 6, [N1, Host("n3", 1)], [N1, Host("n3", 1)], "3 slots are offered"),
    ],
)
def test_when_the_hosts_of_a_running_job_change(
    running: list[Host], ranks: int, offered: list[Host], chosen: list[Host], why: str
) -> None:
    assert reason_to_change(running, ranks, offered, chosen, least=2) == why


def test_a_host_that_fails_is_left_out_for_a_growing_while() -> None:
    assert [left_out_s(failures, 15) for failures in (1, 2, 3, 6, 7, 99)] == [
        15,
        30,
        60,
        480,
        900,
        900,
    ]
    book = HostBook(15.0)
    book.offer([N1, N2])
    assert (book.unknown(0.0), book.usable()) == (["n1", "n2"], ())
    book.answered("n1")
    assert book.failed("n2", 0.0) == 15
    assert (book.usable(), book.unknown(14.9), book.unknown(15.0)) == ((N1,), [], ["n2"])
    assert book.failed("n2", 20.0) == 30
    book.answered("n2")
    assert book.usable() == (N1, N2)
    book.offer([N1])
    assert book.usable() == (N1,)
    book.offer([N1, N2])
    book.doubt(["n1", "n2"])
    # at once, after a job on it has failed
    assert (book.usable(), book.unknown(21.0)) == (
        (),
        ["n1", "n2"],
    )
    book.worked(["n2"], FORGOTTEN_S - 1)
    assert book.failed("n2", 30.0) == 60
    book.worked(["n2"], FORGOTTEN_S)
    assert book.failed("n2", 100.0) == 15


def out_of_room(*_: object, **options: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.clock  # a host that answers may take five times as long as before, and is asked again
def test_a_host_that_answers_and_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """n1's launcher prints the word and hangs; n2's says nothing the second time: it is lost long
    before answer_s, as it was quick before.

    The login of n4 is slow the first time: the others, which were quick, do not shorten its time.
    """
    words = {
        "n1": "echo answers; sleep 60",
        "n2": "echo answers",
        "n3": "exit 1",
        "n4": f"sleep {SHORTEST_S + 1:g}; echo answers",
    }
    probes = Probes(lambda name: ["sh", "-c", words[name]], 60.0)
    found = dict[str, bool]()
    began_s = time.monotonic()
    probes.ask(["n1", "n2"])
    while probes.are_open:
        found |= probes.poll()
        time.sleep(0.01)
    assert found == {"n1": True, "n2": True}
    words["n2"] = "sleep 60"
    probes.ask(["n2", "n3", "n4"])
    while probes.are_open:
        found |= probes.poll()
        time.sleep(0.01)
    with monkeypatch.context() as full:  # the disk: no host is asked, and none is lost
        full.setattr(tempfile, "TemporaryDirectory", out_of_room)
        probes.ask(["n1"])
        assert (probes.poll(), probes.are_open, probes.error) == (
            {},
            False,
            "No space left on device",
        )
    probes.ask(["n1"])
    while probes.are_open:
        assert probes.poll() in ({}, {"n1": True})
    assert probes.error == ""
    assert (
        found == {"n1": True, "n2": False, "n3": False, "n4": True}
        and SHORTEST_S <= time.monotonic() - began_s < 30
    )


@pytest.mark.parametrize(
    ("job", "lives"),
    [
        ([], False),
        (["guard.lost=shrink"], True),
        (["--guard.lost=restart"], True),
        (["guard.lost=shrink", "guard.lost=stop"], False),
        (["train", "--config", "F"], True),
        (["--config=F", "guard.lost=stop"], False),
        (["--config", "none"], False),
        (["resume=former"], True),
        (["resume=former", "guard.lost=stop"], False),
        (["resume=nowhere"], False),
    ],
)
def test_what_the_words_of_a_job_set(
    job: list[str], lives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (Path("F"), Path("former/config.yaml")):
        path.parent.mkdir(exist_ok=True)
        path.write_text("guard:\n  lost: shrink\n")
    assert (value_of(job, "guard.lost") in ("shrink", "restart")) is lives


def test_what_a_job_tells(tmp_path: Path) -> None:
    def tell(*events: dict[str, object], end: str = "\n") -> None:
        with (tmp_path / "events.jsonl").open("a") as file:
            file.writelines(json.dumps({"time": 1.0, **event}) + end for event in events)

    job = JobEvents(tmp_path)
    job.begin()
    assert (job.ending, job.step, job.ranks, job.trains) == ("", -1, 0, False)
    tell(
        {"kind": "start", "step": 0, "ranks": 4},
        {"kind": "step", "step": 10},
        {"kind": "lost", "step": 10, "left": 3},
    )
    job.poll()
    assert (job.ending, job.step, job.ranks, job.trains) == ("", 10, 3, True)
    tell({"kind": "stop", "step": 20})
    job.begin()
    assert (job.ending, job.step, job.trains) == ("stop", -1, False)
    tell({"kind": "failed", "step": 21, "exit_code": 70})
    job.poll()
    assert (job.ending, job.exit_code) == ("failed", 70)
    job.begin()
    tell({"kind": "step", "step": 7}, end="")
    job.poll()
    assert job.step == -1  # half a line
    # after half a line of a job that was killed
    tell({"kind": "start", "step": 20, "ranks": 2}, {"kind": "end", "step": 30})
    job.poll()
    assert (job.ending, job.step, job.ranks, job.trains) == ("end", 30, 2, False)
    later = JobEvents(tmp_path)
    later.begin()
    assert (later.ending, later.step, later.ranks, later.trains) == ("end", -1, 0, False)


def test_hosts_from_a_program_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell reads what the program is named, or what it prints."""
    program = tmp_path / "hosts; touch stolen"
    program.write_text("#!/bin/sh\necho '# now'\necho n1:2\necho n2:2\n")
    with pytest.raises(UserError, match="(?s)there is no program .*chmod"):
        of_script(program)
    program.chmod(0o755)
    offer = of_script(program)
    assert offer.read() == (N1, N2)
    program.write_text("#!/bin/sh\n")
    assert offer.read() == ()
    program.write_text("#!/bin/sh\necho 'n1;touch stolen'\n")
    with pytest.raises(UserError, match="cannot read the host"):
        offer.read()
    program.write_text("#!/bin/sh\necho no cloud >&2\nexit 3\n")
    with pytest.raises(
        UserError, match="the program ended with 3: no cloud\n  where: --hosts-from"
    ):
        offer.read()
    program.write_text("#!/bin/sh\nexec sleep 100\n")
    monkeypatch.setattr(hosts, "SCRIPT_S", 0.2)
    with pytest.raises(
        UserError, match="the program did not end within 0.2 s\n  where: --hosts-from"
    ):
        offer.read()
    assert not list(tmp_path.glob("stolen")) and not Path("stolen").exists()
    (tmp_path / "F").write_text("n1 slots=2\n")
    assert of_file(tmp_path / "F").read() == (N1,)
    with pytest.raises(UserError, match="cannot read the hosts: .*No such file"):
        of_file(tmp_path / "none").read()


def test_the_record_waits_for_the_run_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    record = Record(run)
    record.add("start", "start 1: 2 ranks", ranks=2)
    assert not run.exists() and capfd.readouterr().err == "hvdtrain launch: start 1: 2 ranks\n"
    run.mkdir()
    (run / "events.jsonl").touch()
    record.add("end", "over")
    kinds = [json.loads(line)["kind"] for line in (run / "launch.jsonl").read_text().splitlines()]
    assert kinds == ["start", "end"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--min", "2", "--", "run=r"], "--min needs --elastic"),
        (["--elastic", "--", "epochs=1"], "the job needs a run folder"),
        (["--elastic", "--", "check", "run=r"], "check runs only once"),
        (
            ["--elastic", "--", "run=r", "resume=no"],
            "resume=no would start the job from the beginning each time",
        ),
        (
            ["--elastic", "--", "--run=r", "--resume=no"],
            "resume=no would start the job from the beginning each time",
        ),
        (
            ["--elastic", "-np", "2", "--", "run=r"],
            "-np is not supported with --elastic\n.*\n  fix: --max 2",
        ),
        (["--elastic", "--slurm", "--", "run=r"], "--slurm is not supported with --elastic"),
        (["--elastic", "--min", "4", "--max", "2", "--", "run=r"], "--min 4 is more than --max 2"),
        (["--elastic", "--min", "0", "--", "run=r"], "--min 0 is not a number of ranks"),
        (
            ["--elastic", "--patience", "soon", "--", "run=r"],
            "'soon' is not a length of time\n  where: --patience",
        ),
        (
            ["--elastic", "-H", "n1", "--hosts-from", "p", "--", "run=r"],
            "more than one option names hosts",
        ),
        (["--elastic", "--hosts-from", "/none", "--", "run=r"], "there is no program /none"),
    ],
)
def test_options_that_do_not_go_together(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        launch(arguments)


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_the_hosts_of_a_batch_job_and_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program(tmp_path / "mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\n")
    for name, value in {
        "PATH": tmp_path,
        "PBS_JOBID": "7",
        "PBS_NODEFILE": tmp_path / "nodes",
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert launch(["--elastic", "--dry-run", "--", "run=r"]) == DONE
    assert " -np 4 -H n1:2,n2:2 " in capsys.readouterr().out
    assert launch(["--help"]) == DONE
    assert capsys.readouterr().out == f"{USAGE}\n" and "\n  --elastic " in USAGE


def test_below_min_after_patience(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No rank is started; the signal handlers are the former ones afterwards. A first look that
    takes longer than the patience is not part of it."""
    program(tmp_path / "hosts", "sleep 1.1; echo localhost slots=1")
    before = signal.getsignal(signal.SIGTERM)
    code = launch(
        [
            "--elastic",
            "--min",
            "2",
            "--patience",
            "1",
            "--hosts-from",
            str(tmp_path / "hosts"),
            "--",
            f"run={tmp_path / 'run'}",
        ]
    )
    assert code == LOST and signal.getsignal(signal.SIGTERM) is before
    told = capfd.readouterr().err.splitlines()
    assert told == [
        "hvdtrain launch: 1 slots, at least 2 are needed: waits for up to 1 s",
        "hvdtrain launch: 1 slots for 1 s, at least 2 are needed: given up, exit code 84; the "
        "same command resumes the job",
    ]
    assert os.listdir(tmp_path) == ["hosts"]


def test_a_launcher_that_does_not_end_after_the_jobs_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job says that it stopped, as at its time limit; SIGTERM does not end its launcher."""
    events = [
        {"time": 1.0, "kind": "start", "step": 0, "ranks": 1},
        {"time": 2.0, "kind": "step", "step": 10},
    ]
    events.append({"time": 3.0, "kind": "stop", "step": 10})
    program = f"""
import json, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path({str(tmp_path / "run" / "events.jsonl")!r}).write_text({"".join(json.dumps(event) + chr(10) for event in events)!r})
time.sleep(2000)
"""  # noqa: E501
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(supervisor, "OVER_S", 0.5)
    limits = supervisor.Limits(1, None, 5.0, 1.0, 5.0)
    found = supervisor.Supervisor(
        tmp_path / "run",
        this_machine(1),
        limits,
        lambda hosts: LauncherRun([sys.executable, "-c", program]),
        lambda host: [],
    )
    assert found.run() == REQUEUE
    told = [
        json.loads(line) for line in (tmp_path / "run" / "launch.jsonl").read_text().splitlines()
    ]
    assert any(
        "its launcher did not exit within 0.5 s and is killed" in line["text"] for line in told
    ), told


def test_a_job_that_ends_before_its_first_step_by_a_mistake_in_its_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    limits = supervisor.Limits(1, None, 5.0, 1.0, 5.0)
    command = [sys.executable, "-c", f"raise SystemExit({USER})"]
    found = supervisor.Supervisor(
        tmp_path / "run",
        this_machine(1),
        limits,
        lambda hosts: LauncherRun(command),
        lambda host: [],
    )
    assert found.run() == USER
    said = (
        "the launcher ended with 2, before its first step: not started again, it ended by an "
        "error that you can fix"
    )
    assert capfd.readouterr().err.splitlines()[1:] == [f"hvdtrain launch: {said}"]


def launched(arguments: Sequence[str], folder: Path) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `launch ARGUMENTS` in a folder."""
    preset = ("PRTE_MCA_rmaps", "PRTE_MCA_hwloc")
    env = {name: value for name, value in environment().items() if not name.startswith(preset)}
    code = "from hvdtrain.extras.launch.command import launch; sys.exit(launch(sys.argv[1:]))"
    done = subprocess.run(
        [
            "timeout",
            "-k",
            "5",
            str(HANG_S),
            sys.executable,
            "-c",
            f"import sys; {code}",
            *arguments,
        ],
        capture_output=True,
        text=True,
        env=env | {"PYTHONPATH": str(ROOT)},
        cwd=folder,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@needs_mpirun
def test_a_script_without_a_run_folder_is_started_again_by_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "back.py").write_text(COMES_BACK)
    code, out, err = launched(["--elastic", "--max", "2", "--", "back.py", "first"], tmp_path)
    assert code == 0, err
    assert out.count("start of 0") >= 1 and out.count("start of 1") == 2
    assert (
        "hvdtrain launch: start 2: 2 ranks" in err
        and "its hosts answer, so it is started again" in err
    )
    code, _, err = launched(
        ["--elastic", "--max", "2", "--", "back.py", "first", "wrong"], tmp_path
    )
    assert code == 1 and "it failed twice before its first step by its own error" in err
    assert err.count("ValueError: again and again") == 2


@needs_mpirun
def test_the_example_for_kubernetes_is_a_command_of_launch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fields as in the operator's types.go, options as launch reads them, hosts as the operator
    writes them: no Kubernetes is here."""
    job = yaml.safe_load((ROOT / "jobs" / "mpijob.yaml").read_text())
    container = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    python, m, package, command, *arguments = container["command"] + container["args"]
    assert (python, m, package, command, job["spec"]["slotsPerWorker"]) == (
        "python3",
        "-m",
        "hvdtrain",
        "launch",
        1,
    )
    assert job["apiVersion"] == "kubeflow.org/v2beta1" and job["spec"].keys() <= {
        "slotsPerWorker",
        "runPolicy",
        "mpiReplicaSpecs",
    }
    assert (
        job["spec"]["runPolicy"].keys() <= {"cleanPodPolicy", "backoffLimit"}
        and job["spec"]["runPolicy"]["cleanPodPolicy"] == "Running"
    )
    assert all(
        spec["restartPolicy"] == "OnFailure" for spec in job["spec"]["mpiReplicaSpecs"].values()
    )
    workers = [f"hvdtrain-worker-{number}.hvdtrain.default.svc" for number in range(2)]
    arguments[arguments.index("/etc/mpi/discover_hosts.sh")] = program(
        tmp_path / "hosts", "\n".join(f"echo {name}" for name in workers)
    )
    assert (
        launch(
            [*arguments[: arguments.index("--")], "--dry-run", *arguments[arguments.index("--") :]]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert (
        "-np 2" in said
        and f"-H {workers[0]}:1,{workers[1]}:1" in said
        and said.endswith("--config /shared/job.yaml\n")
    ), said
