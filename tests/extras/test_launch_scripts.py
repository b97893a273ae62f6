"""`launch -- script.py` and `launch -- program`: tagged lines, log files, one traceback, exit
codes, Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from ranks import HANG_S, ROOT, environment, needs_mpirun

from hvdtrain.comm.launcher_variables import Placement
from hvdtrain.errors import STALLED, UserError
from hvdtrain.extras.launch.rank import LONGEST, TaggedLines, log_of, set_torch_variables

LAUNCH = [
    sys.executable,
    "-c",
    "import sys; from hvdtrain.extras.launch.command import launch; sys.exit(launch(sys.argv[1:]))",
]
TALKS = """
import os, pathlib, sys
import beside

assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals()
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
print("words", *sys.argv[1:], beside.VALUE, pathlib.Path(__file__).name)
print("an error", rank, file=sys.stderr)
for number in range(200):
    print(f"rank {rank} line {number:4} " + "x" * 80)
print("50 %", end="\\r")
print("100 %", end="\\r\\n")
os.system("echo from a child")
print("no end", end="")
"""
FAILS = """
import sys, time
from mpi4py import MPI

def learn(rank):
    if rank == 1 or sys.argv[1] != "one":
        raise ValueError(f"no more on {rank}")

rank = MPI.COMM_WORLD.rank
if rank == 0 and sys.argv[1] == "slow":
    sys.excepthook = lambda *error: (sys.__excepthook__(*error), time.sleep(4))
MPI.COMM_WORLD.Barrier()
learn(rank)
MPI.COMM_WORLD.allreduce(rank)  # never ends without rank 1
"""
LEAVES = """
import sys, time
from mpi4py import MPI

if MPI.COMM_WORLD.rank == 1:
    sys.exit(7)
MPI.COMM_WORLD.recv(source=1)
"""
WAITS = """
import os, time

print("ready", flush=True)
try:
    time.sleep(2000)
except KeyboardInterrupt:
    print("stopped in order")
    raise
"""
HANGS = """
import sys, time
from mpi4py import MPI

def step(rank):
    MPI.COMM_WORLD.recv(source=0)  # no rank sends that

print("ready", flush=True)
time.sleep(2000) if MPI.COMM_WORLD.rank == 0 else step(1)
"""
STALLS = """
import sys, time

import torch
import hvdtrain as ht

ctx = ht.init("comm.engine=mpi", "guard.stall_s=3", "log.every_steps=1")
net = torch.nn.Linear(1, 1)
model, optimizer = ctx.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
for batch in ctx.samples({"x": torch.ones(9, 1)}, batch=3):
    if batch.step == 1 and ctx.rank == 1:
        time.sleep(2000)  # a rank that does not come
    ctx.backward(model(batch["x"]).mean())
    optimizer.step()
    ctx.should_stop
"""


def test_pieces_become_whole_lines() -> None:
    pieces = [b"a", b"b\nc\r", b"\nd\re", b"", b"\r", b"\n\nf"]
    lines = TaggedLines(b"[3] ")
    assert [lines.take(piece) for piece in pieces] == [
        b"",
        b"[3] ab\n",
        b"[3] c\r\n[3] d\r",
        b"",
        b"",
        b"[3] e\r\n[3] \n",
    ]
    assert lines.has_rest and lines.flush() == b"[3] f" and not lines.has_rest
    assert lines.take(b"g\nh") == b"g\n" and lines.end() == b"[3] h\n"
    assert TaggedLines(b"").end() == b""
    long = b"y" * (LONGEST + 1)
    assert lines.take(long) == b"[3] " + long and lines.take(b"z\nz\n") == b"z\n[3] z\n"


def test_a_log_file_is_never_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match=r"rank-0.log is a link, not a file\n  where: --logs "):
        log_of(str(tmp_path), 0)
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError,
        match=r"cannot write rank-1.log: .*\n  where: --logs .*\n  fix: a folder that each host "
        r"may write to",
    ):
        log_of(str(tmp_path / "file"), 1)


@contextlib.contextmanager
def started(arguments: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """`launch ARGUMENTS` in a folder; its processes end with the block."""
    env = {
        name: value
        for name, value in environment().items()
        if not name.startswith(("PRTE_MCA_rmaps", "PRTE_MCA_hwloc"))
    }
    env["PYTHONPATH"] = str(ROOT)
    process = subprocess.Popen(
        ["timeout", "-k", "5", str(HANG_S), *LAUNCH, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd=folder,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def run_launch(arguments: Sequence[str], folder: Path) -> tuple[int, str, str]:
    """Exit code, standard output, standard error without launch's own first line."""
    with started(arguments, folder) as process:
        out, err = process.communicate()
        return process.returncode, out, err.partition("\n")[2]


def variables_of_torch(
    place: Placement, environ: dict[str, str], hosts: str | None, port: str | None = "21000"
) -> dict[str, str]:
    set_torch_variables(place, environ, hosts, port)
    return environ


def test_scripts_get_the_variables_of_torchrun() -> None:
    """rank 5 of 4 + 2 on two hosts; values that the user has set stay, or are refused."""
    place = Placement(5, 6, 1, 2, "Hydra's mpiexec")
    hosts = "n1:4,n2:2"
    found = variables_of_torch(place, {}, hosts)
    assert found == {
        **{
            "RANK": "5",
            "WORLD_SIZE": "6",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "1",
            "GROUP_WORLD_SIZE": "2",
        },
        **{"ROLE_RANK": "5", "ROLE_WORLD_SIZE": "6", "ROLE_NAME": "default"},
        **{"MASTER_ADDR": "n1", "MASTER_PORT": "21000", "HVDTRAIN_LAUNCH": "1"},
    }
    cyclic = variables_of_torch(Placement(2, 6, 1, 4, "Hydra's mpiexec"), {}, hosts)
    assert "GROUP_RANK" not in cyclic and cyclic["MASTER_ADDR"] == "n1"
    one_host = variables_of_torch(Placement(1, 2, 1, 2, "Hydra's mpiexec"), {}, None)
    assert (one_host["MASTER_ADDR"], one_host["GROUP_RANK"], one_host["GROUP_WORLD_SIZE"]) == (
        "127.0.0.1",
        "0",
        "1",
    )
    step = {"SLURM_STEP_NODELIST": "n[4-5]", "SLURM_NODEID": "1"}
    srun = variables_of_torch(Placement(5, 6, 1, 2, "srun"), step, None)
    assert (srun["MASTER_ADDR"], srun["GROUP_RANK"], srun["GROUP_WORLD_SIZE"]) == ("n4", "1", "2")
    user = variables_of_torch(place, {"MASTER_ADDR": "n9", "MASTER_PORT": "5", "RANK": "5"}, hosts)
    assert (user["MASTER_ADDR"], user["MASTER_PORT"]) == ("n9", "5")
    with pytest.raises(
        UserError,
        match=r"LOCAL_RANK=3 is set, but .* 5 of 6, which should have LOCAL_RANK=1\n.*\n"
        r"  fix: unset LOCAL_RANK",
    ):
        variables_of_torch(place, {"LOCAL_RANK": "3"}, hosts)


@needs_mpirun
def test_a_script_of_torch_distributed_meets(tmp_path: Path) -> None:
    meets = (
        "import torch.distributed as d; d.init_process_group('gloo'); print(d.get_rank(), "
        "d.get_world_size())"
    )
    (tmp_path / "meets.py").write_text(meets)
    code, out, err = run_launch(["-np", "2", "--", "python", "meets.py"], tmp_path)
    assert code == 0 and sorted(out.splitlines()) == ["[0] 0 2", "[1] 1 2"], err


@needs_mpirun
def test_lines_have_the_rank_and_logs_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "talks.py").write_text(TALKS)
    (tmp_path / "inner" / "beside.py").write_text("VALUE = 42\n")
    code, out, err = run_launch(
        [
            *("-np", "3", "--logs", "logs", "--bind", "numa", "--"),
            *("inner/talks.py", "a b", "$(touch stolen)", "-np"),
        ],
        tmp_path,
    )
    assert code == 0, err
    cores = len(os.sched_getaffinity(0))
    bound = f"not bound: 3 ranks share {cores} core" if cores < 3 else "rank 0 on cores"
    assert "hvdtrain launch: comm.bind=numa: " in err and bound in err
    lines = out.split("\n")
    for rank in range(3):
        own = [line.removeprefix(f"[{rank}] ") for line in lines if line.startswith(f"[{rank}] ")]
        expected = [
            "words a b $(touch stolen) -np 42 talks.py",
            *(f"rank {rank} line {number:4} " + "x" * 80 for number in range(200)),
        ]
        assert [line for line in own if line[:4] in ("word", "rank")] == expected
        assert own[-1] == "no end" and "from a child" in own
        assert f"[{rank}] an error {rank}" in err
        log = (tmp_path / "logs" / f"rank-{rank}.log").read_bytes().decode()
        error = f"an error {rank}\n"  # anywhere: it has a pipe of its own
        assert error in log and log.replace(error, "") == "\n".join(
            [*expected, "50 %\r100 %\r", "from a child", "no end"]
        )
    assert sorted(os.listdir(tmp_path)) == ["inner", "logs"]  # no shell has seen the words


@needs_mpirun
@pytest.mark.parametrize(
    ("which", "rank"),
    # the other ranks wait 1.5 s for what rank 0 says
    [
        ("one", 1),
        pytest.param("all", 0, marks=pytest.mark.clock),
        pytest.param("slow", 0, marks=pytest.mark.clock),
    ],
)
def test_the_rank_that_fails_first_has_the_only_traceback(
    tmp_path: Path, which: str, rank: int
) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    code, out, err = run_launch(["-np", "3", "--", "fails.py", which], tmp_path)
    assert code == 1 and out == ""
    assert err.count("Traceback (most recent call last)") == 1
    told = re.findall(rf"^\[{rank}\] (.*)", err, re.MULTILINE)
    assert told[0].startswith("Traceback") and f"ValueError: no more on {rank}" in told, err
    assert [line.strip().split(", ")[1:] for line in told if line.startswith("  File")] == [
        ["line 13", "in <module>"],
        ["line 7", "in learn"],
    ]
    assert (
        re.fullmatch(rf"rank {rank} on .*: the error above ends the script", told[-1]) or rank == 0
    )


@needs_mpirun
@pytest.mark.slow
def test_a_rank_that_leaves_with_a_code_ends_those_that_wait_for_it(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    code, _, err = run_launch(["-np", "2", "--", "python", "leaves.py"], tmp_path)
    assert code == 7, err
    assert "Traceback" not in err


@needs_mpirun
def test_a_program_is_run_as_it_is(tmp_path: Path) -> None:
    code, out, _ = run_launch(
        ["-np", "2", "--", "sh", "-c", 'echo "$0"; sleep 1; exit 5', "$(touch stolen)"], tmp_path
    )
    assert code == 5 and sorted(out.split("\n"))[1:] == [
        "[0] $(touch stolen)",
        "[1] $(touch stolen)",
    ]
    code, out, _ = run_launch(
        [
            "-np",
            "1",
            "--plain",
            "--",
            sys.executable,
            "-c",
            "import os; print(os.getppid() > 1, 'ö')",
        ],
        tmp_path,
    )
    assert (code, out) == (0, "True ö\n")
    assert os.listdir(tmp_path) == []


@needs_mpirun
def test_control_c_is_a_keyboard_interrupt_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    with started(["-np", "2", "--", "waits.py"], tmp_path) as process:
        assert process.stdout and process.stderr
        assert sorted(process.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
        launcher = int(
            subprocess.run(
                ["ps", "-o", "pid=", "--ppid", str(process.pid)],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        os.kill(launcher, signal.SIGINT)
        out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, err
    assert sorted(out.split()[1::4]) == ["stopped", "stopped"], out
    assert "hvdtrain launch: stopping; again to kill" in err and "Traceback" not in err


@needs_mpirun
@pytest.mark.slow
def test_a_rank_that_hangs_in_mpi_shows_its_calls_where_it_is_asked_to_stop(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    with started(["-np", "2", "--", "hangs.py"], tmp_path) as process:
        assert process.stdout
        assert sorted(process.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
        launcher = int(
            subprocess.run(
                ["ps", "-o", "pid=", "--ppid", str(process.pid)],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        os.kill(launcher, signal.SIGINT)
        _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, err
    lines = [line for line in err.splitlines() if line.startswith("[1] ")]
    assert lines[:1] == ["[1] hvdtrain launch: not ended 3 s after the request to stop"], err
    assert lines[2].endswith('hangs.py", line 6 in step') and lines[3].endswith(
        'hangs.py", line 9 in <module>'
    ), err


@needs_mpirun
@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "stalls.py").write_text(STALLS)
    code, _, err = run_launch(["-np", "2", "--", "stalls.py"], tmp_path)
    assert code == STALLED, err
    assert "no progress for 3 s (guard.stall_s); the job ends with exit code 81" in err
    line = r"\[0\]     stalls.py:12 in <module>: time.sleep\(2000\)  # a rank that does not come"
    assert re.search(
        rf"\[0\] behind:\n\[0\]   rank 1 on .*: step, epoch 0, step 1, for .*\n{line}\n\[0\] "
        r"waiting: rank 0",
        err,
    ), err
