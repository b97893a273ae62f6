"""Trackers: what each wrote is read back by its own reader; and the background sink, for which
training never waits."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import HANG_S
from waiting import wait_until

from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.batch import BatchConfig
from hvdtrain.config.sections.data import DataConfig
from hvdtrain.config.sections.model import ModelConfig
from hvdtrain.errors import UserError
from hvdtrain.events.background_sink import BackgroundSink
from hvdtrain.events.log import Event
from hvdtrain.events.redaction import HIDDEN, is_secret_key
from hvdtrain.extras.trackers.events.trackers import mlflow, tensorboard, wandb
from hvdtrain.extras.trackers.tracker_data import flat_config, redacted_config, scalars

T0 = 1_700_000_000.0
CONFIG = Config(
    batch=BatchConfig(size=96),
    data=DataConfig(root="s3://me:pw@host/set"),
    model=ModelConfig(api_token="xyz"),
)


def step(number: int, loss: float, kind: str = "step") -> Event:
    fields = {
        "loss": loss,
        "accuracy": 0.5,
        "lr": 0.25,
        "batch": 96,
        "phase_ms": {"forward": 2.0, "other": 0.5},
        "samples_per_s": math.inf,
    }
    return Event(T0 + number, kind, number, fields)


def epoch(number: int, accuracy: float) -> Event:
    return Event(
        T0 + number + 0.5,
        "epoch",
        number,
        {"epoch": 1, "val_loss": 0.75, "val_accuracy": accuracy, "joules": {"cpu": 12.0}},
    )


def start(number: int) -> Event:
    return Event(
        T0 + number,
        "start",
        number,
        {"lines": ["ranks   2", "data    digits"], "ranks": 2, "seconds": 0.0},
    )


def over(number: int, kind: str, **fields: Any) -> Event:
    return Event(
        T0 + number + 1, kind, number, {"reason": "epochs=1", "best_accuracy": 0.875, **fields}
    )


# A job of two starts: the first stops after step 30, but its newest checkpoint is of step 20, so
# the second repeats step 30.
FIRST = [start(0), step(10, 2.5), step(20, 2.0), epoch(20, 0.75), step(30, 9.0), over(30, "stop")]
SECOND = [start(20), step(30, 1.5), step(40, 1.25), epoch(40, 0.875), over(40, "end")]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (
        "MLFLOW_TRACKING_URI",
        "MLFLOW_EXPERIMENT_NAME",
        "WANDB_MODE",
        "WANDB_API_KEY",
        "WANDB_PROJECT",
        "WANDB_NAME",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    folder = tmp_path / "digits-mlp"
    folder.mkdir()
    return folder


def send(
    build: Callable[[Config, Path], Any], run: Path, *runs: list[Event], config: Config = CONFIG
) -> None:
    """As a job does: each start has a sink of its own, on a thread of its own."""
    for events in runs:
        tracker = build(config, run)
        warnings: list[str] = []
        background = BackgroundSink(tracker, "x", warnings.append)
        for event in events:
            background(event)
        assert background.close(HANG_S) and warnings == []


def test_numbers_of_a_step() -> None:
    fields = {
        **{
            "loss": 1.5,
            "accuracy": 0.5,
            "lr": 0.1,
            "batch": 64,
            "epochs": 0.25,
            "of": 10,
            "samples_per_s": 100,
            "steps": 10,
        },
        **{
            "phase_ms": {"forward": 2, "back ward?": 3.5},
            "work_ms": [1.0, 2.0, 4.0],
            "slowest_rank": 3,
            "slowest_host": "n",
        },
        **{
            "memory_mb": 300.0,
            "gpu_memory_mb": None,
            "watts": math.nan,
            "noise_scale": math.inf,
            "lines": ["x"],
            "flag": True,
        },
    }
    assert scalars(Event(T0, "step", 10, fields)) == {
        **{
            "train/loss": 1.5,
            "train/accuracy": 0.5,
            "train/lr": 0.1,
            "train/batch": 64,
            "train/epochs": 0.25,
        },
        **{
            "speed/samples_per_s": 100,
            "speed/phase_ms/forward": 2,
            "speed/phase_ms/back ward_": 3.5,
            "speed/slowest_rank": 3,
        },
        **{
            "speed/work_ms/min": 1,
            "speed/work_ms/median": 2,
            "speed/work_ms/max": 4,
            "memory/host_mb": 300,
        },
    }


def test_numbers_of_the_other_kinds() -> None:
    both = {"joules": {"gpu": 30.0, "cpu": 12.0}, "joules_per_sample": 0.5, "samples_per_s": 50.0}
    measured = {
        "watts": 21.0,
        "wh": 0.25,
        "noise_scale": 900.0,
        "rank_work_ms": [1.0, 2.0],
        "val_count": 360,
    }
    trained = {
        "epoch": 2,
        "epoch_s": 1.5,
        "train_loss": 0.5,
        "train_accuracy": 0.9,
        "val_loss": 0.6,
        "val_accuracy": 0.8,
        "best_accuracy": 0.85,
    }
    assert scalars(Event(T0, "epoch", 20, {**trained, **both, **measured})) == {
        **{
            "val/loss": 0.6,
            "val/accuracy": 0.8,
            "val/best_accuracy": 0.85,
            "epoch/number": 2,
            "epoch/seconds": 1.5,
        },
        **{
            "epoch/train_loss": 0.5,
            "epoch/train_accuracy": 0.9,
            "epoch/samples_per_s": 50,
            "epoch/noise_scale": 900,
        },
        **{
            "energy/joules/gpu": 30,
            "energy/joules/cpu": 12,
            "energy/joules_per_sample": 0.5,
            "energy/watts": 21,
            "energy/wh": 0.25,
        },
    }
    target = {
        "target": 0.9,
        "val_accuracy": 0.91,
        "seconds": 7.5,
        "epochs": 2.0,
        "samples": 3000,
        "joules": None,
    }
    numbers = {"seconds": 7.5, "epochs": 2, "samples": 3000, "val_accuracy": 0.91}
    assert scalars(Event(T0, "target", 20, target)) == {
        f"target/0.9/{name}": number for name, number in numbers.items()
    }
    for kind in ("end", "stop"):
        assert scalars(over(40, kind, exit_code=0, **both)) == {
            **{"job/best_accuracy": 0.875, "job/joules/gpu": 30, "job/joules/cpu": 12},
            **{"job/joules_per_sample": 0.5, "job/samples_per_s": 50},
        }
    assert scalars(Event(T0, "started", 1, {"start_s": {"first step": 0.5}})) == {
        "start_s/first step": 0.5
    }
    assert scalars(Event(T0, "checkpoint", 1, {"write_s": 0.5})) == {"checkpoint/write_s": 0.5}
    assert scalars(step(10, 1.0, "step_times")) == scalars(start(0)) == {}


def test_the_configuration_is_redacted() -> None:
    options = {
        "max_tokens": 5,
        "password": "",
        "hub": {"Secret_Key": "q", "urls": ["http://u:p@h/x"]},
    }
    redacted = redacted_config(Config(model=ModelConfig(name="mlp", **options)))["model"]
    assert {key: redacted[key] for key in ("name", *options)} == {
        **{
            "name": "mlp",
            "max_tokens": 5,
            "password": "",
            "hub": {"Secret_Key": "***", "urls": ["http://***@h/x"]},
        },
    }
    flat = flat_config(CONFIG)
    assert (flat["batch.size"], flat["data.root"], flat["model.api_token"]) == (
        "96",
        "s3://***@host/set",
        "***",
    )
    assert (flat["stop.steps"], flat["recipe.chain"], flat["log.noise_scale"]) == (
        "null",
        "[]",
        "false",
    )


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_package_is_a_user_error(
    name: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda package: None if package == name else real(package)
    )
    module = {"tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb}[name]
    with pytest.raises(UserError) as caught:
        module.build(CONFIG, run)  # type: ignore[attr-defined]
    assert (
        str(caught.value)
        == f"{name} is not installed\n  where: log.trackers\n  fix: pip install 'hvdtrain[{name}]'"
    )


def test_nothing_is_imported_before_the_first_event(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)  # an import would fail
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: True)
    for module in (tensorboard, mlflow, wandb):
        module.build(CONFIG, run).close()  # type: ignore[attr-defined]
    assert list(run.iterdir()) == []


def test_tensorboard_reads_back(run: Path) -> None:
    """In TensorBoard's own reader the repeated step has its second value only."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    send(tensorboard.build, run, FIRST, SECOND)
    reader = EventAccumulator(str(run / "tensorboard" / run.name))
    reader.Reload()
    assert [(s.step, s.value, s.wall_time) for s in reader.Scalars("Loss/train")] == [
        (number, loss, T0 + number)
        for number, loss in ((10, 2.5), (20, 2.0), (30, 1.5), (40, 1.25))
    ]
    assert [(s.step, s.value) for s in reader.Scalars("Accuracy/val")] == [(20, 0.75), (40, 0.875)]
    assert [(s.step, s.value) for s in reader.Scalars("speed/phase_ms/forward")] == [
        (n, 2.0) for n in (10, 20, 30, 40)
    ]
    # the value at the stop is replaced
    assert [(s.step, s.value) for s in reader.Scalars("job/best_accuracy")] == [(40, 0.875)]
    assert "speed/samples_per_s" not in reader.Tags()["scalars"]  # infinite
    (text,) = reader.Tensors("config/text_summary")[-1].tensor_proto.string_val
    assert (
        b"| key | value |\n| --- | --- |\n" in text
        and b"| batch.size | `96` |\n" in text
        and b"xyz" not in text
    )
    assert reader.SummaryMetadata("config/text_summary").plugin_data.plugin_name == "text"
    (header,) = reader.Tensors("header/text_summary")[-1].tensor_proto.string_val
    assert header == b"    ranks   2\n    data    digits"


def test_tensorboard_has_the_run_under_its_name_and_curves_first(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard sorts groups of tags as texts; it opens with the first plug-in that has data."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.backend.event_processing.io_wrapper import GetLogdirSubdirectories

    monkeypatch.chdir(run)
    sink = tensorboard.build(CONFIG, Path())
    sink(FIRST[0])
    (folder,) = GetLogdirSubdirectories("tensorboard")
    assert Path(folder) == Path("tensorboard") / run.name
    (file,) = Path(folder).iterdir()
    # no text yet
    assert [event.WhichOneof("what") for event in EventFileLoader(str(file)).Load()] == [
        "file_version",
        "session_log",
    ]
    for event in FIRST[1:]:
        sink(event)
    sink.close()
    reader = EventAccumulator(folder)
    reader.Reload()
    groups = list(dict.fromkeys(tag.partition("/")[0] for tag in sorted(reader.Tags()["scalars"])))
    assert groups[:2] == ["Accuracy", "Loss"] and len(groups) > 3
    assert len(reader.Tags()["tensors"]) == 2


def test_mlflow_reads_back(run: Path) -> None:
    pytest.importorskip("mlflow")
    send(mlflow.build, run, FIRST)
    from mlflow.tracking import MlflowClient

    client = MlflowClient((run / "mlflow").as_uri())
    run_id = json.loads((run / "mlflow_run.json").read_text())["run_id"]
    assert client.get_run(run_id).info.status == "KILLED"
    again = mlflow.build(Config(batch=BatchConfig(size=48)), run)
    for event in SECOND:
        again(event)
        assert client.get_run(run_id).info.status == "RUNNING"
    again.close()
    experiment = client.get_experiment_by_name("hvdtrain")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])  # one, for both runs
    assert (found.info.run_id, found.info.run_name, found.info.status) == (
        run_id,
        "digits-mlp",
        "FINISHED",
    )
    assert found.info.end_time == (T0 + 41) * 1000
    losses = [
        (m.step, m.value, m.timestamp) for m in client.get_metric_history(run_id, "train/loss")
    ]
    assert losses == [
        (n, loss, (T0 + n) * 1000)
        for n, loss in ((10, 2.5), (20, 2.0), (30, 9.0), (30, 1.5), (40, 1.25))
    ]
    assert [(m.step, m.value) for m in client.get_metric_history(run_id, "energy/joules/cpu")] == [
        (20, 12.0),
        (40, 12.0),
    ]
    params = found.data.params
    assert (params["batch.size"], params["model.api_token"], params["recipe.scale"]) == (
        "96",
        "***",
        "linear",
    )
    assert (
        found.data.tags["resumed.batch.size"] == "48"
        and "resumed.recipe.scale" not in found.data.tags
    )


def test_mlflow_of_a_failed_job_on_the_users_server(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (run / "else where").as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    # else a text that is too long is cut by mlflow, with a warning
    monkeypatch.setenv("MLFLOW_TRUNCATE_LONG_VALUES", "false")
    long = Config(model=ModelConfig(name="a.B", **{"k" * 300: "v" * 7000}))
    failed = Event(T0, "failed", 10, {"reason": "x", "exit_code": 83})
    send(
        mlflow.build, run, [start(0), step(10, 1.0), failed], [start(0), step(10, 2.0)], config=long
    )
    from mlflow.tracking import MlflowClient

    client = MlflowClient((run / "else where").as_uri())
    experiment = client.get_experiment_by_name("mine")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    # two: the second starts over, at step 0
    assert [made.info.status for made in found] == [
        "FAILED",
        "FAILED",
    ]
    assert found[0].data.params["model." + "k" * 234] == "v" * 6000
    assert not (run / "mlflow").exists()


def test_mlflow_starts_a_new_run_where_the_id_is_unknown(run: Path) -> None:
    """Another server does not know the id; a file that a crash truncated is not an id."""
    pytest.importorskip("mlflow")
    ids = []
    for text in (json.dumps({"run_id": "0" * 32}), '{"run_'):
        (run / "mlflow_run.json").write_text(text)
        send(mlflow.build, run, SECOND)
        ids.append(json.loads((run / "mlflow_run.json").read_text())["run_id"])
    assert len({*ids, "0" * 32}) == 3
    assert len({folder.name for folder in (run / "mlflow").glob("*/*") if folder.name in ids}) == 2


def wandb_records(file: Path) -> Iterator[bytes]:
    """Of a .wandb file: 7 bytes, then LevelDB's log: blocks of 32768 bytes, chunks (checksum,
    length, kind: 1 full, 2 to 4 parts)."""
    data = file.read_bytes()
    offset = 7
    record = b""
    assert data[:4] == b":W&B"
    while offset + 7 <= len(data):
        if 32768 - offset % 32768 < 7:
            offset += 32768 - offset % 32768
            continue
        length = int.from_bytes(data[offset + 4 : offset + 6], "little")
        kind = data[offset + 6]
        record = (
            data[offset + 7 : offset + 7 + length]
            if kind in (1, 2)
            else record + data[offset + 7 : offset + 7 + length]
        )
        offset += 7 + length
        if kind in (1, 4) and offset <= len(data):
            yield record


def read_wandb(file: Path) -> tuple[list[dict[str, Any]], dict[str, Any], list[int], set[str]]:
    """(rows, configuration, exit codes, kinds of records) of one offline run: all that an upload
    would send."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    config = dict[str, Any]()
    codes = []
    kinds = set()
    for raw in wandb_records(file):
        record = Record.FromString(raw)
        kinds.add(str(record.WhichOneof("record_type")))
        config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if record.HasField("exit"):
            codes.append(record.exit.exit_code)
        if record.HasField("history"):
            rows.append(
                {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                    for item in record.history.item
                }
            )
    return rows, config, codes, kinds


@pytest.mark.in_turn
def test_wandb_reads_back(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("wandb")
    before = sys.exit, sys.excepthook, sys.stdout, sys.stderr
    send(wandb.build, run, FIRST)
    time.sleep(1)  # wandb names the folder of a run by the second
    send(wandb.build, run, SECOND)
    said = capfd.readouterr()
    assert (sys.exit, sys.excepthook, sys.stdout, sys.stderr) == before
    folders = sorted((run.resolve() / "wandb").glob("offline-run-*"))
    assert len(folders) == 2 and said.err == ""
    assert said.out.splitlines() == [
        f"wandb    kept offline; to send it: wandb sync {folder}" for folder in folders
    ]
    run_id = json.loads((run / "wandb_run.json").read_text())["run_id"]
    files = sorted((run / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    wait_until(
        lambda: all(read_wandb(file)[2] for file in files),
        "the end of wandb's own process, which writes after finish()",
    )
    (old, config, stopped, _), (new, _, ended, kinds) = (read_wandb(file) for file in files)
    losses = [(row["step"], row["train/loss"]) for row in old + new if "train/loss" in row]
    assert losses == [(10, 2.5), (20, 2.0), (30, 9.0), (30, 1.5), (40, 1.25)]
    assert [(row["step"], row["val/accuracy"]) for row in new if "val/accuracy" in row] == [
        (40, 0.875)
    ]
    assert {row["speed/phase_ms/forward"] for row in new if "train/loss" in row} == {2.0}
    assert (stopped, ended) == ([75], [0])
    assert (config["batch"]["size"], config["model"]["api_token"], config["data"]["root"]) == (
        96,
        "***",
        "s3://***@host/set",
    )
    # of the console, and of the machine with the command line
    assert not {"output", "output_raw", "environment"} & kinds
    assert not list((run / "wandb").rglob("requirements.txt")) and not list(
        (run / "wandb").rglob("wandb-metadata.json")
    )


def test_wandb_modes(tmp_path: Path) -> None:
    logged_out = {"NETRC": str(tmp_path / "netrc")}
    assert wandb.mode(logged_out) == "offline"
    assert wandb.mode({**logged_out, "WANDB_API_KEY": "k"}) == "online"
    assert wandb.mode({**logged_out, "WANDB_API_KEY": "k", "WANDB_MODE": "offline"}) == "offline"
    (tmp_path / "netrc").write_text("machine wandb.site login user password k\n")
    assert wandb.mode(logged_out) == "offline"
    assert wandb.mode({**logged_out, "WANDB_BASE_URL": "https://wandb.site"}) == "online"
    with pytest.raises(UserError) as caught:
        wandb.mode({**logged_out, "WANDB_MODE": "online"})
    assert str(caught.value) == (
        "WANDB_MODE=online, but there is no key for https://api.wandb.ai\n  where: log.trackers\n"
        "  fix: run wandb login or set WANDB_API_KEY; WANDB_MODE=offline keeps the run in its "
        "folder"
    )


class BlockingTracker:
    """Blocks at its first event until `free` is set."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.begun = threading.Event()
        self.events: list[Event] = []
        self.thread = ""  # the name of the thread that called it
        self.closed = 0  # calls of close()

    def __call__(self, event: Event) -> None:
        self.begun.set()
        assert self.free.wait(HANG_S)
        self.thread = threading.current_thread().name
        self.events.append(event)

    def close(self) -> None:
        self.closed += 1


class FailingTracker:
    """Raises `error` at an event of step `at`, and at close() where `at` is None."""

    def __init__(self, error: BaseException, at: int | None) -> None:
        self.error = error
        self.at = at
        self.steps: list[int] = []

    def __call__(self, event: Event) -> None:
        self.steps.append(event.step)
        if event.step == self.at:
            raise self.error

    def close(self) -> None:
        if self.at is None:
            raise self.error


def test_background_sink_keeps_the_order_and_closes() -> None:
    tracker = BlockingTracker()
    warnings = list[str]()
    background = BackgroundSink(tracker, "log.trackers slow", warnings.append)
    events = [step(n, float(n)) if n % 3 else epoch(n, 0.5) for n in range(100)]
    for event in events:
        background(event)
    assert tracker.events == []  # the calls returned, though the tracker blocks
    tracker.free.set()
    assert background.close(HANG_S) and background.close(0)
    background(step(100, 1.0))
    assert (tracker.events, tracker.closed, warnings, tracker.thread) == (
        events,
        1,
        [],
        "log.trackers slow",
    )


def test_background_sink_drops_the_oldest_step_events_when_full() -> None:
    tracker = BlockingTracker()
    warnings = list[str]()
    background = BackgroundSink(tracker, "log.trackers slow", warnings.append, capacity=4)
    background(start(0))
    assert tracker.begun.wait(HANG_S)
    for event in [
        step(1, 1),
        epoch(2, 0.1),
        step(3, 1),
        epoch(4, 0.2),
        step(5, 1),
        epoch(6, 0.3),
        epoch(7, 0.4),
        over(8, "end"),
    ]:
        background(event)
    tracker.free.set()
    assert background.close(HANG_S)
    assert [(event.kind, event.step) for event in tracker.events] == [
        *(("start", 0), ("epoch", 2), ("epoch", 4), ("epoch", 6), ("epoch", 7), ("end", 8)),
    ]
    assert warnings == [
        "log.trackers slow: too slow: its queue was full and 3 step events were dropped"
    ]


def test_background_sink_thins_out_step_events_only() -> None:
    tracker = BlockingTracker()
    tracker.free.set()
    background = BackgroundSink(tracker, "log.trackers thin", print, step_interval_s=1.0)
    for event in [
        step(1, 1)._replace(time=10.0),
        step(2, 1)._replace(time=10.9),
        epoch(2, 0.1),
        step(3, 1)._replace(time=11.0),
        over(3, "end"),
    ]:
        background(event)
    assert background.close(HANG_S)
    assert [(event.kind, event.step) for event in tracker.events] == [
        ("step", 1),
        ("epoch", 2),
        ("step", 3),
        ("end", 3),
    ]


def test_background_sink_closes_in_time_when_its_tracker_blocks() -> None:
    tracker = BlockingTracker()
    warnings = list[str]()
    background = BackgroundSink(tracker, "log.trackers stuck", warnings.append)
    for number in range(3):
        background(epoch(number, 0.5))
    assert tracker.begun.wait(HANG_S)
    began = time.monotonic()
    assert not background.close(0.2)
    assert time.monotonic() - began > 0.15
    assert warnings == [
        "log.trackers stuck: not finished after 0.2 s: 2 events are still queued, and the job ends"
    ]
    tracker.free.set()
    assert background.close(HANG_S)  # close() stops nothing: all is written in the end
    assert [event.step for event in tracker.events] == [0, 1, 2]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError("no\n route to http://me:pw@host:1/x"),
            "OSError: no route to http://***@host:1/x",
        ),
        (UserError("no key", "log.trackers", "log in"), "no key"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_background_sink_drops_a_tracker_that_raises_and_reports_it_once(
    error: BaseException, message: str
) -> None:
    warnings = list[tuple[str, str]]()
    tracker = FailingTracker(error, at=2)
    background = BackgroundSink(
        tracker,
        "log.trackers frail",
        lambda line: warnings.append((threading.current_thread().name, line)),
    )
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "log.trackers frail"]
    for number in (1, 2):
        background(step(number, 1.0))
    thread.join(20)
    for number in (3, 4):
        background(step(number, 1.0))
    assert background.close(HANG_S)
    line = f"log.trackers frail: {message}; training continues without it"
    assert warnings == [(threading.main_thread().name, line)]  # on the thread of the caller
    assert tracker.steps == [1, 2]
    # events that no tracker takes are not kept
    assert not background._step_events and not background._other_events


def test_background_sink_reports_a_tracker_that_cannot_be_closed() -> None:
    warnings = list[str]()
    background = BackgroundSink(
        FailingTracker(ImportError("a broken package"), at=None),
        "log.trackers broken",
        warnings.append,
    )
    background(step(1, 1.0))
    assert background.close()
    assert warnings == [
        "log.trackers broken: ImportError: a broken package; training continues without it"
    ]


def test_names_are_file_names() -> None:
    assert set(plugins.files("events/trackers")) == {"tensorboard", "mlflow", "wandb"}


def test_no_key_of_the_default_configuration_is_a_secret() -> None:
    assert [
        key for key, value in flat_config(Config()).items() if is_secret_key(key) or value == HIDDEN
    ] == []


def test_tensorboard_receives_the_header_without_logins(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    sink = tensorboard.build(Config(), tmp_path)
    sink(Event(1.0, "start", 0, {"lines": ["data    https://joe:hunter2@host/x"]}))
    sink.close()
    (file,) = (tmp_path / "tensorboard" / tmp_path.name).iterdir()
    assert b"hunter2" not in (seen := file.read_bytes()) and b"data    https://***@host/x" in seen
