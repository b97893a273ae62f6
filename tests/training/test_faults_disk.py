"""Checkpoints on a bad disk: a kill between any two calls, damaged files, no space. The newest good
checkpoint is always there."""

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
from faults import (
    CHECKPOINT_EVERY,
    ENV,
    SYNC_EVERY,
    Command,
    Row,
    events,
    gone,
    launcher,
    newest,
    next_end,
    outcome,
    reached,
    record,
    said_by_ranks,
    straight,
    wait_for,
)
from PIL import Image
from ranks import (
    FULL,
    HANG_S,
    Job,
    Result,
    environment,
    mpirun_path,
    needs_extra,
    needs_horovod,
    needs_mpirun,
    python,
)
from waiting import wait_until

from hvdtrain.errors import DONE, REQUEUE, USER

pytestmark = pytest.mark.faults
FILES = ("weights.safetensors", "optimizer.safetensors", "progress.json", "SHA256SUMS")
NUMPY = Command("mpi", 2, ("checkpoint.keep_last=20",), framework="numpy")


def test_a_kill_before_any_call_of_a_write_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    start = time.monotonic()
    result = python(["tests/support/killed_at.py", str(tmp_path)], env=ENV)
    assert result.returncode == 0, result
    trials = [json.loads(line) for line in result.stdout.splitlines()]
    wrong = [t for t in trials if (t["code"], t["equal"]) != (DONE, True) or t["good"] < 4]
    # a job that is over starts nothing
    wrong += [
        t for t in trials if t["starts"] != [t["good"]] and (t["good"], t["starts"]) != (12, [])
    ]
    # the next checkpoint removes what is left
    wrong += [t for t in trials if t["left"] != ["step-00000012"] and t["good"] < 12]
    assert not wrong
    calls = {t["begin"]: t["calls"] for t in trials if not t["killed"]}
    assert len(trials) == 13 + len(calls["new"]) + len(calls["stopped"]) > 70
    # which was read to see that the folder is still this job's
    begins = [call for call in calls["whole"] if call != "close lock.json"]
    assert begins[:2] == ["mkdir checkpoints", "mkdir .step-00000012.unfinished"]
    on_the_disk_before_the_rename(calls["new"])
    numbers = json.loads(
        (tmp_path / "straight" / "checkpoints" / "step-00000012" / FILES[2]).read_text()
    )
    # the one at an epoch's end is written after its evaluation, which keep_best goes by
    assert numbers["train_state"]["evaluated"] == 12
    seconds = (time.monotonic() - start) / len(trials)
    record(
        Row(
            "single",
            1,
            f"SIGKILL before each of {len(trials) - 3} calls of a checkpoint",
            [seconds] * (len(trials) - 3),
            4,
            True,
            [-9],
        )
    )


def on_the_disk_before_the_rename(calls: list[str]) -> None:
    """What a loss of power would need: each file after its last byte, then their folder, the
    rename, and the folder above."""
    order = [calls.index(f"write, half written, {name}") for name in FILES]
    synced = [calls.index(f"fsync {name}") for name in FILES]
    assert all(written + 1 == sync for written, sync in zip(order, synced, strict=True)), calls
    rest = [
        calls.index(call)
        for call in (
            "fsync .step-00000008.unfinished",
            "rename .step-00000008.unfinished",
            "fsync checkpoints",
        )
    ]
    removed = calls.index("rename step-00000004")
    assert max(synced) < rest[0] < rest[1] < rest[2] < removed, calls


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
        *[
            pytest.param(
                Command("horovod", 2, ("checkpoint.keep_last=20",)),
                id="horovod-2",
                marks=[needs_mpirun, needs_horovod],
            )
        ]
        * FULL,
    ],
)
def test_damaged_checkpoints_are_named_and_skipped(tmp_path: Path, command: Command) -> None:
    """Twelve checkpoints one after the other, each damaged in another way; the one before them is
    used."""
    run = tmp_path / "run"
    random = Random(7)
    with command.start(run) as job:
        wait_for(job, lambda: newest(run) >= 150)
        os.kill(launcher(job), signal.SIGKILL)
        gone(job, time.monotonic())
    folders = sorted((run / "checkpoints").glob("step-*"))[-len(DAMAGES) :]
    for folder, (name, how) in zip(folders, DAMAGES, strict=True):
        damage(folder / name, how, random)
    last = command.up_to(next_end(run))
    result = last.finish(run)
    skipped = re.findall(r"damaged (step-\d+) is skipped: ([^:]+): (.+)", result.stdout)
    assert [step for step, _, _ in skipped] == [folder.name for folder in reversed(folders)], (
        result.stdout
    )
    wrong = [
        (found, file)
        for found, (file, _) in zip(skipped, reversed(DAMAGES), strict=True)
        if file not in (found[1], "SHA256SUMS")
    ]
    assert not wrong
    began = [e["step"] for e in events(run) if e["kind"] == "start"][-1]
    assert began == int(folders[0].name[5:]) - 10
    equal = outcome(run) == straight(last)
    record(
        Row(
            command.engine,
            2,
            f"{len(DAMAGES)} damaged checkpoints, {len(FILES)} files",
            [],
            None,
            equal,
            [DONE],
        )
    )
    assert equal


class Disk:
    """A small disk of its own, in a mount namespace: the machine's mounts stay as they are. Seen
    from outside at `path`."""

    def __init__(self, inside: Path, size: str) -> None:
        inside.mkdir()
        self.inside = inside
        words = f'mount -t tmpfs -o size={size} none "$0" && echo mounted && exec sleep 100000'
        self.holder = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", words, str(inside)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.holder.stdout
        self.answer = self.holder.stdout.readline()
        self.path = Path(f"/proc/{self.holder.pid}/root{inside}")

    def start(self, command: Command, run: str) -> Job:
        launcher = [mpirun_path() or "", "-np", str(command.size)] if command.size else []
        enter = [*self.enter(), *launcher, sys.executable]
        code = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
        return Job(0, ["-c", code, *enter, *command.argv(self.inside / run)], env=ENV)

    def enter(self) -> list[str]:
        return ["nsenter", "-t", str(self.holder.pid), "-m"]

    def remount(self, options: str) -> None:
        command = [*self.enter(), "mount", "-o", f"remount,{options}", str(self.inside)]
        wait_until(
            lambda: subprocess.run(command, capture_output=True, check=False).returncode == 0,
            f"{command}: the disk is busy as long as the job writes a file",
        )

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
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Disk]:
    if not all(map(shutil.which, ("unshare", "nsenter"))):
        pytest.skip("no unshare and nsenter here, which make a disk for one test")
    small = Disk(tmp_path / "disk", getattr(request, "param", "2m"))
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
    command = NUMPY._replace(words=())
    run = disk.path / "run"
    with disk.start(command, "run") as job:
        wait_for(job, lambda: newest(run) >= 50)
        disk.fill()
        written = newest(run)
        wait_for(job, lambda: job.output().count("no checkpoint of step") >= 3)
        output = job.output()
        room = r"needs (0\.\d+) MB, (0\.\d+) MB free"
        said = (
            rf"no checkpoint of step \d+: no room on the disk: {room}; the newest is of step "
            r"(\d+); training continues"
        )
        ((needs, free, step),) = re.findall(said, output)
        kept = int(step)
        # one that was being written when the disk became full may have had its room
        assert newest(run) == kept >= written, output
        assert float(free) < float(needs) and output.count("tries again") == 1, output
        assert output.count(f": still none since step {kept}\n") >= 2, output
        disk.make_room()
        since = time.monotonic()
        wait_for(job, lambda: newest(run) > kept)
        seconds = time.monotonic() - since
        os.kill(holder_pid(run), signal.SIGUSR2)
        result = job.wait()
    assert (result.returncode, said_by_ranks(result)) == (REQUEUE, ""), result
    last = command.up_to(next_end(run))
    with disk.start(last, "run") as job:
        assert job.wait().returncode == DONE
    equal = outcome(run) == straight(last)
    record(
        Row(
            "mpi",
            2,
            "a full disk, later with free space",
            [seconds],
            None,
            equal,
            [result.returncode],
        )
    )
    assert equal


# Checkpoints of 1.5 MB: one of them fits on a disk of 2 MB, two on one of 4 MB.
LARGE = Command("single", 0, ("data.shape=[64,64,3]", "epochs=2"), framework="numpy")


@needs_mpirun
def test_a_disk_that_stays_full_is_reported_at_the_end(disk: Disk) -> None:
    """The only good checkpoint, the first one, is never given up. The next start says before its
    first step that there is no room."""
    command, run = (
        LARGE._replace(engine="mpi", size=2, words=(*LARGE.words, "checkpoint.keep_last=1")),
        disk.path / "run",
    )
    with disk.start(command, "run") as job:
        result = job.wait()
    assert (result.returncode, newest(run)) == (USER, 10), result
    assert (
        "hvdtrain: the job is done (epochs=2), but its last checkpoint was not written: no room "
        "on the disk: needs 1."
    ) in result.stderr
    assert "fix: make room, and start it again" in result.stderr
    begun = len(events(run))
    with disk.start(command, "run") as job:
        refused = job.wait()
    assert (refused.returncode, "no room on the disk" in refused.stderr) == (USER, True), refused
    assert (len(events(run)), newest(run)) == (begun, 10)
    disk.remount("size=4m")
    with disk.start(command, "run") as job:
        again = job.wait()
    assert (again.returncode, "resume  from step 10" in again.stdout) == (DONE, True), again
    equal = outcome(run) == straight(command)
    record(Row("mpi", 2, "a disk that stays full", [], None, equal, [result.returncode]))
    assert equal


@pytest.mark.parametrize("disk", ["4m"], indirect=True)
@pytest.mark.parametrize("stop", [False, True])
def test_the_last_checkpoint_replaces_an_older_one_where_it_does_not_fit_beside_it(
    disk: Disk, stop: bool
) -> None:
    run = disk.path / "run"
    with disk.start(
        LARGE._replace(words=(*LARGE.words, "epochs=9000")) if stop else LARGE, "run"
    ) as job:
        if stop:
            wait_for(job, lambda: job.output().count(": still none since step 20\n") >= 2)
            os.kill(holder_pid(run), signal.SIGUSR2)
        result = job.wait()
    assert (result.returncode, result.stderr) == (REQUEUE if stop else DONE, ""), result
    said = (
        r"no checkpoint of step 30: no room on the disk: needs 1\.\d{3} MB, \d\.\d{3} MB free; "
        r"the newest is of step 20; training continues"
    )
    assert (
        len(re.findall(said, result.stdout)) == 1
        and result.stdout.count("tries again every 30 s") == 1
    ), result.stdout
    assert (
        "no room on the disk for the last checkpoint beside all others: the checkpoint of step "
        "10 was removed for it" in result.stdout
    )
    last = newest(run)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step-00000020",
        f"step-{last:08d}",
    ] and (stop or last == 120)
    (written,) = [e for e in events(run) if "given_up" in e]
    assert (written["kind"], written["step"], written["given_up"]) == ("checkpoint", last, [10])
    equal = None if stop else outcome(run) == straight(LARGE)
    record(
        Row(
            "single",
            1,
            f"a disk with room for two checkpoints{', stopped' * stop}",
            [],
            None,
            equal,
            [result.returncode],
        )
    )
    assert equal or stop


@pytest.mark.parametrize("disk", ["4m"], indirect=True)
def test_a_disk_that_becomes_read_only_ends_the_job(disk: Disk) -> None:
    """As a file system after an error of its disk. The next start says it before its first step;
    once it can write, it continues."""
    command = Command("single", 0, framework="numpy")
    run = disk.path / "run"
    with disk.start(command, "run") as job:
        wait_for(job, lambda: newest(run) >= 50)
        disk.remount("ro")
        since = time.monotonic()
        result = job.wait()
        seconds = time.monotonic() - since
    kept = newest(run)
    inside = disk.inside / "run"
    assert result.returncode == USER and "Traceback" not in result.stderr, result
    what = rf"the run folder {inside} can no longer be written \(Read-only file system\)"
    said = re.search(
        rf"{what}; the steps after the checkpoint of step (\d+) are lost", result.stderr
    )
    assert said and int(said[1]) <= kept, (result.stderr, kept)
    with disk.start(command, "run") as job:
        refused = job.wait()
    assert (
        refused.returncode == USER
        and "cannot write the run folder: [Errno 30] Read-only file system" in refused.stderr
    ), refused
    assert "epoch" not in refused.stdout
    lost = max(0, reached(run) - kept)
    assert lost <= CHECKPOINT_EVERY + SYNC_EVERY
    disk.remount("rw")
    last = command.up_to(next_end(run))
    with disk.start(last, "run") as job:
        again = job.wait()
    assert (again.returncode, again.stderr, f"resume  from step {kept}" in again.stdout) == (
        DONE,
        "",
        True,
    ), again
    equal = outcome(run) == straight(last)
    record(
        Row(
            "single",
            1,
            "a disk that becomes read-only",
            [seconds],
            lost,
            equal,
            [result.returncode],
        )
    )
    assert equal


def holder_pid(run: Path) -> int:
    pid: int = json.loads((run / "lock.json").read_text())["pid"]
    return pid


def test_a_log_on_a_full_disk_is_no_reason_to_stop(tmp_path: Path) -> None:
    command = Command("single", 0, ("epochs=2",), framework="numpy")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, *command.argv(tmp_path / "run")],
            env=environment(ENV),
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=HANG_S,
            check=False,
        )
    assert (done.returncode, done.stderr) == (DONE, b"")
    equal = outcome(tmp_path / "run") == straight(command)
    record(Row("single", 1, "the log on a full disk", [], 0, equal, [done.returncode]))
    assert equal


def _cut_off_while_it_is_read(words: list[str], folder: Path) -> Result:
    run = folder / f"run-{len(list(folder.iterdir()))}"
    events = run / "events.jsonl"
    with Job(0, [*words, "epochs=1000000", f"run={run}"], env=ENV, is_warm=True) as job:
        wait_for(job, lambda: events.exists() and '"epoch"' in events.read_text())
        for path in folder.glob("cache/*/images.npy"):
            os.truncate(path, 0)
        return job.wait()


@needs_extra("image_files")
def test_a_cache_that_is_cut_off_while_it_is_mapped_is_not_silent(tmp_path: Path) -> None:
    """The system ends the process; what it was reading is printed, and the same command decodes the
    file again."""
    for split, label in product(("train", "val"), ("a", "b")):
        folder = tmp_path / "images" / split / label
        folder.mkdir(parents=True)
        for number in range(8):
            Image.effect_noise((32, 32), 60 + number).save(folder / f"{number}.png")
    words = [
        "framework=numpy",
        "model.name=linear",
        "batch.size=4",
        "data.name=folder",
        "data.channels=1",
    ]
    words = [
        "-m",
        "hvdtrain",
        *words,
        f"data.root={tmp_path / 'images'}",
        f"data.cache={tmp_path / 'cache'}",
    ]
    result = _cut_off_while_it_is_read(words, tmp_path)
    if (
        result.returncode == -signal.SIGSEGV
    ):  # CPython's report itself fails, where another thread runs at that moment: once in 50 times
        assert "Fatal Python error: Bus error" in result.stderr, result.stderr
        result = _cut_off_while_it_is_read(words, tmp_path)
    assert result.returncode in (-signal.SIGBUS, 128 + signal.SIGBUS), result
    assert (
        "Fatal Python error: Bus error" in result.stderr and 'source.py", line ' in result.stderr
    ), result.stderr
    again = python([*words, "max_steps=5", f"run={tmp_path / 'again'}"], env=ENV)
    assert again.returncode == DONE and again.stderr.count(" is damaged: decoding again\n") == 2, (
        again
    )
