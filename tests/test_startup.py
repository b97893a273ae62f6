"""What a start costs: its phases add up and are told, and nothing is imported that the job does not use."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import ranks
from ranks import needs_mpirun

from hvdtrain.run.pulse import Pulse
from hvdtrain.run.startup import _age_s, _stat, phases, words

JOB = ["data.name=synthetic", "data.samples=64", "model.name=mlp", "max_steps=12", "resume=no"]


def test_phases_are_those_between_the_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    pulse, now = Pulse(), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for phase, seconds, step in [
        ("connecting the ranks", 0.5, 0), ("reading the data", 2.0, 0), ("building the model", 0.25, 0),
        ("reading the checkpoint", 0.125, 0),
        ("reading samples", 0.5, 7), ("step", 1.0, 7), ("reading samples", 9.0, 8), ("step", 9.0, 8), ("meeting", 9.0, 9),
    ]:  # fmt: skip
        pulse.beat(phase, 0, step)
        now[0] += seconds
    found = phases(pulse)
    before = {name: found.pop(name) for name in ("launcher", "Python") if name in found}
    assert found == {"ranks": 0.5, "data": 2.0, "model": 0.25, "state": 0.125, "first samples": 0.5, "first step": 1.0}
    assert all(seconds >= 0 for seconds in before.values())
    assert words({"ranks": 0.5, "data": 2.04, "state": 0.01}) == "start   2.5 s to the end of the first step: ranks 0.5, data 2.0"


def test_a_process_has_an_age() -> None:
    age = _age_s(os.getpid())
    assert age is not None and 0 <= age < 24 * 3600
    time.sleep(0.05)
    again = _age_s(os.getpid())
    assert again is not None and 0.04 < again - age < 5
    assert _stat(os.getpid())[0].startswith("py") and _stat(2**30) is None


@needs_mpirun
def test_a_job_tells_its_start_once(tmp_path: Path) -> None:
    result = ranks.mpirun(2, ["-m", "hvdtrain", *JOB, "comm.engine=mpi", "log.every_steps=1", f"run={tmp_path}"])
    assert result.returncode == 0, result.stderr
    (event,) = [line for line in map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines()) if line["kind"] == "started"]
    assert list(event["start_s"])[:2] == ["launcher", "Python"] and sum(event["start_s"].values()) < result.seconds + 0.5
    assert event["start_s"]["ranks"] > 0 and event["start_s"]["first step"] > 0
    assert result.stdout.count("s to the end of the first step: ") == 1


def test_nothing_is_imported_that_the_job_does_not_use(tmp_path: Path) -> None:
    heavy = "sympy", "torch._dynamo", "torch._inductor", "torchvision", "jax", "mpi4py", "horovod", "matplotlib", "sklearn", "scipy", "PIL"
    code = f"import sys; from hvdtrain.__main__ import main; code = main({[*JOB, f'run={tmp_path}']!r}); assert code == 0, code\n"
    code += f"print('loaded', [name for name in {heavy} if name in sys.modules])"
    result = ranks.python(["-c", code])
    assert result.stdout.splitlines()[-1] == "loaded []", result.stdout[-500:] + result.stderr
