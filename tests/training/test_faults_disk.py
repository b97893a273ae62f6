"""Checkpoints on a bad disk: a kill between any two calls, damaged files, no space. The newest good checkpoint is always there."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from random import Random

import pytest
from faults import ENV, LIMIT_S, Command, Row, events, gone, launcher, newest, outcome, record, straight, wait_for
from ranks import Job, environment, mpirun_path, needs_horovod, needs_mpirun, python

from hvdtrain.errors import DONE, USER

pytestmark = pytest.mark.faults
FILES = ("weights.safetensors", "optimizer.safetensors", "progress.json", "SHA256SUMS")
NUMPY = Command("mpi", 2, ("checkpoint.keep_last=20",), framework="numpy")


def test_a_kill_before_any_call_of_a_write_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    start = time.monotonic()
    result = python(["tests/support/killed_at.py", str(tmp_path)], timeout_s=240, env=ENV)
    assert result.returncode == 0, result
    trials = [json.loads(line) for line in result.stdout.splitlines()]
    wrong = [t for t in trials if (t["code"], t["equal"], t["starts"]) != (DONE, True, [t["good"]]) or t["good"] < 4]
    wrong += [t for t in trials if t["left"] != ["step-00000012"] and t["good"] < 12]  # the next checkpoint removes what is left
    assert not wrong
    calls = {t["begin"]: t["calls"] for t in trials if not t["killed"]}
    assert len(trials) == 13 + len(calls["new"]) + len(calls["stopped"]) > 90
    assert calls["whole"][0] == "mkdir .step-00000012.unfinished"
    on_the_disk_before_the_rename(calls["new"])
    numbers = json.loads((tmp_path / "straight" / "checkpoints" / "step-00000012" / FILES[2]).read_text())
    assert numbers["train_state"]["evaluated"] == 12  # the one at an epoch's end is written after its evaluation, which keep_best goes by
    seconds = (time.monotonic() - start) / len(trials)
    record(
        Row("single", 1, f"SIGKILL before each of {len(trials) - 3} calls of a checkpoint", [seconds] * (len(trials) - 3), 4, True, [-9])
    )


def on_the_disk_before_the_rename(calls: list[str]) -> None:
    """What a loss of power would need: each file after its last byte, then their folder, the rename, and the folder above."""
    order = [calls.index(f"close {name}") for name in FILES[2:]] + [calls.index(f"chmod {name}") for name in FILES[:2]]
    synced = [calls.index(f"fsync {name}") for name in FILES]
    rest = [calls.index(call) for call in ("fsync .step-00000008.unfinished", "rename .step-00000008.unfinished", "fsync checkpoints")]
    removed = calls.index("rename step-00000004")
    assert max(order) < min(synced) and max(synced) < rest[0] < rest[1] < rest[2] < removed, calls


DAMAGES = list(product(FILES, ("a bit", "its end", "all")))


def damage(path: Path, how: str, random: Random) -> None:
    whole = bytearray(path.read_bytes())
    place = random.randrange(len(whole))
    if how == "a bit":
        whole[place] ^= 1 << random.randrange(8)
        path.write_bytes(whole)
    elif how == "its end":
        os.truncate(path, place)
    else:
        path.unlink()


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(NUMPY, id="mpi-2", marks=needs_mpirun),
        pytest.param(Command("horovod", 2, ("checkpoint.keep_last=20",)), id="horovod-2", marks=[needs_mpirun, needs_horovod]),
    ],
)
def test_damaged_checkpoints_are_named_and_skipped(tmp_path: Path, command: Command) -> None:
    """Twelve checkpoints one after the other, each damaged in another way; the one before them is used."""
    run, random = tmp_path / "run", Random(7)
    with command.start(run) as job:
        wait_for(job, lambda: newest(run) >= 150)
        os.kill(launcher(job), signal.SIGKILL)
        gone(job, time.monotonic())
    folders = sorted((run / "checkpoints").glob("step-*"))[-len(DAMAGES) :]
    for folder, (name, how) in zip(folders, DAMAGES, strict=True):
        damage(folder / name, how, random)
    result = command.finish(run)
    skipped = re.findall(r"damaged (step-\d+) is skipped: ([^:]+): (.+)", result.stdout)
    assert [step for step, _, _ in skipped] == [folder.name for folder in reversed(folders)], result.stdout
    wrong = [(found, file) for found, (file, _) in zip(skipped, reversed(DAMAGES), strict=True) if file not in (found[1], "SHA256SUMS")]
    assert not wrong
    last = [e["step"] for e in events(run) if e["kind"] == "start"][-1]
    assert last == int(folders[0].name[5:]) - 10
    equal = outcome(run) == straight(command._replace(words=()))
    record(Row(command.engine, 2, f"{len(DAMAGES)} damaged checkpoints, {len(FILES)} files", [], None, equal, [DONE]))
    assert equal


class Disk:
    """A small disk of its own, in a mount namespace: the machine's mounts stay as they are. Seen from outside at `path`."""

    def __init__(self, inside: Path, size: str) -> None:
        inside.mkdir()
        self.inside = inside
        words = f'mount -t tmpfs -o size={size} none "$0" && echo mounted && exec sleep 300'
        self.holder = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", words, str(inside)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self.holder.stdout
        self.answer = self.holder.stdout.readline()
        self.path = Path(f"/proc/{self.holder.pid}/root{inside}")

    def start(self, command: Command, run: str) -> Job:
        enter = ["nsenter", "-t", str(self.holder.pid), "-m", mpirun_path() or "", "-np", str(command.size), sys.executable]
        code = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
        return Job(0, ["-c", code, *enter, *command.argv(self.inside / run)], timeout_s=90, env=ENV)

    def fill(self) -> None:
        with (self.path / "filler").open("wb", buffering=0) as file:
            for size in (2**16, 2**12, 1):
                try:
                    while True:
                        file.write(b"x" * size)
                except OSError:
                    continue

    def make_room(self) -> None:
        (self.path / "filler").unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if not all(map(shutil.which, ("unshare", "nsenter"))):
        pytest.skip("no unshare and nsenter here, which make a disk for one test")
    small = Disk(tmp_path / "disk", "2m")
    try:
        if small.answer != "mounted\n":
            pytest.skip(f"a disk of its own needs root: {small.answer}")
        yield small
    finally:
        small.holder.kill()
        small.holder.wait()
        assert small.holder.stdout
        small.holder.stdout.close()


@needs_mpirun
def test_a_full_disk_is_reported_and_the_write_repeated(disk: Disk) -> None:
    command, run = NUMPY._replace(words=()), disk.path / "run"
    with disk.start(command, "run") as job:
        wait_for(job, lambda: newest(run) >= 50)
        disk.fill()
        kept = newest(run)
        wait_for(job, lambda: job.output().count("no checkpoint of step") >= 3)
        output = job.output()
        assert newest(run) == kept, output
        assert "No space left on device" in output and "training goes on, and tries again" in output, output
        disk.make_room()
        since = time.monotonic()
        wait_for(job, lambda: newest(run) > kept)
        seconds = time.monotonic() - since
        result = job.wait()
    assert (result.returncode, result.stderr) == (DONE, ""), result
    equal = outcome(run) == straight(command)
    record(Row("mpi", 2, "a full disk, later with free space", [seconds], None, equal, [result.returncode]))
    assert equal


@needs_mpirun
def test_a_disk_that_stays_full_is_reported_at_the_end(disk: Disk) -> None:
    command, run = NUMPY._replace(words=()), disk.path / "run"
    with disk.start(command, "run") as job:
        wait_for(job, lambda: newest(run) >= 50)
        disk.fill()
        kept = newest(run)
        result = job.wait()
    assert result.returncode == USER, result
    assert "hvdtrain: the job is done (epochs=16), but its last checkpoint is not written: " in result.stderr
    assert "No space left on device" in result.stderr
    assert "fix: make room; start it again" in result.stderr
    disk.make_room()
    with disk.start(command, "run") as job:
        again = job.wait()
    assert (again.returncode, f"resume  from step {kept}" in again.stdout) == (DONE, True), again
    equal = outcome(run) == straight(command)
    record(Row("mpi", 2, "a disk that stays full", [], None, equal, [result.returncode]))
    assert equal


def test_a_log_on_a_full_disk_is_no_reason_to_stop(tmp_path: Path) -> None:
    command = Command("single", 0, framework="numpy")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, *command.argv(tmp_path / "run")],
            env=environment(ENV),
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=LIMIT_S,
            check=False,
        )
    assert (done.returncode, done.stderr) == (DONE, b"")
    equal = outcome(tmp_path / "run") == straight(command)
    record(Row("single", 1, "the log on a full disk", [], 0, equal, [done.returncode]))
    assert equal
