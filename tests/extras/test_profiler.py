"""profile.steps: which range of steps is traced, and what happens if a trace cannot be written."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvdtrain.__main__ import main
from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.config.schema import Config
from hvdtrain.core.extras import commands
from hvdtrain.errors import UserError
from hvdtrain.events.log import Log
from hvdtrain.extras.profiler.step_profiler import StepProfiler, steps_of
from hvdtrain.training.run_folder import MARKER
from hvdtrain.training.telemetry.telemetry import make_gauges


def profiled(steps: str) -> Config:
    config = configure(None, [])
    return config.replace(profile=config.profile.replace(steps=steps))


@pytest.mark.filterwarnings("always:no profile")
def test_a_profile_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # where the file of the trace belongs
    (tmp_path / "run" / "profile" / "rank-00000" / "trace.json.gz").mkdir(parents=True)
    (tmp_path / "run" / MARKER).touch()
    assert main(["model.name=linear", "max_steps=12", "profile.steps=2:4", "run=run"]) == 0
    assert re.search(
        "UserWarning: no profile: .*Is a directory.*; training continues without it",
        capfd.readouterr().err,
    )
    assert '"kind": "profile"' not in (tmp_path / "run" / "events.jsonl").read_text()


@pytest.mark.parametrize("text", ["10", "15:10", "5:5", "a:b", "1:2:3", "-1:4", ""])
def test_profile_steps_that_are_no_range(text: str) -> None:
    with pytest.raises(
        UserError,
        match=r"is not a range of steps\n.*where: profile.steps, default\n.*profile.steps=10:15 "
        r"traces the five steps",
    ):
        steps_of(profiled(text))
    assert steps_of(profiled("10:15")) == (10, 15)


def test_the_profiler_of_a_configuration(tmp_path: Path) -> None:
    learner: Any = SimpleNamespace(gpu=lambda: None)
    alone = SingleProcessCommunicator()
    log = Log([])
    made = make_gauges(profiled("2:4"), alone, learner, log, tmp_path, 0)
    (profiler,) = (gauge for gauge in made if isinstance(gauge, StepProfiler))
    assert (profiler.first, profiler.last) == (2, 4)
    assert profiler.folder == tmp_path / "profile" / "rank-00000"
    again = profiler.from_step(3)
    assert isinstance(again, StepProfiler) and again is not profiler
    assert (again.first, again.last, again.folder) == (2, 4, profiler.folder)
    made = make_gauges(configure(None, []), alone, learner, log, tmp_path, 0)
    assert not any(isinstance(gauge, StepProfiler) for gauge in made)


def test_a_wrong_range_is_an_error_before_the_first_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same of every command that reads a job's configuration."""
    error = (
        r": profile.steps=banana is not a range of steps\n"
        r"  where: (rank 0 on \S+; )?profile.steps, command line\n"
        r"  fix: profile.steps=10:15 traces the five steps that follow step 10\n"
    )
    for command in ([], ["check"], ["plan"]):
        if not command or command[0] in commands():
            assert main([*command, "model.name=linear", "profile.steps=banana"]) == 2
            assert re.search(error, "".join(capsys.readouterr()))


def test_jax_writes_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = ["framework=jax", "model.name=linear", "max_steps=4", "run=run"]
    assert main([*job, "profile.steps=1:3"]) == 0
    assert list((tmp_path / "run" / "profile" / "rank-00000").rglob("*.xplane.pb"))
