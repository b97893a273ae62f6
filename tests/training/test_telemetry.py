"""Telemetry of jobs: phases, the slowest rank, memory, energy, traces; and that docs/events.md
lists the fields of all events."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from documented_events import check_documented
from ranks import implemented, mpirun, needs_horovod

from hvdtrain.__main__ import main
from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.comm.on_all_ranks import allreduce_sums
from hvdtrain.config.read import configure
from hvdtrain.core.extras import implementation
from hvdtrain.core.progress import Progress
from hvdtrain.events.log import Event, Log
from hvdtrain.frameworks.stopwatch import PHASES, HostStopwatch, phase_times, total
from hvdtrain.tasks.classification import Classification, without_statistics
from hvdtrain.training.progress.event_fields import energy_fields, epoch_energy, job_energy
from hvdtrain.training.progress.train_state import Reached, TrainState, from_json, to_json
from hvdtrain.training.progress.triggers import after_evaluation, stop_reason
from hvdtrain.training.telemetry.mesh import slowest
from hvdtrain.training.telemetry.telemetry import Telemetry, peak_memory_bytes

ROOT = Path(__file__).parents[2]
HAS_PROFILER = implementation("profile.steps") is not None
ENV = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])}


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def test_phase_times_add_up_a_phase_that_comes_twice() -> None:
    pieces = [
        ("data", 1.0),
        ("forward", 2.0),
        ("backward", 3.0),
        ("forward", 4.0),
        ("", 50.0),
        ("data", 5.0),
        ("compute", 6.0),
    ]
    steps = phase_times(pieces)
    assert steps == [{"data": 1.0, "forward": 6.0, "backward": 3.0}, {"data": 5.0, "compute": 6.0}]
    assert total(steps) == {"data": 6.0, "forward": 6.0, "backward": 3.0, "compute": 6.0}
    assert total([]) == {}


def test_a_stopwatch_measures_from_data_to_the_end_and_nothing_without_data() -> None:
    waits: list[int] = []
    watch = HostStopwatch(lambda: waits.append(1))
    for phase in ("forward", "backward", ""):
        watch.enter(phase)
    assert watch.read() == [] and not waits
    for phase in ("data", "forward", "backward", "communication", "backward", "update", ""):
        watch.enter(phase)
    (step,) = watch.read()
    assert (
        list(step) == ["data", "forward", "backward", "communication", "update"] and len(waits) == 7
    )
    assert all(seconds >= 0 for seconds in step.values()) and watch.read() == []


class Three(SingleProcessCommunicator):
    """Rank 1 of three, whose neighbours' rows of log.step_times are given."""

    rank = 1
    size = 3

    def __init__(self, others: list[np.ndarray]) -> None:
        self.others = others

    def allgather_object(self, thing: Any) -> list[Any]:
        return [thing] * 3

    def allgather(self, x: np.ndarray, name: str) -> np.ndarray:
        return np.concatenate([self.others[0], x, self.others[1]])


class TwoSteps:
    """A learner whose stopwatch shows two steps."""

    waits_only_in_communication = True
    stopwatch = SimpleNamespace(
        read=lambda: [
            {"data": 0.001, "forward": 0.010, "backward": 0.020, "communication": 0.005},
            {"data": 0.003, "forward": 0.010, "backward": 0.040, "communication": 0.005},
        ],
        enter=lambda phase: None,
    )

    def gpu(self) -> None:
        return None

    def read_waited(self) -> None:
        return None

    def read_updates(self) -> list[Any]:
        return []


def phases_of(**ms: float) -> list[float]:
    return [ms.get(phase, 0.0) / 1e3 for phase in PHASES]


def test_the_slowest_rank_is_the_one_with_most_work_of_its_own() -> None:
    emitted: list[Event] = []
    others = [
        np.array(
            [
                [
                    phases_of(data=2, forward=10, backward=10, communication=60),
                    phases_of(forward=20, communication=70),
                ]
            ]
        ),
        np.array([[phases_of(data=6, forward=20, backward=20), phases_of(forward=80)]]),
    ]
    communicator = Three(others)
    learner: Any = TwoSteps()
    hosts = ["n1", "n2", "n3"]
    one = Telemetry(communicator, learner, hosts, Log([emitted.append]), step_times=True)
    flags = one.sync_sums()
    assert flags["rank.work"].tolist() == pytest.approx([0.0, 0.084, 0.0]), (
        "all but communication, in its own place"
    )
    assert flags["phase.data"] == pytest.approx(0.004) and flags[
        "phase.communication"
    ] == pytest.approx(0.010)
    assert 20e6 < flags["rank.memory"][1] < 50e9 and flags["rank.memory"][[0, 2]].tolist() == [0, 0]
    sums = dict.fromkeys((key for key in flags if key.startswith("phase.")), 0.0) | {
        "phase.data": 0.012, "phase.forward": 0.150, "phase.backward": 0.090, "phase.communication": 0.140,  # noqa: E501
        "rank.work": np.array([0.042, 0.084, 0.126]), "rank.memory": np.array([1e9, 3e9, 2e9]), "rank.gpu_memory": np.zeros(3),  # noqa: E501
    }  # fmt: skip
    fields = one.sync_fields(sums, 8, 0.150)
    assert fields["phase_ms"] == {
        "data": 2.0,
        "forward": 25.0,
        "backward": 15.0,
        "communication": 23.333,
        "other": 9.667,
    }
    assert fields["work_ms"] == [21.0, 42.0, 63.0] and (
        fields["slowest_rank"],
        fields["slowest_host"],
    ) == (2, "n3")
    assert (
        fields["memory_mb"] == 3000.0
        and fields["steps"] == 2
        and "watts" not in fields
        and "gpu_memory_mb" not in fields
    )
    first, second = emitted
    assert (first.kind, first.step, second.step) == ("step_times", 7, 8)
    assert first.fields["work_ms"] == [22.0, 31.0, 46.0] and first.fields["slowest_rank"] == 2
    assert first.fields["phase_ms"] == {
        "data": 3.0,
        "forward": 13.333,
        "backward": 16.667,
        "communication": 21.667,
    }
    assert second.fields["work_ms"] == [20.0, 53.0, 80.0]
    assert one.epoch_fields(TrainState(Progress(10, 20)), {}, 5.0)["rank_work_ms"] == [
        21.0,
        42.0,
        63.0,
    ]
    assert one.epoch_fields(TrainState(Progress(10, 20)), {}, 5.0)["rank_work_ms"] == [
        0.0,
        0.0,
        0.0,
    ], "the next epoch begins"


def test_ranks_of_a_pipeline_are_compared_with_those_of_their_stage() -> None:
    found = slowest(
        np.array([10.0, 10.0, 12.0, 30.0, 31.0, 30.0]),
        np.array([0, 0, 0, 1, 1, 1]),
        ["n1"] * 3 + ["n2"] * 3,
    )
    assert found == {
        "work_ms": [10.0, 10.0, 12.0], "slowest_rank": 2, "slowest_host": "n1", "stage_work_ms": [10.0, 30.0], "slowest_stage": 1,  # noqa: E501
    }  # fmt: skip
    assert slowest(np.array([10.0, 30.0]), np.array([0, 1]), ["n1", "n2"])["slowest_rank"] == 1


def test_sums_and_rows_of_ranks_travel_together() -> None:
    class Doubling(SingleProcessCommunicator):
        def allreduce(self, x: Any, name: str, op: str = "sum") -> Any:
            return 2 * x

    sums = allreduce_sums(
        Doubling(), {"loss": 1.5, "rank.work": np.array([1.0, 2.0]), "count": 3}, "t"
    )
    assert sums["loss"] == 3.0 and sums["count"] == 6.0 and sums["rank.work"].tolist() == [2.0, 4.0]


def test_energy_of_an_epoch_per_image_without_kinds_that_are_not_measured() -> None:
    now = TrainState(Progress(100, 300, 4, 200), sums={"loss": 1.0, "right": 2.0, "count": 100})
    used = now.add_energy({"joules.gpu": 30.0, "joules.cpu": 6.0}).add_energy(
        {"joules.gpu": 4.0, "joules.cpu": math.nan}
    )
    assert job_energy(used, ["gpu", "cpu"]) == {"gpu": 34.0}
    assert energy_fields(used, ["gpu", "cpu"], 10.0) == {
        "joules": {"gpu": 34.0},
        "wh": 0.0094,
        "watts": 3.4,
        "joules_per_sample": 0.34,
    }
    assert energy_fields(used, [], 10.0) == {"joules": {}}
    evaluated = used.after_evaluation(0.5, None, 9.0)
    assert (job_energy(evaluated, ["gpu"]), epoch_energy(evaluated, ["gpu"])) == (
        {"gpu": 34.0},
        {"gpu": 0.0},
    )


def test_memory_is_that_of_this_process_and_not_of_the_one_that_started_it() -> None:
    ask = (
        "from hvdtrain.training.telemetry.telemetry import peak_memory_bytes as most; print(most())"
    )
    big = (
        "import subprocess, sys; much = bytearray(b'x') * 700_000_000; "
        f"subprocess.run([sys.executable, '-c', {ask!r}], check=True)"
    )
    said = subprocess.run([sys.executable, "-c", big], capture_output=True, text=True, check=True)
    assert 10e6 < int(said.stdout) < 600e6 and peak_memory_bytes() > 10e6


TASK = without_statistics((8, 8, 1), 10)


def test_each_target_is_reached_once_with_its_time_images_and_joules() -> None:
    config = configure(None, ["log.targets=[0.9,0.5]", "stop.target=0.6"])
    start = TrainState(Progress(100, 300, 4, 120), epoch_s=2.0).add_energy(
        {"joules.gpu": 8.0, "joules.cpu": 0.0}
    )
    first, new = after_evaluation(
        config, TASK, start, {"right": 70.0, "count": 100, "loss": 1.0}, 5.0, ["gpu"]
    )
    assert new == [Reached(0.5, 0.7, 5.0, 1.2, 120, 8.0), Reached(0.6, 0.7, 5.0, 1.2, 120, 8.0)]
    assert (first.best, first.best_epoch, first.trained_s, first.evaluated_s) == (0.7, 1, 2.0, 5.0)
    second, new = after_evaluation(
        config, TASK, first, {"right": 60.0, "count": 100, "loss": 1.0}, 6.0, []
    )
    assert new == [] and (second.best, second.best_epoch, second.last) == (0.7, 1, 0.6)
    third, new = after_evaluation(
        config, TASK, second, {"right": 95.0, "count": 100, "loss": 1.0}, 7.0, []
    )
    assert (
        [one.target for one in new] == [0.9] and new[0].joules is None and len(third.reached) == 3
    )
    back = from_json(json.loads(json.dumps(to_json(third))))
    assert back == third, "a resumed job does not reach them again"


def test_a_target_below_the_best_accuracy_so_far_is_left_out() -> None:
    config = configure(None, ["log.targets=[0.5,0.8]"])
    now = TrainState(Progress(100, 300, 4, 120), best=0.6, best_epoch=1)
    _, new = after_evaluation(
        config, TASK, now, {"right": 90.0, "count": 100, "loss": 1.0}, 5.0, []
    )
    assert [one.target for one in new] == [0.8]


def test_where_lower_is_better_targets_patience_and_the_best_follow() -> None:
    """An objective of min: 3, 2, 2.5 and NaN, with targets 2.6 and 2.2 and the stop at 2.4."""

    class Lower(Classification):
        objective = "loss"

    task = Lower((8, 8, 1), 10, np.zeros(1), np.ones(1))
    config = configure(
        None,
        ["log.targets=[2.2,2.6]", "stop.target=2.4", "stop.target_for=2", "task.name=mine:build"],
    )
    now = TrainState(Progress(10, 300), objective="loss", better="min")
    found = []
    for epoch, loss in enumerate((3.0, 2.0, 2.5, math.nan), start=1):
        now = replace(now, progress=Progress(10, 300, epoch, 10 * epoch))
        now, reached = after_evaluation(
            config, task, now, {"loss": 10 * loss, "right": 0.0, "count": 10}, 1.0, []
        )
        found.append((now.best, now.best_epoch, now.at_target, [one.target for one in reached]))
    assert found == [
        (3.0, 1, 0, []),
        (2.0, 2, 1, [2.6, 2.4, 2.2]),
        (2.0, 2, 0, []),
        (2.0, 2, 0, []),
    ]
    assert replace(now, last=2.0).rank_of_last < replace(now, last=3.0).rank_of_last


@pytest.mark.parametrize(
    ("better", "min_delta", "values", "in_a_row"),
    [
        ("max", 0.0, (0.5, 0.6, 0.6, 0.59, 0.61), (0, 0, 1, 2, 0)),
        (
            "max",
            0.25,
            (0.5, 0.625, 0.75, 1.0, 1.125),
            (0, 1, 2, 0, 1),
        ),  # small steps add up; by just as much is not by more
        ("min", 0.25, (3.0, 2.75, 2.5, 3.0, math.nan, 2.0), (0, 1, 0, 1, 2, 0)),
    ],
)
def test_patience_counts_evaluations_in_a_row_without_a_better_one(
    better: Any, min_delta: float, values: Any, in_a_row: Any
) -> None:
    """By hand, as EarlyStopping of Keras and Lightning: only a value that is better by more than
    min_delta is the next to beat."""
    config = configure(None, ["stop.patience=2", f"stop.min_delta={min_delta}"])
    now = TrainState(Progress(10, 300), objective="quality", better=better)
    found = []
    reasons = []
    for epoch, value in enumerate(values, start=1):
        now = replace(now, progress=Progress(10, 300, epoch, 10 * epoch)).after_evaluation(
            value, None, 1.0, min_delta
        )
        now = from_json(json.loads(json.dumps(to_json(now))))  # resumed
        found.append(now.without_better)
        reasons.append(stop_reason(config, now))
    assert tuple(found) == in_a_row
    assert [bool(reason) for reason in reasons] == [count >= 2 for count in in_a_row]
    assert now.best == (max if better == "max" else min)(
        value for value in values if not math.isnan(value)
    )
    if min_delta:
        assert (
            f"2 evaluations without a better quality than {2.5 if better == 'min' else 0.5:.4f} "
            "by more than 0.25" in "".join(reasons)
        )


def test_a_checkpoint_of_an_older_version_is_read() -> None:
    now = TrainState(Progress(100, 300, 4, 120), last=0.5, best=0.5, best_epoch=1)
    tree = json.loads(json.dumps(to_json(now)))
    for name in (
        "best",
        "best_epoch",
        "trained_s",
        "trained_images",
        "evaluated_s",
        "gpu_j",
        "cpu_j",
        "epoch_gpu_j",
        "epoch_cpu_j",
        "reached",
        "objective",
        "better",
        "without_better",
        "to_beat",
    ):
        del tree[name]
    tree["accuracy"] = tree.pop("last")
    old = from_json(tree)
    assert old.last == 0.5 and math.isnan(old.best) and math.isnan(old.gpu_j) and old.reached == ()


def test_a_range_of_steps_in_a_file_is_no_number_of_seconds(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("profile:\n  steps: 10:15\n")  # which YAML 1.1 reads as 615
    config = configure(str(tmp_path / "c.yaml"), [])
    assert config.profile.steps == "10:15"


def ranges(trace: Path) -> list[str]:
    found = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [
        e["name"].removeprefix("hvdtrain: ")
        for e in found
        if e.get("cat") == "user_annotation" and e["name"].startswith("hvdtrain: ")
    ]


@pytest.fixture(scope="module")
def late_job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Two ranks under Horovod, the second 40 ms late in each step, so much that other load on the
    cores does not hide it."""
    folder = tmp_path_factory.mktemp("late")
    words = [
        "model.name=faulty:Late",
        "model.ms=40",
        "epochs=2",
        "batch.size=128",
        "log.step_times=true",
        *implemented("profile.steps=3:5").split(),
    ]
    words += [
        "log.targets=[0.1]",
        "log.per_rank=true",
        "guard.equal_steps=null",
        "comm.engine=horovod",
        f"run={folder / 'run'}",
    ]
    env = {**ENV, "HOROVOD_TIMELINE": str(folder / "timeline.json")}
    return folder, mpirun(2, ["-m", "hvdtrain", *words], env=env)


@pytest.mark.clock
@needs_horovod
def test_a_late_rank_is_named_and_the_others_wait_for_it(late_job: tuple[Path, Any]) -> None:
    folder, result = late_job
    assert result.returncode == 0, result.stderr
    emitted = events(folder / "run")
    steps = [e for e in emitted if e["kind"] == "step_times"]
    assert [e["step"] for e in steps] == list(range(1, 24)), "one of each step: 2 x 1437 / 128"
    late = [e for e in steps[5:] if e["slowest_rank"] == 1 and e["work_ms"][2] >= 40]
    assert len(late) >= 16, steps
    (first, *_, last) = [e for e in emitted if e["kind"] == "step"]
    assert (
        last["slowest_rank"] == 1
        and last["work_ms"][2] >= 40
        and last["phase_ms"]["communication"] > 3
    )
    assert first["steps"] == 10 and sum(first["phase_ms"].values()) == pytest.approx(
        1e3 * first["window_s"] / 10, rel=0.01
    )
    epoch = [e for e in emitted if e["kind"] == "epoch"][-1]
    assert epoch["rank_work_ms"][1] > epoch["rank_work_ms"][0] + 20 and epoch["joules"].keys() <= {
        "cpu"
    }
    (target,) = [e for e in emitted if e["kind"] == "target"]
    assert target["target"] == 0.1 and target["epochs"] == pytest.approx(target["samples"] / 1437)


@needs_horovod
def test_each_rank_has_its_log_its_trace_and_its_name_on_its_warnings(
    late_job: tuple[Path, Any],
) -> None:
    folder, result = late_job
    # torch.profiler's own words
    said = "\n".join(
        line
        for line in result.stderr.splitlines()
        if "USDT" not in line and not line.startswith("ERROR:")
    )
    assert re.fullmatch(
        r"rank 1 on \S+: WARNING: .*\.py:\d+: UserWarning: this rank is late\s+.*\s*", said
    ), said
    logs = [(folder / "run" / "ranks" / f"rank-0000{rank}.log").read_text() for rank in (0, 1)]
    for rank, text in enumerate(logs):
        assert re.search(rf"rank {rank} of 2 on \S+, process \d+: Late, 650 parameters", text), text
        assert text.count("ms of each of ") == 4 and "forward" in text
    assert "this rank is late" in logs[1] and "this rank is late" not in logs[0]
    for rank in (0, 1) if HAS_PROFILER else ():
        found = ranges(folder / "run" / "profile" / f"rank-0000{rank}" / "trace.json.gz")
        assert [name for name in found if name != "data"].count("forward") == 2 and found.count(
            "update"
        ) == 2, found
        assert set(found) == {"data", "forward", "backward", "communication", "update"}
    timeline = (folder / "timeline.json").read_text()
    assert "ALLREDUCE" in timeline and "gradient" not in timeline, (
        "Horovod's own names of gradients"
    )


@needs_horovod
def test_events_are_as_documented(
    late_job: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = late_job
    seen = check_documented(events(folder / "run"))
    assert seen == {
        "start",
        "started",
        "step",
        "step_times",
        "epoch",
        "target",
        "checkpoint",
        "end",
        *["profile"] * HAS_PROFILER,
    }
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "support"))
    bad = [
        "model.name=faulty:Faulty",
        "model.bad_rank=0",
        "model.bad_step=15",
        f"model.stamp={tmp_path / 'stamp'}",
        "run=bad",
    ]
    assert main(bad) == 1
    last = events(tmp_path / "bad")[-1]
    assert (
        check_documented([last]) == {"failed"}
        and last["reason"] == "ArithmeticError: forward 15 was made to fail"
    )
    assert (last["exit_code"], last["step"]) == (1, 13)
    assert main(
        ["model.name=linear", "epochs=2", "run=stop", "guard.max_time=1", "log.every_steps=1"]
    ) in (0, 75)
    check_documented(events(tmp_path / "stop"))


def test_a_step_of_every_frame_has_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = {
        "torch": {"data", "forward", "backward", "communication", "update", "other"},
        "numpy": {"data", "forward", "backward", "communication", "update", "other"},
        "jax": {"data", "compute", "update", "other"},
    }
    for framework, names in wanted.items():
        assert (
            main(
                [
                    f"framework={framework}",
                    "model.name=linear",
                    "max_steps=4",
                    f"run={framework}",
                    "log.step_times=true",
                ]
            )
            == 0
        )
        (step,) = [e for e in events(tmp_path / framework) if e["kind"] == "step"]
        assert set(step["phase_ms"]) == names, framework
        assert (
            0
            < sum(step["phase_ms"].values())
            == pytest.approx(1e3 * step["window_s"] / 4, abs=0.01)
        )
    assert main(["framework=jax", "model.name=linear", "max_steps=4", "run=plain"]) == 0
    (step,) = [e for e in events(tmp_path / "plain") if e["kind"] == "step"]
    assert set(step["phase_ms"]) == {"data", "other"}, "what is only started takes no time"
