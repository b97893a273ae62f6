"""Log and events.jsonl: every sink receives every event, even where another one fails, and no line
of a burst is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdtrain.events.log import Event, Log
from hvdtrain.events.writers import BURST, KEPT, JsonLinesWriter


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_failing_sink_does_not_keep_an_event_from_the_others() -> None:
    received: list[Event] = []

    def broken(event: Event) -> None:
        raise OSError(f"no {event.kind}")

    with pytest.raises(OSError, match="no step"):
        Log([received.append, broken, received.append]).emit("step", 3, loss=0.5)
    assert [(event.kind, event.step, event.fields) for event in received] == [
        ("step", 3, {"loss": 0.5})
    ] * 2


def test_bursts_of_single_steps_are_all_written(tmp_path: Path) -> None:
    count = KEPT + BURST + 1
    sink = JsonLinesWriter(tmp_path / "events.jsonl")
    for number in range(1, count):
        sink(Event(1.0, "step_times", number, {}))
    assert steps(tmp_path / "events.jsonl") == list(range(1, count)), "whole bursts: no line waits"
    sink(Event(1.0, "step_times", count, {}))
    assert len(steps(tmp_path / "events.jsonl")) == count - 1
    sink(Event(1.0, "step", count, {}))
    assert steps(tmp_path / "events.jsonl") == [*range(1, count + 1), count]


def test_the_newest_lines_wait_while_the_file_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "full" / "events.jsonl"  # the folder does not exist yet
    sink = JsonLinesWriter(path)
    for number in range(KEPT + 2500):
        sink(Event(1.0, "step_times", number, {}))
    path.parent.mkdir()
    sink(Event(1.0, "step", KEPT + 2500, {}))
    assert steps(path) == list(range(2501, KEPT + 2501))
