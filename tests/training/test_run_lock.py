"""One job at a time in a run folder: who is refused, who waits, who takes over, and what a job says
that has lost its folder."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from faults import events, newest, wait_for
from ranks import FULL, Job, Result, python
from waiting import is_stopped, wait_until

from hvdtrain.config.read import configure
from hvdtrain.core.folder import Folder
from hvdtrain.errors import DONE, REQUEUE, USER, UserError
from hvdtrain.events.log import Event
from hvdtrain.events.writers import JsonLinesWriter
from hvdtrain.training import run_lock
from hvdtrain.training.checkpoint import files
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.lock_holder import Holder, from_bytes, this_process, to_bytes
from hvdtrain.training.progress.train_state import Progress, TrainState
from hvdtrain.training.run_folder import write_config
from hvdtrain.training.run_lock import LOCK, RunLock, read_holder

# 8 steps are an epoch
DATA = [
    "data.name=synthetic",
    "data.shape=[8,8,1]",
    "data.samples=64",
    "data.val_samples=8",
    "batch.size=8",
]
JOB = [
    "-m",
    "hvdtrain",
    *DATA,
    "framework=numpy",
    "model.name=linear",
    "comm.engine=single",
    "log.every_s=0",
]
LONG = ["epochs=100000", "log.every_steps=5", "checkpoint.every_steps=40"]
MINE = this_process()
ELSEWHERE = MINE._replace(token="0123456789abcdef", host="n7", machine="another", since_s=1.8e9)


class At(Heartbeat):
    """Calls `action` with beat number `beat`: a lock of another is looked at after each."""

    def __init__(self, beat: int, action: Callable[[], None]) -> None:
        super().__init__()
        self._at = beat
        self._action = action

    def beat(self, phase: str, epoch: int, step: int) -> None:
        super().beat(phase, epoch, step)
        if self.beats == self._at:
            self._action()


def new_lock(
    stale_s: float = 60.0, start_s: float | None = None, heartbeat: Heartbeat | None = None
) -> RunLock:
    return RunLock(heartbeat or Heartbeat(), Signals(0), start_s, stale_s)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def write(run: Path, holder: Holder) -> None:
    (run / LOCK).write_bytes(to_bytes(holder))


def holder_of(run: Path) -> Holder | None:
    with Folder.open(run) as folder:
        return read_holder(folder)


def ended_process() -> Holder:
    """The lock of a process of this machine that was killed."""
    code = "from hvdtrain.training.lock_holder import *; print(to_bytes(this_process()).decode())"
    return from_bytes(python(["-c", code]).stdout.encode())


def test_a_living_job_is_named_and_what_is_given_back_is_free(run: Path) -> None:
    with new_lock() as first, new_lock() as second:
        assert first.acquire(run) == []
        first.check()
        with pytest.raises(
            UserError,
            match=rf"run is in use by another job: process {os.getpid()} on \S+, since 20",
        ) as caught:
            second.acquire(run)
        assert caught.value.code == USER and str(run / LOCK) in caught.value.fix
        second.release()
        first.check()
    assert os.listdir(run) == []


def test_its_thread_has_ended_with_it(run: Path) -> None:
    """With the job, to which it has a reference: torch aborts a process where a thread frees a
    tensor while the interpreter ends."""
    with new_lock() as run_lock:
        run_lock.acquire(run)
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "run lock"]
        assert thread.is_alive()
    assert not thread.is_alive()


def test_the_lock_of_an_ended_process_is_taken_over_at_once(run: Path) -> None:
    gone = ended_process()
    for left in (
        gone,
        gone._replace(pid=os.getpid()),
    ):  # its number may have been given to another process
        write(run, left)
        with new_lock() as run_lock:
            assert run_lock.acquire(run) == [
                f"the lock of a job that ended without giving it back is taken over: {left}"
            ]
    assert os.listdir(run) == []


def test_a_job_on_another_host_is_judged_by_its_signs_of_life(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(run, ELSEWHERE)
    alive = At(4, lambda: write(run, ELSEWHERE._replace(beats=1)))
    with (
        new_lock(heartbeat=alive) as run_lock,
        pytest.raises(UserError, match=r"in use by another job: process \d+ on n7, since 2027-"),
    ):
        run_lock.acquire(run)
    assert alive.beats == 5  # it is seen with the next look
    with new_lock(stale_s=0.8) as run_lock:
        began_s = time.monotonic()
        assert "on n7, since" in run_lock.acquire(run)[0]
        assert time.monotonic() - began_s > 0.8
    assert re.search(
        r"n7, since 2027-01-1\d .*, not seen from here: no sign of life for",
        capsys.readouterr().err,
    )


def test_the_wait_for_signs_of_life_ends_before_the_other_ranks_give_up(run: Path) -> None:
    write(run, ELSEWHERE)
    with (
        new_lock(start_s=1.0) as run_lock,
        pytest.raises(UserError, match=r"on n7, since .*, without a sign of life for \d+ s"),
    ):
        run_lock.acquire(run)
    assert holder_of(run) == ELSEWHERE


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"\xff" * 2000, b'{"token": "../../x", "host": 3}', b"cut off"]
)
def test_a_lock_that_cannot_be_read_is_waited_for_and_taken_over(run: Path, data: bytes) -> None:
    (run / LOCK).write_bytes(to_bytes(MINE)[:100] if data == b"cut off" else data)
    with new_lock(stale_s=0.4) as run_lock:
        run_lock.acquire(run)
        run_lock.check()
    assert os.listdir(run) == []


def test_a_job_waits_for_the_last_checkpoint_of_the_one_before(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with new_lock() as first:
        waiting = At(5, first.release)
        with new_lock(heartbeat=waiting) as second:
            first.acquire(run)
            first.ending()
            assert second.acquire(run) == []
            assert waiting.beats == 5
            second.check()
    assert f"run belongs to process {os.getpid()} on " in capsys.readouterr().err


@pytest.mark.slow
def test_a_job_shows_that_it_lives_and_that_it_stops(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a thread: the main one may be in a long step."""
    monkeypatch.setattr("hvdtrain.training.run_lock.BEAT_S", 0.5)
    signals = Signals(0)
    with RunLock(Heartbeat(), signals) as run_lock:
        run_lock.acquire(run)
        wait_until(lambda: (holder := holder_of(run)) and holder.beats > 1, "signs of life")
        first = holder_of(run)
        signals.received = "SIGUSR2"
        wait_until(lambda: (holder := holder_of(run)) and holder.ending, "a sign of the stop")
        second = holder_of(run)
    assert first and second and first.beats < second.beats and not first.ending


def test_of_many_that_find_a_stale_lock_one_takes_it(run: Path) -> None:
    gone = ended_process()
    for _ in range(5):
        write(run, gone)
        locks = [new_lock() for _ in range(12)]
        held = list[RunLock]()
        refused = list[UserError]()

        def take(
            run_lock: RunLock, held: list[RunLock] = held, refused: list[UserError] = refused
        ) -> None:
            try:
                run_lock.acquire(run)
                held.append(run_lock)
            except UserError as error:
                refused.append(error)

        threads = [threading.Thread(target=take, args=[run_lock]) for run_lock in locks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(held), len(refused)) == (1, 11)
        held[0].check()
        held[0].release()
        assert os.listdir(run) == []


def test_a_claim_that_a_crash_left_holds_nobody_up(run: Path) -> None:
    gone = ended_process()
    write(run, gone)
    (run / f".lock-{gone.token}").touch()
    with new_lock() as run_lock:
        run_lock.acquire(run)
    assert os.listdir(run) == []


def test_a_claim_that_has_come_in_the_place_of_another_is_as_old_as_it_is(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three that wait for a dead one's claim, one removes it, and the next makes its own: the
    third may not remove that."""
    now_s = [0.0]
    claim = run / ".lock-token"
    claim.touch()

    def sleep(seconds: float) -> None:
        now_s[0] += 1.0
        if now_s[0] == 3.0:
            claim.unlink()
            (run / "new").touch()
            (run / "new").rename(claim)
        if now_s[0] == 5.0:
            assert claim.exists(), "it is two seconds old"

    monkeypatch.setattr(run_lock, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep))
    with Folder.open(run) as folder:
        run_lock._wait_for_claim(folder, claim.name)
    assert not claim.exists() and now_s[0] > 5


def test_what_is_lost_is_said(run: Path) -> None:
    (run / "checkpoints" / "step-00000040").mkdir(parents=True)
    losses = {
        "renamed to .*/elsewhere while the job ran; the steps after the checkpoint": lambda: (
            run.rename(run.parent / "elsewhere")
        ),
        "deleted while the job ran: its checkpoints and its events are lost": lambda: shutil.rmtree(
            run
        ),
        "another job has taken the run folder .*: process .* on n7": lambda: write(run, ELSEWHERE),
        "the lock of .* was removed, or the folder is being deleted; the steps after": (
            run / LOCK
        ).unlink,
    }
    for words, lose in losses.items():
        run.mkdir(exist_ok=True)
        (run / "checkpoints" / "step-00000040").mkdir(parents=True, exist_ok=True)
        with new_lock() as run_lock:
            run_lock.acquire(run)
            lose()
            with pytest.raises(UserError, match=words):
                run_lock.check()
        if "another" in words:
            assert holder_of(run) == ELSEWHERE, "that of another job is not given back"
            (run / LOCK).unlink()


# Whole jobs


def start(run: Path, *words: str) -> Job:
    return Job(0, [*JOB, f"run={run}", *words], is_warm=True)


def is_one_job(run: Path) -> bool:
    """Whether the steps of events follow each other: those of two jobs at the same time would be
    mixed."""
    steps: list[int] = []
    for event in events(run):
        if event["kind"] == "start":
            steps = steps[
                : next((i for i, step in enumerate(steps) if step > event["step"]), len(steps))
            ]
        elif event["kind"] == "step":
            steps.append(event["step"])
    return steps == sorted(set(steps)) != []


@pytest.mark.parametrize("pairs", [1, pytest.param(50 if FULL else 2, marks=pytest.mark.slow)])
def test_two_jobs_never_mix(tmp_path: Path, pairs: int) -> None:
    """The second one is rejected, or it waits and finds a complete job; the run equals the run of
    one job."""
    chance = random.Random(pairs)
    codes = list[tuple[int, int]]()
    for pair in range(pairs):
        run = tmp_path / f"run-{pair}"
        words = ["epochs=60", "log.every_steps=2", "checkpoint.every_steps=8"]
        with start(run, *words) as one:
            time.sleep(chance.choice([0.0, chance.uniform(0, 3)]))
            with start(run, *words) as two:
                results = [one.wait(), two.wait()]
        assert {result.returncode for result in results} <= {DONE, USER}, results
        refused = [result for result in results if result.returncode == USER]
        assert all(
            "run-" in r.stderr and "is in use by another job: process" in r.stderr for r in refused
        ), results
        codes.append((results[0].returncode, results[1].returncode))
        assert len(refused) < 2 and is_one_job(run), codes
        assert newest(run) == 480 and [
            e["step"] for e in events(run) if e["kind"] == "epoch"
        ] == list(range(8, 481, 8))
        assert (
            not [e for e in events(run) if e["kind"] == "checkpoint_failed"]
            and not (run / LOCK).exists()
        )
    print(
        f"{pairs} pairs: {sum(USER in pair for pair in codes)} refused, "
        f"{codes.count((DONE, DONE))} one after the other"
    )


@pytest.fixture
def long_job(tmp_path: Path) -> Iterator[Job]:
    with start(tmp_path / "r", *LONG) as job:
        wait_for(job, lambda: newest(tmp_path / "r") >= 40)
        yield job


def test_a_killed_job_is_taken_over_and_a_stopped_one_gives_its_lock_back(
    tmp_path: Path, long_job: Job
) -> None:
    run = tmp_path / "r"
    refused = start_and_wait(run, *LONG)
    assert refused.returncode == USER and "r is in use by another job: process " in refused.stderr
    (pid,) = [pid for pid in long_job.processes() if holder_of(run) and pid == holder_of(run).pid]  # type: ignore[union-attr]
    os.kill(pid, signal.SIGKILL)
    long_job.wait()
    with start(run, *LONG) as again:
        wait_for(again, lambda: "taken over: process" in again.output())
        begun = newest(run)
        wait_for(again, lambda: newest(run) > begun)
        os.kill(holder_of(run).pid, signal.SIGUSR2)  # type: ignore[union-attr]
        assert again.wait().returncode == REQUEUE
    assert (
        f"taken over: process {pid} on " in again_notes(run)
        and not (run / LOCK).exists()
        and is_one_job(run)
    )


def start_and_wait(run: Path, *words: str) -> Result:
    with start(run, *words) as job:
        return job.wait()


def again_notes(run: Path) -> str:
    return "\n".join([event for event in events(run) if event["kind"] == "start"][-1]["lines"])


@pytest.mark.parametrize("what", ["events", "checkpoint", "config.yaml"])
def test_a_folder_that_takes_the_place_of_the_locked_one_gets_no_file(
    run: Path, tmp_path: Path, what: str
) -> None:
    """Not even between the look at the lock and the write."""
    there = tmp_path / "there"

    class Replaced(RunLock):
        def open(self, run: Path) -> Folder:
            folder = super().open(run)
            run.rename(there)
            run.mkdir()
            return folder

    with Replaced(Heartbeat(), Signals(0)) as run_lock:
        run_lock.acquire(run)
        if what == "events":
            JsonLinesWriter(run / "events.jsonl", run_lock)(Event(0.0, "start", 0, {}))
        elif what == "checkpoint":
            files.write(
                run,
                TrainState(Progress(8, 80, 3, 24)),
                {"p.w": np.zeros(2)},
                {},
                open_run=run_lock.open,
            )
        else:
            write_config(configure(None, []), run, run_lock)
        assert os.listdir(run) == [] and len(os.listdir(there)) == 2
        with pytest.raises(UserError, match=f"the run folder .* was renamed to {there}"):
            RunLock.open(run_lock, run)


@pytest.mark.parametrize("how", ["deleted", "renamed", "replaced"])
def test_a_run_folder_that_is_gone_ends_the_job_and_is_never_recreated(
    tmp_path: Path, long_job: Job, how: str
) -> None:
    run = tmp_path / "r"
    there = tmp_path / "there"
    pid = holder_of(run).pid  # type: ignore[union-attr]
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(pid), "no thread of it writes")
    run.rename(there)
    if how == "deleted":
        shutil.rmtree(there)
    elif how == "replaced":
        run.mkdir()
    os.kill(pid, signal.SIGCONT)
    result = long_job.wait()
    assert result.returncode == USER, result
    words = (
        "deleted while the job ran: its checkpoints and its events are lost"
        if how == "deleted"
        else f"renamed to {there} while"
    )
    assert (
        f"the run folder {run} was {words}" in result.stderr and "Traceback" not in result.stderr
    ), result.stderr
    assert os.listdir(run) == [] if how == "replaced" else not run.exists(), (
        "not recreated in halves"
    )
    if how != "deleted":
        said = re.search(r"the steps after the checkpoint of step (\d+) are lost", result.stderr)
        assert said and 40 <= int(said[1]) <= newest(there) <= int(said[1]) + 40, (
            "one may have been under way"
        )
        assert f"run={there}" in result.stderr
