"""hvdtrain lab: its options and folders, what it refuses, and what is left after Ctrl-C."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import HANG_S, ROOT, environment, python
from waiting import wait_until

from hvdtrain.__main__ import main
from hvdtrain.errors import DONE, USER, UserError
from hvdtrain.extras.lab import command as lab_module
from hvdtrain.extras.lab.command import STAMP, Parser, lab, run_lab, take_folder

LAB_2 = str(ROOT / "labs/2-from-one-process-to-horovod/lab.py")


def ran(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, list[argparse.Namespace]]:
    """Exit code of a lab 2 that does nothing, with these words, and the options that it got."""
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(sys, "argv", ["lab.py", *words])
    with pytest.raises(SystemExit) as exit_:
        run_lab(seen.append, Parser(LAB_2, "Lab 2: ...", quick="less"))
    return int(exit_.value.code or 0), seen


def test_a_quick_run_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, folder in (
        ((), "lab-2"),
        (("--quick",), "lab-2-quick"),
        (("--out=x",), "x"),
        (("--quick", "--out", "y"), "y"),
    ):
        for _ in range(2):
            code, (options,) = ran(monkeypatch, *words)
            assert (code, options.out, (tmp_path / folder / STAMP).exists()) == (
                DONE,
                Path(folder),
                True,
            )


def test_a_folder_that_cannot_be_taken_is_three_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    cases = {
        str(tmp_path / "file"): ("cannot write in {}: File exists", "a folder that can be written"),
        "/proc/none": (
            "cannot write in {}: No such file or directory",
            "a folder that can be written",
        ),
        str(tmp_path / "mine"): (
            "{} contains other files, and no lab.json: thesis.tex",
            "another --out, or remove that folder",
        ),
    }
    for out, (what, fix) in cases.items():
        assert ran(monkeypatch, "--out", out) == (USER, [])
        lines = capsys.readouterr().err.splitlines()
        assert (
            lines[0] == f"hvdtrain: {what.format(out)}"
            and lines[2] == f"  fix: {fix}"
            and len(lines) == 3
        )


def test_where_the_data_is_does_not_make_another_lab(tmp_path: Path) -> None:
    take_folder(tmp_path / "a", {"lab": "3", "quick": False})
    assert json.loads((tmp_path / "a" / STAMP).read_text()) == {"lab": "3", "quick": False}
    with pytest.raises(
        UserError, match='contains another run of a lab: {"lab": "3", "quick": false}'
    ):
        take_folder(tmp_path / "a", {"lab": "3", "quick": True})


def test_an_unknown_option_and_an_error_of_the_lab_have_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ran(monkeypatch, "--bogus") == (USER, [])
    assert capsys.readouterr().err.startswith(
        "hvdtrain: unrecognized arguments: --bogus\n  where: command line of lab 2\n  fix: "
        "hvdtrain lab 2 --h"
    )

    def fails(options: argparse.Namespace) -> None:
        raise UserError("no data", "there", "get it")

    monkeypatch.setattr(sys, "argv", ["lab.py"])
    with pytest.raises(SystemExit, match=f"^{USER}$"):
        run_lab(fails, Parser(LAB_2, None, quick=""))
    assert capsys.readouterr().err == "hvdtrain: no data\n  where: there\n  fix: get it\n"


def test_the_help_of_a_lab_has_its_own_options(capfd: pytest.CaptureFixture[str]) -> None:
    for number, option in (("2", "--hosts"), ("3", "--data-root")):
        assert lab([number, "--help"]) == DONE
        shown = capfd.readouterr().out
        assert (
            option in shown
            and "--quick" in shown
            and f"lab-{number}-quick" in shown
            and "--notebook FILE.ipynb" in shown
        )
    assert main(["lab", "--help"]) == DONE
    assert "all options of that lab" in capfd.readouterr().out


def test_the_list_has_every_lab_and_the_assessment(capsys: pytest.CaptureFixture[str]) -> None:
    assert lab([]) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert [line[0] for line in lines[::2]] == [*"12345678-"] and all(
        Path(line.strip()).is_file() for line in lines[1::2]
    )
    assert lines[-2:] == ["-  The assessment", f"   {ROOT / 'labs' / 'assessment' / 'README.md'}"]


def test_a_notebook_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a=b.ipynb"
    assert lab(["1", f"--notebook={path}"]) == DONE
    assert (
        capsys.readouterr().out
        == f"notebook: {path}\nopen it:  jupyter lab {shlex.quote(str(path))}\n"
    )
    before = path.read_bytes()
    for words in ([f"--notebook={path}"], ["--notebook", str(path)]):
        with pytest.raises(UserError, match=r"a=b\.ipynb already exists") as refused:
            lab(["1", *words])
        assert refused.value.fix == "another name; or remove it" and path.read_bytes() == before
    for words in (
        ["--notebook"],
        ["--quick", "--notebook=x.ipynb"],
        ["--notebook=x", "y.ipynb"],
        ["--notebook=x.txt"],
    ):
        with pytest.raises(UserError, match="--notebook takes a file, and no other option"):
            lab(["1", *words])


def test_the_end_of_a_log_is_shown_where_a_job_fails(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text("of the first start\n")
    program = (
        "import runs, sys; from pathlib import Path; runs.start([[sys.executable, '-c', "
        "sys.argv[1]]], Path(sys.argv[2]), 'the job')"
    )
    command = "print('\\n'.join(f'line {n}' for n in range(30))); raise SystemExit(7)"
    done = python(["-c", program, command, str(log)], env={"PYTHONPATH": f"{ROOT / 'labs'}:{ROOT}"})
    assert (
        "runs.start" not in done.stdout
        and "the job ended with code 7; its log ends with\n  | line 18\n" in done.stderr
    )
    assert f"  | line 29\n  where: {log}\n" in done.stderr


def group(leader: int) -> list[str]:
    """Commands of the processes of a process group that are alive."""
    shown = subprocess.run(
        ["ps", "-eo", "pgid=,stat=,args="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(maxsplit=2) for line in shown.splitlines()]
    return [row[2] for row in rows if row[0] == str(leader) and not row[1].startswith("Z")]


@pytest.mark.parametrize("in_a_job", [False, True])
def test_nothing_is_left_after_an_interrupt(in_a_job: bool, tmp_path: Path) -> None:
    """Lab 3, which trains in processes of its own, while they start or train; as a terminal sends
    it, to the whole process group."""
    command = [
        sys.executable,
        "-m",
        "hvdtrain",
        "lab",
        "3",
        "--quick",
        "--out",
        str(tmp_path / "out"),
    ]
    with subprocess.Popen(
        command,
        process_group=0,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as started:
        try:

            def has_begun() -> bool:
                """4: the command, lab.py, and at least one of its workers and their resource
                tracker."""
                assert started.poll() is None
                return len(group(started.pid)) >= 4 and (
                    not in_a_job or bool(list(tmp_path.glob("out/*/events.jsonl")))
                )

            wait_until(has_begun, "a process that trains")
            os.killpg(started.pid, signal.SIGINT)
            _, errors = started.communicate(timeout=HANG_S)
            assert (started.returncode, errors) == (
                130,
                "hvdtrain lab 3: interrupted; the same command finishes it\n",
            )
            # each has closed its output before it is gone
            wait_until(lambda: not group(started.pid), "the end of all processes")
        finally:
            if group(started.pid):
                os.killpg(started.pid, signal.SIGKILL)


def test_an_interrupt_while_processes_start_is_not_lost() -> None:
    """They must be the only ones that are deaf to it."""
    program = """
import multiprocessing, os, runs, signal, time
os.setpgid(0, 0)
submit = runs.ProcessPoolExecutor.submit

def submit_late(*words):
    os.killpg(0, signal.SIGINT)  # before the first process starts, and between two
    future = submit(*words)
    os.killpg(0, signal.SIGINT)
    return future

runs.ProcessPoolExecutor.submit = submit_late
try:
    runs.side_by_side(time.sleep, [2000, 2000])
except KeyboardInterrupt:
    print("ended", *multiprocessing.active_children())
"""
    done = python(["-c", program], env={"PYTHONPATH": f"{ROOT / 'labs'}:{ROOT}"})
    assert (done.stdout, done.stderr) == ("ended\n", "")


def test_a_process_that_does_not_end_after_an_interrupt_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab_module, "KILL_S", 0.3)
    deaf = (
        "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; print('deaf', "
        "flush=True); time.sleep(2000)"
    )
    with (tmp_path / "log").open("wb") as log:
        process = lab_module.start_process([sys.executable, "-c", deaf], log)
    wait_until(lambda: "deaf" in (tmp_path / "log").read_text(), "the word of the process")
    process.wait, wait = lambda *_: os.kill(os.getpid(), signal.SIGINT), process.wait  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        lab_module.wait_for([process], patience_s=0.3)
    assert wait(HANG_S) == -signal.SIGKILL
