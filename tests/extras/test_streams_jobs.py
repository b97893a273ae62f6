"""Jobs on streams: the losses and weights of one process on any number of ranks, resumed on others
and after kills; docs/streams.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from drawn_job import DrawnJob, Place
from faults import Command, ends_as_straight, kill, kills
from pages import failures, run_page
from pool import on_ranks
from random_jobs import ONE, ROUNDING, Part, compare, left_of, run_part
from ranks import FULL, ROOT, needs_mpirun

PAGE = ROOT / "docs" / "streams.md"
STEPS = 12
STOPPED = 5
COMMON = (
    "speed.precision=fp64 optim.name=sgd optim.base_lr=0.05 batch.size=11 epochs=50 "
    f"stop.steps={STEPS} log.every_steps=1 guard.equal_steps=2 checkpoint.every_minutes=null "
    "checkpoint.every_steps=1 checkpoint.keep_last=99 model.name=mlp model.widths=[10,8] "
    "task.name=classification data.epoch_samples=40 data.samples=50"
)
TWO = Place("mpi", 2, "")
THREE = Place("mpi", 3, "")
# the stream, the buffer, and where a job begins and where it continues
JOBS = [
    ("generator", 0, TWO, ONE),
    ("stateful", 8, ONE, THREE),
    ("hugging_face", 8, TWO, THREE),
    *[
        ("skipping", 8, THREE, TWO),
        ("generator", 8, THREE, TWO),
        ("stateful", 0, THREE, ONE),
        ("skipping", 0, ONE, TWO),
        ("hugging_face", 0, THREE, ONE),
        ("drawing", 8, TWO, THREE),
    ]
    * FULL,
]


@needs_mpirun
@pytest.mark.parametrize(("kind", "buffer", "place", "following"), JOBS)
def test_a_job_is_that_of_one_process(
    kind: str, buffer: int, place: Place, following: Place, tmp_path: Path
) -> None:
    """Straight, and resumed elsewhere. Epochs of 40 samples end within steps, and so do passes of
    50."""
    words = f"{COMMON} data.name=stream_sources:{kind} data.shuffle_buffer={buffer}"
    job = DrawnJob(0, words, place, following, STOPPED)
    one = Part(job, ONE, tmp_path / "one")
    straight = Part(job, place, tmp_path / "straight")
    resumed = Part(job, following, tmp_path / "resumed", straight.run)
    for part in (one, straight, resumed):
        assert run_part(part, 120.0) is None, part
    expected = left_of(one.run)
    assert len(expected.events) >= STEPS
    for run, first in ((straight.run, 0), (resumed.run, STOPPED)):
        verdict = compare(expected, left_of(run), first, ROUNDING)
        assert verdict.kind == "equal", verdict


@needs_mpirun
@pytest.mark.parametrize(
    ("after", "expected"),
    [(0, "digest of the training first samples differs"), (64, "sample 64 of")],
)
def test_ranks_with_other_streams_are_noticed(after: int, expected: str, tmp_path: Path) -> None:
    """At the start, or at the first evaluation after the samples differ."""
    words = f"{COMMON} data.name=stream_sources:of_ranks data.after={after}"
    more = ["data.samples=500", "data.epoch_samples=80", "task.standardize=false"]
    found = on_ranks("mpi", 2, "random_jobs:train", str(tmp_path / "run"), [*words.split(), *more])
    assert expected in found[0]["text"] and found[0]["text"] == found[1]["text"], found


@needs_mpirun
@pytest.mark.faults
def test_killed_jobs_end_as_a_straight_one(tmp_path: Path) -> None:
    words = ("data.name=stream_sources:images", "data.epoch_samples=960", "data.shuffle_buffer=100")
    command = Command("mpi", 2, (*words, "data.val_samples=64"))
    trials = [kill(command, tmp_path / "run", what) for what in kills(41, command.size, 3)]
    assert len(trials) == 3 and ends_as_straight(command, tmp_path / "run")


@needs_mpirun
@pytest.mark.slow
def test_the_page_runs(tmp_path: Path) -> None:
    messages = failures(PAGE, run_page(PAGE, tmp_path))
    assert not messages, "\n".join(messages)
