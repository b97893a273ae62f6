"""A process that does not outlive the one that starts it."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from ranks import HANG_S
from waiting import wait_until

from hvdtrain.core import ends_with_parent
from hvdtrain.core.process import start_child

PARENT = """
import os, signal, sys
from hvdtrain.core.process import start_child
# one write a line: with PYTHONUNBUFFERED print() writes the end of a line by itself
command = [sys.executable, "-c", "import os, time; os.write(1, b'runs\\\\n'); time.sleep(2000)"]
child = start_child(command, os.environ, signal.SIGTERM, new_session=True)
os.write(1, b"%d\\n" % child.pid)
child.wait()
"""


def test_it_ends_when_its_parent_is_killed():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    ) as parent:
        lines = {parent.stdout.readline(), parent.stdout.readline()} - {"runs\n"}
        (pid,) = (int(line) for line in lines)
        parent.kill()
        parent.stdout.read()  # to its end: the child holds it open if it lives
    with contextlib.suppress(
        FileNotFoundError
    ):  # nobody may have waited for it: a zombie then, soon after its files are closed
        wait_until(
            lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z"),
            "the end of the child",
        )


def test_it_may_be_started_beside_threads_and_stands_as_a_shell_would_start_it(tmp_path):
    waits = threading.Event()
    threads = [threading.Thread(target=waits.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    program = (
        "import os, sys; print(open('/proc/self/status').read(), os.environ['WORD'], sys.argv[1], "
        "sys.stdin.read())"
    )
    shell = subprocess.run(
        [sys.executable, "-c", program, "a b"],
        env={**os.environ, "WORD": "w"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=True,
    )
    with (tmp_path / "log").open("wb") as log:
        child = start_child(
            [sys.executable, "-c", program, "a b"],
            {**os.environ, "WORD": "w"},
            signal.SIGTERM,
            output=log,
        )
    assert child.wait(HANG_S) == 0
    waits.set()
    told = (tmp_path / "log").read_text()
    assert told.endswith(" w a b \n")
    # not SigQ, which counts the signals of all processes of this user
    masks = (
        "SigBlk",
        "SigIgn",
        "SigCgt",
    )
    signals = [
        [line for line in text.splitlines() if line.startswith(masks)]
        for text in (told, shell.stdout.decode())
    ]
    assert signals[0] == signals[1] and len(signals[0]) == 3


def test_a_command_that_is_not_there_is_named(capfd):
    assert (
        start_child(["/nowhere/mpirun", "-np", "2"], os.environ, signal.SIGTERM).wait(HANG_S) == 127
    )
    assert capfd.readouterr().err == "/nowhere/mpirun: No such file or directory\n"


def test_nothing_runs_where_the_parent_has_ended(tmp_path):
    program = Path(ends_with_parent.__file__)
    ended = subprocess.run(
        [sys.executable, "-I", "-S", program, "1", "9", "touch", str(tmp_path / "ran")], check=False
    )
    assert ended.returncode == 128 + 9 and not (tmp_path / "ran").exists()
