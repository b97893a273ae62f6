"""Joules of whole jobs: of jobs that stop, and of steps that are not finite."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from hvdtrain.__main__ import main
from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.core.progress import Progress
from hvdtrain.events.log import Log
from hvdtrain.extras.energy.counters import POWERCAP, Counter, EnergyCounters
from hvdtrain.extras.energy.gauge import EnergyGauge
from hvdtrain.extras.energy.meter import EnergyMeter
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.telemetry.telemetry import Telemetry


class Metered(torch.nn.Module):
    """A user's model that counts its steps; `before_step` is called with the number of each."""

    steps: ClassVar[int] = 0
    before_step: ClassVar[Callable[[int], float]]

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.head = torch.nn.Linear(shape[0] * shape[1] * shape[2], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or not len(x):
            return self.head(x.flatten(1))
        Metered.steps += 1
        return self.head(x.flatten(1)) * Metered.before_step(Metered.steps)


JOB = [
    f"model.name={__name__}:Metered",
    "log.every_steps=5",
    "comm.engine=single",
    "speed.device=cpu",
]


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def joule_a_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel whose files say that each training step takes one joule of a processor."""
    zone = POWERCAP / "intel-rapl:0"
    files: dict[Path, Callable[[], str]] = {
        zone / "name": lambda: "package-0",
        zone / "energy_uj": lambda: f"{10**6 * Metered.steps}",
        zone / "max_energy_range_uj": lambda: "262143328850",
    }
    read_text = Path.read_text
    glob = Path.glob
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda path, *more, **options: files.get(path, lambda: read_text(path, *more, **options))(),
    )
    monkeypatch.setattr(
        Path,
        "glob",
        lambda path, pattern: iter([zone]) if path == POWERCAP else glob(path, pattern),
    )
    Metered.steps = 0
    Metered.before_step = lambda step: 1.0
    yield
    del Metered.before_step


def test_a_stop_keeps_the_joules_of_all_its_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop_at_27(step: int) -> float:
        if step == 27:
            signal.raise_signal(signal.SIGTERM)
        return 1.0

    Metered.before_step = stop_at_27
    job = [*JOB, "max_steps=40", f"run={tmp_path}"]
    assert main(job) == 75
    Metered.before_step = lambda step: 1.0
    assert main(job) == 0
    assert "\nenergy  processors by RAPL\n" in capsys.readouterr().out
    found = events(tmp_path)
    assert [e["energy"] for e in found if e["kind"] == "start"] == [{"cpu": ""}] * 2
    (stop,) = (e for e in found if e["kind"] == "stop")
    assert stop["step"] >= 27 and stop["joules"] == {"cpu": stop["step"]}
    assert (found[-1]["kind"], found[-1]["joules"]) == ("end", {"cpu": 40.0})
    epochs = [e for e in found if e["kind"] == "epoch"]
    assert sum(e["joules"]["cpu"] for e in epochs) == 40.0 and epochs[0][
        "joules_per_sample"
    ] == pytest.approx(1 / 64, rel=1e-3)


def test_the_joules_of_steps_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    Metered.before_step = lambda step: float("inf") if 11 <= step <= 15 else 1.0
    assert (
        main(
            [*JOB, "max_steps=30", "log.step_times=true", "guard.nonfinite=skip", f"run={tmp_path}"]
        )
        == 0
    )
    found = events(tmp_path)
    assert [e["step"] for e in found if e["kind"] == "nonfinite"] == [15] and 15 not in [
        e["step"] for e in found if e["kind"] == "step"
    ]
    assert [e["step"] for e in found if e["kind"] == "step_times"] == list(range(1, 31)), (
        "one for each step"
    )
    assert found[-1]["joules"] == {"cpu": 30.0}


class Idle:
    """A learner without steps."""

    waits_only_in_communication = True

    class stopwatch:
        @staticmethod
        def read() -> list[Any]:
            return []

    def gpu(self) -> None:
        return None

    def read_waited(self) -> None:
        return None

    def read_updates(self) -> list[Any]:
        return []


def test_where_sync_points_are_far_apart_the_counters_are_read_in_time() -> None:
    now = [100.0]
    counters = EnergyCounters(
        {"cpu": ""}, {"cpu": [Counter(lambda: 50.0 * now[0])]}, lambda: now[0]
    )
    meter = EnergyMeter(counters, 0, lambda: now[0])
    train_state = TrainState(Progress(10, 20))
    watts = []
    alone = SingleProcessCommunicator()
    learner: Any = Idle()
    gauges = [EnergyGauge(alone, learner, meter)]
    telemetry = Telemetry(alone, learner, ["n1"], Log([]), gauges=gauges)
    for step in range(4):
        now[0] += 0.7
        sums = telemetry.sync_sums()
        watts.append(telemetry.sync_fields(sums, step, 0.7).get("watts"))
        train_state = train_state.add_energy(sums)
    assert watts == [None, 50.0, 50.0, 50.0], (
        "the sync point after the second would be more than a second after the first reading"
    )
    assert (
        telemetry.finish(train_state).cpu_j == pytest.approx(50 * 2.8)
        and meter.read_sums()["joules.cpu"] == 0
    )
