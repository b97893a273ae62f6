"""A run read back, against numbers worked out by hand: crashes, resumed jobs, old files, malformed
lines, and the DataFrame."""

from __future__ import annotations

import json
import math
import os
import tracemalloc
from pathlib import Path

import pytest
from run_events import COMPLETE, CONFIG, end, epoch, record_of, start, step, write

from hvdtrain.errors import UserError
from hvdtrain.records.run import MOST_LINE_BYTES, number, numbers, read_run, to_dataframe


def test_a_complete_run(tmp_path: Path) -> None:
    record = read_run(write(tmp_path / "run", COMPLETE, CONFIG))
    assert record.config == CONFIG
    assert [event["step"] for event in record.step_events()] == [5, 10, 15, 20] and len(
        record.epoch_events()
    ) == 2
    assert (record.ranks, record.ending) == (2, "done: epochs=2")


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
    assert [event["epoch"] for event in record.epoch_events()] == [1]
    assert record.events_of("target") == []
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
    monkeypatch.setattr("hvdtrain.records.run.MOST_MEMORY_BYTES", 6 * 2**20)
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
