"""What jobs take: joules of jobs that stop and of steps that are not finite, and memory of a process that another one started."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.__main__ import main
from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import Progress
from hvdtrain.events.log import Log
from hvdtrain.frameworks.numpy import NumpyLearner
from hvdtrain.train.progress.train_state import TrainState
from hvdtrain.train.telemetry import telemetry
from hvdtrain.train.telemetry.energy import Counter, Energy
from hvdtrain.train.telemetry.telemetry import Telemetry, host_memory_bytes

SMALL = ["framework=numpy", "model.name=linear", "log.every_steps=5"]


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


@pytest.fixture
def joule_a_step(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[int, Sums], None]]:
    """Each training step takes one joule of a processor. Functions in the list are called with its number and its sums."""
    done, hooks = [0], list[Callable[[int, Sums], None]]()
    step = NumpyLearner.step

    def counted(self: NumpyLearner, *batch: Any) -> Sums:
        sums = step(self, *batch)
        done[0] += 1
        for hook in hooks:
            hook(done[0], sums)
        return sums

    def measured(*_: Any) -> Energy:
        return Energy({"cpu": ""}, {"cpu": [Counter(lambda: float(done[0]))]}, time.monotonic)

    monkeypatch.setattr(NumpyLearner, "step", counted)
    monkeypatch.setattr(telemetry, "measure", measured)
    return hooks


def test_a_stop_keeps_the_joules_of_all_its_steps(tmp_path: Path, joule_a_step: list[Callable[[int, Sums], None]]) -> None:
    joule_a_step.append(lambda step, _: signal.raise_signal(signal.SIGTERM) if step == 27 else None)
    job = [*SMALL, "max_steps=40", f"run={tmp_path}"]
    assert main(job) == 75
    joule_a_step.clear()
    assert main(job) == 0
    told = events(tmp_path)
    (stop,) = (e for e in told if e["kind"] == "stop")
    assert stop["step"] >= 27 and stop["joules"] == {"cpu": stop["step"]}
    assert (told[-1]["kind"], told[-1]["joules"]) == ("end", {"cpu": 40.0})
    epochs = [e for e in told if e["kind"] == "epoch"]
    assert sum(e["joules"]["cpu"] for e in epochs) == 40.0 and epochs[0]["joules_per_image"] == pytest.approx(1 / 64, rel=1e-3)


def test_what_steps_took_that_are_not_finite_is_told_and_counted(tmp_path: Path, joule_a_step: list[Callable[[int, Sums], None]]) -> None:
    def spoil(step: int, sums: Sums) -> None:
        if 11 <= step <= 15:
            sums["loss"] = float("inf")

    joule_a_step.append(spoil)
    assert main([*SMALL, "max_steps=30", "log.step_times=true", "guard.nonfinite=skip", f"run={tmp_path}"]) == 0
    told = events(tmp_path)
    assert [e["step"] for e in told if e["kind"] == "nonfinite"] == [15] and 15 not in [e["step"] for e in told if e["kind"] == "step"]
    assert [e["step"] for e in told if e["kind"] == "step_times"] == list(range(1, 31)), "one for each step"
    assert told[-1]["joules"] == {"cpu": 30.0}


class Still:
    """A learner without steps."""

    waits_only_in_communication = True

    class stopwatch:
        @staticmethod
        def read() -> list[Any]:
            return []

    def gpu(self) -> None:
        return None


def test_where_meetings_are_far_apart_each_has_its_look(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    energy = Energy({"cpu": ""}, {"cpu": [Counter(lambda: 50.0 * now[0])]}, lambda: now[0])
    one, train_state, watts = Telemetry(SingleProcessCommunicator(), Still(), energy, ["n1"], Log([])), TrainState(Progress(10, 20)), []  # type: ignore[arg-type]
    one._met_s = one._read_s = now[0]
    for rendezvous in range(4):
        now[0] += 0.7
        sums = one.flags()
        watts.append(one.read(sums, rendezvous, 0.7).get("watts"))
        train_state = train_state.add_energy(sums)
    assert watts == [None, 50.0, 50.0, 50.0], "a meeting after the second would be more than a second after the look before"
    assert one.last(train_state).cpu_j == pytest.approx(50 * 2.8) and one.joules(now=True)["joules.cpu"] == 0


def test_memory_is_that_of_this_process_and_not_of_the_one_that_started_it() -> None:
    ask = "from hvdtrain.train.telemetry.telemetry import host_memory_bytes as most; print(most())"
    big = f"import subprocess, sys; much = bytearray(b'x') * 700_000_000; subprocess.run([sys.executable, '-c', {ask!r}], check=True)"
    said = subprocess.run([sys.executable, "-c", big], capture_output=True, text=True, check=True)
    assert 10e6 < int(said.stdout) < 600e6 and host_memory_bytes() > 10e6
