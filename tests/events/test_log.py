"""The log and its file: every sink has every event, whatever another one does, and no line of a burst is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdtrain.events.log import Event, Log
from hvdtrain.events.writers import BURST, KEPT, JsonLines


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_every_sink_has_an_event_that_another_one_cannot_take() -> None:
    heard: list[Event] = []

    def broken(event: Event) -> None:
        raise OSError(f"no {event.kind}")

    with pytest.raises(OSError, match="no step"):
        Log([heard.append, broken, heard.append]).emit("step", 3, loss=0.5)
    assert [(event.kind, event.step, event.fields) for event in heard] == [("step", 3, {"loss": 0.5})] * 2


def test_more_single_steps_than_are_kept_are_all_written(tmp_path: Path) -> None:
    many, sink = KEPT + BURST + 1, JsonLines(tmp_path / "events.jsonl")
    for number in range(1, many):
        sink(Event(1.0, "step_times", number, {}))
    assert steps(tmp_path / "events.jsonl") == list(range(1, many)), "whole bursts: nothing waits"
    sink(Event(1.0, "step_times", many, {}))
    assert len(steps(tmp_path / "events.jsonl")) == many - 1
    sink(Event(1.0, "step", many, {}))
    assert steps(tmp_path / "events.jsonl") == [*range(1, many + 1), many]


def test_without_room_the_newest_lines_wait(tmp_path: Path) -> None:
    path = tmp_path / "full" / "events.jsonl"  # there is no such folder
    sink = JsonLines(path)
    for number in range(KEPT + 2500):
        sink(Event(1.0, "step_times", number, {}))
    path.parent.mkdir()
    sink(Event(1.0, "step", KEPT + 2500, {}))
    assert steps(path) == list(range(2501, KEPT + 2501))
