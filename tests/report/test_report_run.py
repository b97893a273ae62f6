"""A run read back, against numbers worked out by hand: crashes, resumed jobs, old files, malformed
lines, and the DataFrame."""

from __future__ import annotations

import json
import math
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.config.sections.extra_keys import defaults, key_classes
from hvdtrain.config.sections.section import Section
from hvdtrain.errors import UserError
from hvdtrain.report import summary
from hvdtrain.report.compare import changes_between_starts, differing_keys, scaling_comparisons
from hvdtrain.report.run import MOST_LINE_BYTES, RunRecord, number, numbers, read_run, to_dataframe

Fields = dict[str, Any]
CONFIG = {
    "seed": 1,
    "batch.size": 64,
    "model.name": "mlp",
    "comm.compression": "same",
    "log.every_steps": 10,
}


def start(step: int = 0, **fields: Any) -> Fields:
    ranks = fields.get("ranks", 2)
    shape = {
        "ranks": ranks,
        "hosts": ["n1", "n2"][:ranks],
        "host_of_rank": ["n1", "n2", "n2", "n2"][:ranks],
        "engine": "mpi",
        "seconds": 0.0,
    }
    return {
        "time": 1000.0 + step,
        "kind": "start",
        "step": step,
        "schema": 1,
        **shape,
        "energy": {"cpu": "no counter"},
        **fields,
    }


def step(number: int, **fields: Any) -> Fields:
    """Ten steps an epoch, 64 images a step, 2 s."""
    return {
        "time": 1000.0 + number, "kind": "step", "step": number, "epochs": number / 10, "of": 2, "loss": 10.0 / number,  # noqa: E501
        "accuracy": number / 100,
        "samples_per_s": 320.0, "lr": 0.1, "batch": 64, "steps": 5, "window_s": 1.0, "seconds": number / 5,  # noqa: E501
        "phase_ms": {"forward": 2.0, "backward": 5.0, "communication": 1.0}, "work_ms": [7.0, 8.0, 9.0], "memory_mb": 300.0, **fields,  # noqa: E501
    }  # fmt: skip


def epoch(number: int, accuracy: float, **fields: Any) -> Fields:
    return {
        "time": 1000.5 + 10 * number, "kind": "epoch", "step": 10 * number, "epoch": number, "seconds": 2.0 * number, "epoch_s": 1.5,  # noqa: E501
        "samples_per_s": 400.0, "train_loss": 1.0 / number, "train_accuracy": 0.5, "val_loss": 1.2 / number, "val_accuracy": accuracy,  # noqa: E501
        "lr": 0.1, "batch": 64, "rank_work_ms": [8.0, 12.0], "joules": {}, **fields,
    }  # fmt: skip


def end(number: int, **fields: Any) -> Fields:
    return {
        "time": 1000.9 + number,
        "kind": "end",
        "step": number,
        "reason": "epochs=2",
        "exit_code": 0,
        **fields,
    }


COMPLETE = [
    start(),
    step(5),
    step(10),
    epoch(1, 0.7),
    step(15),
    step(20),
    epoch(2, 0.6),
    end(20, seconds=4.25),
]


def write(folder: Path, events: list[Fields], config: Fields | None = None, torn: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_text(
        "".join(json.dumps(event) + "\n" for event in events) + torn
    )
    if config is not None:
        (folder / "config.yaml").write_text(
            "".join(f"{key}: {json.dumps(value)}\n" for key, value in config.items())
        )
    return folder


def test_a_complete_run(tmp_path: Path) -> None:
    record = read_run(write(tmp_path / "run", COMPLETE, CONFIG))
    assert record.config == CONFIG
    assert [event["step"] for event in record.step_events()] == [5, 10, 15, 20] and len(
        record.epoch_events()
    ) == 2
    assert (record.ranks, record.ending) == (2, "done: epochs=2")
    assert (summary.best_value(record), summary.last_value(record)) == (0.7, 0.6)
    assert (summary.job_seconds(record), summary.epochs_done(record)) == (4.25, 2.0)


def test_a_torn_last_line_is_ignored(tmp_path: Path) -> None:
    record = read_run(
        write(tmp_path / "run", COMPLETE[:5], torn='{"time": 1020.0, "kind": "step", "st')
    )
    assert len(record.events) == 5 and record.config == {}
    assert (
        record.ending == "no end: it is running, or was killed; last event 1970-01-01 00:16:55 UTC"
    )


def test_events_of_repeated_steps_are_dropped(tmp_path: Path) -> None:
    """Resumed at step 10: the first steps 15 and 20 and the target do not count; what came before
    step 10 does."""
    first = [
        start(),
        step(10),
        epoch(1, 0.5),
        step(15, loss=7.0),
        step(20, loss=8.0),
        epoch(2, 0.9),
        {**end(20), "kind": "target", "target": 0.8},
    ]
    again = [
        start(10, ranks=1, seconds=3.0),
        step(15, loss=1.0),
        {**end(15), "kind": "stop", "reason": "a signal"},
    ]
    record = read_run(write(tmp_path / "run", first + again))
    assert [(event["step"], event["loss"]) for event in record.step_events()] == [
        (10, 1.0),
        (15, 1.0),
    ]
    assert [event["epoch"] for event in record.epoch_events()] == [1] and summary.targets(
        record
    ) == []
    assert (record.ranks, record.ending, len(record.events_of("start"))) == (
        1,
        "stopped: a signal",
        2,
    )
    assert read_run(write(tmp_path / "on", [*first, end(20), start(20)])).ending.startswith(
        "no end: it is running"
    )


def test_a_start_after_a_torn_line_is_read(tmp_path: Path) -> None:
    """The resumed job appends its start to the torn line."""
    torn = (
        '{"time": 1016.0, "kind": "step", "ste'
        + json.dumps(start(10))
        + "\n"
        + json.dumps(step(15, loss=1.0))
        + "\n"
    )
    record = read_run(write(tmp_path / "run", [start(), step(10), step(15)], torn=torn))
    assert [(event["kind"], event["step"]) for event in record.events] == [
        ("start", 0),
        ("step", 10),
        ("start", 10),
        ("step", 15),
    ]


def test_a_start_after_a_torn_step_times_line_is_read(tmp_path: Path) -> None:
    """Without the start steps 15 and 20 would be there twice."""
    torn = (
        '{"time": 1016.0, "kind": "step_times", "step": 16, "phase_ms": {"forw'
        + json.dumps(start(10))
        + "\n"
    )
    folder = write(
        tmp_path / "run",
        [start(), step(10), step(15), step(20)],
        torn=torn + json.dumps(step(15, loss=1.0)) + "\n",
    )
    for step_times in (False, True):
        events = read_run(folder, step_times).events
        assert [(event["kind"], event["step"]) for event in events] == [
            ("start", 0),
            ("step", 10),
            ("start", 10),
            ("step", 15),
        ]


@pytest.mark.parametrize("line", ["", "17", "[]", "null", "{}", '{"kind": "step"}', '{"time": '
                                                                                    'null, '
                                                                                    '"kind": '
                                                                                    '"step", '
                                                                                    '"step": 1}',
                                  "[" * 100000,
                                  '{"time": 1, "kind": ["step"], "step": '
                                  '1}', '{"time": 1, "kind": "step", "step": true}',
                                  '{"time": 1e12, "kind": "step", "step": '
                                  '1}', '{"time": 1, "kind": "step", "step": -1}'])  # fmt: skip
def test_malformed_lines_are_skipped(tmp_path: Path, line: str) -> None:
    folder = write(
        tmp_path / "run", COMPLETE[:2], torn=f"{line}\n" + json.dumps(COMPLETE[2]) + "\n"
    )
    (folder / "events.jsonl").write_bytes(b"\xff\xfe\n" + (folder / "events.jsonl").read_bytes())
    assert read_run(folder).events == COMPLETE[:3]


def test_fields_that_are_no_numbers_are_nan() -> None:
    event = {
        "a": None,
        "b": "1",
        "c": True,
        "h": 10**400,
        "d": {"e": 2, "f": [1]},
        "g": [1, None, "x", 4.5],
    }
    assert [
        math.isnan(number(event, name)) for name in ("a", "b", "c", "h", "d", "d.f", "d.e.x", "z")
    ] == [True] * 8
    assert number(event, "d.e") == 2.0
    assert [one if math.isfinite(one) else None for one in numbers(event, "g")] == [
        1.0,
        None,
        None,
        4.5,
    ] and numbers(event, "d") == []


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        read_run(folder)
    return str(error.value)


def test_a_folder_without_a_run_is_a_user_error(tmp_path: Path) -> None:
    assert refused(tmp_path / "none").startswith(
        f"there is no run folder {tmp_path / 'none'}\n  where: RUN\n  fix: give the folder that"
    )
    assert refused(tmp_path).startswith(
        f"{tmp_path} has no events.jsonl\n  where: RUN\n  fix: give a run folder: it has "
        "config.yaml and"
    )
    folder = write(tmp_path / "run", [], torn='{"time": 1')
    assert refused(folder).startswith(
        f"{folder / 'events.jsonl'} has no event\n  where: RUN\n  fix: the job has not started yet"
    )
    (tmp_path / "folder" / "events.jsonl").mkdir(parents=True)
    assert refused(tmp_path / "folder").startswith(
        f"{tmp_path / 'folder' / 'events.jsonl'} is a folder, not a file\n  where: RUN\n  fix: "
    )


def test_a_run_that_cannot_be_read_is_a_user_error(tmp_path: Path) -> None:
    assert refused(tmp_path / ("x" * 300)).startswith(
        f"cannot read {tmp_path / ('x' * 300)}/events.jsonl: File name too long\n  where: RUN\n"
    )
    run = write(tmp_path / "closed" / "run", COMPLETE)
    user = os.geteuid()
    (tmp_path / "closed").chmod(0)
    try:
        if user == 0:
            os.seteuid(65534)  # root may read everything
        assert refused(run).startswith(
            f"cannot read {run}/events.jsonl: Permission denied\n  where: RUN\n"
        )
    finally:
        os.seteuid(user)
        (tmp_path / "closed").chmod(0o700)


def record_of(events: list[Fields], **config: Any) -> RunRecord:
    return RunRecord(Path("run"), CONFIG | config, events)


def test_speed_is_images_by_seconds() -> None:
    """100 images/s for 3 s and 400 for 1 s are 700 images in 4 s: 175, not 250. The end's own
    number comes first."""
    slow = epoch(1, 0.5, samples_per_s=100.0, epoch_s=3.0)
    fast = epoch(2, 0.5, samples_per_s=400.0, epoch_s=1.0)
    assert summary.samples_per_s(record_of([start(), slow, fast])) == 175.0
    assert (
        summary.samples_per_s(record_of([start(), slow, fast, end(20, samples_per_s=170.0)]))
        == 170.0
    )
    windows = [
        step(5, samples_per_s=100.0, window_s=3.0),
        step(10, samples_per_s=400.0, window_s=1.0),
    ]
    assert summary.samples_per_s(record_of([start(), *windows])) == 175.0
    assert math.isnan(summary.samples_per_s(record_of([start()])))


def test_tokens_per_second_are_those_of_the_end_or_of_all_epochs() -> None:
    epochs = [
        epoch(1, 0.5, tokens_per_s=1000.0, epoch_s=3.0),
        epoch(2, 0.5, tokens_per_s=4000.0, epoch_s=1.0),
    ]
    assert summary.tokens_per_s(record_of([start(), *epochs])) == 1750.0
    assert (
        summary.tokens_per_s(record_of([start(), *epochs, end(20, tokens_per_s=1700.0)])) == 1700.0
    )
    assert math.isnan(summary.tokens_per_s(record_of([start(), epoch(1, 0.5)])))


def test_the_energy_summary() -> None:
    both = record_of(
        [
            start(energy={"gpu": "", "cpu": "no counter"}),
            epoch(1, 0.5, joules_per_sample=2.0),
            epoch(2, 0.5, joules_per_sample=4.0),
        ]
    )
    assert summary.energy_summary(both) == "3 J (GPUs); not measured: processors: no counter"
    measured = record_of([start(energy={"gpu": "", "cpu": ""}), end(1, joules_per_sample=0.25)])
    assert summary.energy_summary(measured) == "0.25 J (GPUs and processors)"
    assert summary.energy_summary(record_of([start()])) == "not measured: processors: no counter"
    assert (
        summary.energy_summary(record_of([start(energy={"cpu": ""})]))
        == "not measured: no epoch has ended"
    )
    assert summary.energy_summary(record_of([start(energy=None)])) == "not recorded"


def test_the_slowest_rank() -> None:
    """Means of rank 3: (12 + 13) / 2 = 12.5; the median of 10, 9, 10, 12.5 is 10. The epoch on two
    ranks was before a resume."""
    rows = [[50.0, 50.0], [10.0, 9.0, 10.0, 12.0], [10.0, 9.0, None, 13.0]]
    record = record_of(
        [start(ranks=4), *(epoch(i, 0.5, rank_work_ms=row) for i, row in enumerate(rows, 1))]
    )
    assert summary.rank_work_ms(record) == [10.0, 9.0, 10.0, 12.5]
    assert (
        summary.straggler_summary(record)
        == "rank 3 on n2 is slowest: 12.5 ms of own work a step, median 10"
    )
    even = record_of([start(), epoch(1, 0.5, rank_work_ms=[10.0, 10.5])])
    assert (
        summary.straggler_summary(even)
        == "the ranks are even: rank 1 on n2 has 10.5 ms of own work a step, median 10.2"
    )
    assert (
        summary.straggler_summary(record_of([start(ranks=1), epoch(1, 0.5, rank_work_ms=[10.0])]))
        == ""
    )


def test_labels_of_runs() -> None:
    def of(*paths: str) -> list[str]:
        return summary.labels([RunRecord(Path(path), {}, []) for path in paths])

    assert of("/a/runs/mlp-1") == ["mlp-1"]
    assert of("/a/mlp-r1-s1", "/a/mlp-r1-s2", "/a/mlp-r4-s1") == ["r1-s1", "r1-s2", "r4-s1"]
    assert of("/a/x/run", "/a/y/run") == ["x", "y"]
    assert of("/a/run", "/a/run-2") == ["run", "run-2"]
    assert of("/a/" + "x" * 60 + "1" + "z" * 30, "/a/" + "x" * 60 + "2" + "z" * 30)[0].startswith(
        "1: xxxxxxxxxxxxxxxxxxxx...zzz"
    )
    assert of("/a/\x1b[31mred") == ["?[31mred"]


@pytest.mark.parametrize(("seconds", "duration"), [(0.298, "0.298 s"), (2, "2.00 s"), (59.9, "59.9 s"), (59.97, "1 min 00 s"), (200, "3 min 20 s"),  # noqa: E501
                                                (3599.8, "1 h 00 min"), (7500, "2 h 05 min"), (math.nan, "")])  # fmt: skip  # noqa: E501
def test_durations(seconds: float, duration: str) -> None:
    assert summary.duration(seconds) == duration


def run_on(
    ranks: int, speed: float, seed: int = 1, batch: int = 64, joules: float = 1.0, **config: Any
) -> RunRecord:
    last = end(20, samples_per_s=speed, seconds=20_000.0 / speed, joules_per_sample=joules)
    return record_of(
        [start(ranks=ranks), epoch(1, 0.8 + seed / 100), last],
        **{"seed": seed, "batch.size": batch, **config},
    )


def test_strong_scaling() -> None:
    """1 rank: 90, 100, 110 images/s are 100 with a deviation of 10. 4 ranks: 310 and 330 are 320:
    3.2 times, 80% of 4. Joules 1.5 / 1.2."""
    on_one = [
        run_on(1, speed, seed, joules=1.2, **{"comm.compression": "fp16"})
        for seed, speed in ((1, 90.0), (2, 100.0), (3, 110.0))
    ]
    on_four = [
        run_on(4, 310.0, 1, joules=1.4),
        run_on(4, 330.0, 2, joules=1.6),
        run_on(4, 999.0, 1, **{"model.name": "other"}),
    ]
    (found,) = scaling_comparisons([*on_four, *on_one])
    one, four = found.rows
    assert (found.batch, one.ranks, four.ranks, one.seeds, four.seeds) == (
        "64 over all ranks (strong scaling)",
        1,
        4,
        "1, 2, 3",
        "1, 2",
    )
    assert one.samples_per_s == pytest.approx(
        (100.0, 10.0, 3)
    ) and four.samples_per_s == pytest.approx((320.0, math.sqrt(200.0), 2))
    assert (one.speed_up, one.efficiency, one.energy_ratio) == (1.0, 1.0, 1.0)
    assert (four.speed_up, four.efficiency, four.energy_ratio) == pytest.approx((3.2, 0.8, 1.25))
    assert one.last == pytest.approx((0.82, 0.01, 3)) and four.last == pytest.approx(
        (0.815, math.sqrt(0.5) / 100, 2)
    )


def test_weak_scaling() -> None:
    """Against the fewest, 2: 150 / 100 = 1.5 times on twice as many ranks. A run without an end has
    a speed, but no last accuracy."""
    two = run_on(2, 100.0, batch=32)
    four = run_on(4, 150.0, batch=64)
    going = record_of([start(ranks=4), epoch(1, 0.1, samples_per_s=150.0, seconds=12.0)])
    (found,) = scaling_comparisons([four, two, going])
    assert found.batch == "16 on each rank (weak scaling)"
    assert [(row.ranks, row.samples_per_s.n, row.last.n) for row in found.rows] == [
        (2, 1, 1),
        (4, 2, 1),
    ]
    assert (found.rows[1].speed_up, found.rows[1].efficiency) == (1.5, 0.75)


def test_runs_with_other_communication_are_compared_apart() -> None:
    """Two comparisons, both with the job on one rank; none without a configuration or with one
    number of ranks."""
    on_one = run_on(1, 100.0)
    same = run_on(2, 180.0)
    half = run_on(2, 190.0, **{"comm.compression": "fp16"})
    assert [found.rows[1].speed_up for found in scaling_comparisons([on_one, same, half])] == [
        1.8,
        1.9,
    ]
    assert (
        scaling_comparisons([run_on(2, 1.0), run_on(2, 2.0, seed=2)])
        == []
        == scaling_comparisons([RunRecord(Path("a"), {}, one.events) for one in (on_one, same)])
    )


def test_a_job_of_a_few_seconds_is_not_compared() -> None:
    """2,001 images/s: 20,000 images in 9.995 s. 2,000: in 10 s."""
    assert scaling_comparisons([run_on(1, 100.0), run_on(2, 2001.0)]) == []
    (found,) = scaling_comparisons([run_on(1, 100.0), run_on(2, 2000.0), run_on(2, 2001.0, seed=2)])
    assert (found.rows[1].seeds, found.rows[1].speed_up) == ("1", 20.0)


def test_a_job_resumed_on_other_ranks_is_not_compared() -> None:
    """100 images/s on 1 rank: a job that had 1 rank for half of its steps says nothing about 2.
    Repeated from step 0 it does."""
    one = run_on(1, 100.0)
    moved = run_on(2, 120.0)
    one_rank = start(ranks=1)
    two_ranks = start(10)
    other = start(5, device="CPU B", engine="torchdist")
    events = moved.events[1:]
    assert (
        changes_between_starts(RunRecord(Path("a"), CONFIG, [one_rank, *events, two_ranks]))
        == "ranks 1, then 2"
    )
    assert (
        scaling_comparisons([one, RunRecord(Path("a"), CONFIG, [one_rank, *events, two_ranks])])
        == []
    )
    assert (
        changes_between_starts(
            RunRecord(Path("a"), CONFIG, [start(device="CPU A"), *events, other])
        )
        == "engine mpi, then torchdist; device CPU A, then CPU B"
    )
    (found,) = scaling_comparisons(
        [one, RunRecord(Path("a"), CONFIG, [one_rank, start(), *events])]
    )
    assert found.rows[1].speed_up == pytest.approx(1.2) and not changes_between_starts(moved)


def test_differing_keys() -> None:
    first = record_of([start()], run="a", seed=1)
    second = record_of([start()], run="b", seed=2)
    del second.config["comm.compression"]
    assert differing_keys([first, second]) == [
        ("seed", [1, 2]),
        ("comm.compression", ["same", None]),
    ]


@pytest.mark.parametrize("kind", key_classes(), ids=lambda kind: kind.section)
def test_a_run_has_the_defaults_of_keys_of_extras(kind: type[Section]) -> None:
    """It records the keys of an extra that it uses."""
    plain = record_of([start()])
    recorded = record_of([start()])
    key, *others = (kind.full_key(name) for name in kind.model_fields)
    recorded.config.update({each: defaults()[each] for each in (key, *others)})
    assert differing_keys([plain, recorded]) == []
    recorded.config[key] = 2
    assert differing_keys([plain, recorded]) == [(key, [defaults()[key], 2])]


def test_a_run_as_a_dataframe(tmp_path: Path) -> None:
    target = {**end(10), "kind": "target", "target": 0.6, "samples": 640, "joules": None}
    record = read_run(write(tmp_path / "run", [*COMPLETE[:4], target, step(15, loss=None)], CONFIG))
    table = to_dataframe(record)
    assert list(table.index) == [0, 1, 2, 3, 4] and list(table.columns[:3]) == [
        "time",
        "kind",
        "step",
    ]
    assert list(table["kind"]) == ["step", "step", "epoch", "target", "step"] and list(
        table["step"]
    ) == [5, 10, 10, 10, 15]
    assert (
        table["phase_ms.backward"].tolist()[:2] == [5.0, 5.0]
        and table["work_ms.max"].tolist()[0] == 9.0
    )
    assert (
        table["loss"].dtype == float
        and table["loss"].tolist()[:2] == [2.0, 1.0]
        and math.isnan(table["loss"][4])
    )
    assert (
        table["rank_work_ms"][2] == [8.0, 12.0]
        and table["samples"][3] == 640
        and math.isnan(table["joules"][3])
    )
    assert table.attrs == {"run": str(tmp_path / "run"), "config": CONFIG}


def test_single_steps_are_read_on_request(tmp_path: Path) -> None:
    one = {
        "time": 1001.0,
        "kind": "step_times",
        "step": 1,
        "phase_ms": {"forward": 2.5},
        "work_ms": [1, 2, 3],
    }
    folder = write(tmp_path / "run", [COMPLETE[0], one, COMPLETE[1]])
    assert [event["kind"] for event in read_run(folder).events] == ["start", "step"]
    assert to_dataframe(read_run(folder, step_times=True))["phase_ms.forward"].tolist() == [
        2.5,
        2.0,
    ]


def test_no_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(UserError) as error:
        to_dataframe(record_of(COMPLETE))
    assert (
        str(error.value) == "pandas is not installed\n  where: hvdtrain.read()\n  fix: pip install "
        "'hvdtrain[notebook]'"
    )


def test_events_that_are_no_regular_file_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "run", COMPLETE)
    for kind, make in (
        ("a pipe", os.mkfifo),
        ("a link", lambda path: path.symlink_to("../run/events.jsonl")),
    ):
        folder = tmp_path / kind
        folder.mkdir()
        make(folder / "events.jsonl")
        assert refused(folder).startswith(
            f"{folder / 'events.jsonl'} is {kind}, not a file\n  where: RUN\n  fix: hvdtrain "
            "makes no links"
        )


def test_a_line_without_end_is_left_out_in_little_memory(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", COMPLETE[:3])
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b'{"time": 1, "kind": "')
        file.truncate(2**28)  # sparse: 256 MB of zeros
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b"\n" + json.dumps(end(20)).encode() + b"\n")
    tracemalloc.start()
    run = read_run(folder)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [event["kind"] for event in run.events] == ["start", "step", "step", "end"]
    assert most_bytes < 4 * MOST_LINE_BYTES


def test_a_file_of_terabytes_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", COMPLETE)
    os.truncate(folder / "events.jsonl", 2**40)
    assert refused(folder).startswith(
        f"{folder / 'events.jsonl'} has more than 4 GiB\n  where: RUN\n  fix: give a run folder "
        "with fewer"
    )


def test_nesting_that_no_event_has_is_left_out(tmp_path: Path) -> None:
    deep = [
        json.dumps({"time": 1.0, "kind": "step", "step": 1, "x": 0}).replace(
            "0}", "[" * n + "]" * n + "}"
        )
        for n in (7, 8, 900, 10**5)
    ]
    folder = write(tmp_path / "run", COMPLETE)
    with (folder / "events.jsonl").open("a") as file:
        file.write("\n".join(deep))
    run = read_run(folder)
    assert len(run.events) == len(COMPLETE) + 1
    assert run.events[-1]["x"] == [[[[[[[]]]]]]]


def test_more_events_than_fit_into_the_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists in lists: a parsed line takes 20 times its bytes."""
    monkeypatch.setattr("hvdtrain.report.run.MOST_MEMORY_BYTES", 6 * 2**20)
    folder = write(tmp_path / "run", COMPLETE)
    line = json.dumps({"time": 1.0, "kind": "x", "step": 1, "x": 0}).replace(
        "0}", f"[{'[],' * 10_000}1]}}\n"
    )
    with (folder / "events.jsonl").open("a") as file:
        for _ in range(8):
            file.write(line)
    assert refused(folder).startswith(
        f"the events of {folder / 'events.jsonl'} take more than 6 MiB of memory\n  where: RUN\n  "
        "fix: "
    )
