"""Pythons that begin with torch imported: they do what `python ARGUMENTS` does, and end with who
asked for them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from ranks import Job, environment, python
from waiting import wait_until
from warm import command, forks

SHOW = """
import atexit, json, os, signal, sys
env = {name: value for name, value in os.environ.items() if name not in ("TMPDIR", "HVDTRAIN_TEST_WARM")}
main = sys.modules["__main__"]
print(json.dumps([sys.argv, sys.path, os.getcwd(), env, __name__, main.__dict__.get("__file__"), sys.orig_argv[1:]]))
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, sys.stdout.line_buffering, sys.stdin.read() == "")
atexit.register(print, "the end")
"""  # noqa: E501


@pytest.mark.parametrize("how", ["-m", "-c", "script.py"])
def test_arguments_paths_and_environment_are_those_of_python(how: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SHOW)
    argv = {
        "-m": ["-m", "script", "1"],
        "-c": ["-c", SHOW, "2"],
        "script.py": [str(tmp_path / "script.py"), "3"],
    }[how]
    env = {"PYTHONPATH": os.pathsep.join([".", str(tmp_path)]), "A_WORD": "\udcff of bytes"}
    forked, started = (python(argv, env=env, is_warm=is_warm) for is_warm in (True, False))
    assert forked.returncode == 0 and forked.stdout.endswith("the end\n") and forked.stderr == ""
    assert forked.stdout == started.stdout


@pytest.mark.parametrize(
    "code",
    [
        "1 / 0",
        "import sys; sys.exit()",
        "import sys; sys.exit(7)",
        "import sys; sys.exit('why')",
        "import os; os._exit(5)",
        "import os; os.kill(os.getpid(), 15)",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.abort()",
        "syntax error",
        "import threading; threading.Timer(0.1, print, ['late']).start()",
    ],
)
def test_ends_are_those_of_python(code: str) -> None:
    forked, started = (python(["-c", code], is_warm=is_warm) for is_warm in (True, False))
    assert forked[:3] == started[:3]


def test_torch_is_there_already_but_nothing_else_of_a_job() -> None:
    names = ("hvdtrain", "torchvision", "mpi4py", "warm")
    code = (
        "import sys, torch; print([name for name in sys.modules if name.partition('.')[0] in "
        f"{names}])"
    )
    assert python(["-c", code]).stdout == python(["-c", code], is_warm=False).stdout
    assert python(["-c", "import sys; print('torch' in sys.modules)"]).stdout == "True\n"
    env = environment({"OMP_NUM_THREADS": "2"})
    assert command(["-c", code], env) == [sys.executable, "-c", code], (
        "torch reads it when it is imported"
    )


WAITS = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: (print("heard", flush=True), sys.exit(3)))
print("there", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("kills", ["client", "fork"])
def test_who_is_killed_takes_the_other_along(kills: str) -> None:
    with Job(0, ["-c", WAITS], is_warm=True) as job:
        wait_until(lambda: "there" in job.output(), "it starts")
        ((fork, client),) = (
            (fork, client) for fork, client in forks().items() if fork in job.processes()
        )
        os.kill(client if kills == "client" else fork, signal.SIGKILL)
        assert job.wait().returncode == -signal.SIGKILL
        wait_until(lambda: not job.processes(), "both have ended")


def test_a_signal_is_passed_on() -> None:
    with Job(0, ["-c", WAITS], is_warm=True) as job:
        wait_until(lambda: "there" in job.output(), "it starts")
        ((_, client),) = (
            (fork, client) for fork, client in forks().items() if fork in job.processes()
        )
        os.kill(client, signal.SIGUSR1)
        result = job.wait()
        assert result.returncode == 3 and result.stdout == "there\nheard\n"
