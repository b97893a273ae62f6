"""The trace of an engine's requests, as Chrome's format has it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from hvdtrain.comm.launcher_variables import NO_LAUNCHER
from hvdtrain.config import plugins
from hvdtrain.horovod.engine.own import OwnEngine
from hvdtrain.horovod.engine.requests import GLOBAL, Request, Signature
from hvdtrain.horovod.engine.settings import Settings, settings_of


def engine(settings: Settings) -> OwnEngine:
    return OwnEngine(plugins.load("comm", "single", "a test").connect(NO_LAUNCHER), settings)


def request(name: str, length: int) -> Request:
    return Request(
        Signature(name, "allreduce", "sum", ("float32",), ((length,),)), [torch.ones(length)]
    )


def events_of(path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == kind]


def test_a_range_of_waiting_and_one_of_making_for_each_call(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    own = engine(Settings(timeline=str(path), marks_cycles=True))
    start_us = time.time_ns() // 1000
    handles = [own.submit(GLOBAL, request(name, 9000)) for name in ("a", "b")]
    time.sleep(0.01)
    for handle in handles:
        own.wait(handle)
    own.wait(own.submit(GLOBAL, request("small", 2)))
    own.leave()
    names = {
        event["tid"]: event["args"]["name"]
        for event in events_of(path, "M")
        if event["name"] == "thread_name"
    }
    ranges = events_of(path, "X")
    assert [
        (names[event["tid"]], event["name"], event["args"].get("tensors_in_collective"))
        for event in ranges
    ] == [
        *(("a", "NEGOTIATE_ALLREDUCE", None), ("b", "NEGOTIATE_ALLREDUCE", None)),
        *(("a", "ALLREDUCE", 2), ("b", "ALLREDUCE", 2)),
        *(("small", "NEGOTIATE_ALLREDUCE", None), ("small", "ALLREDUCE", 1)),
    ]
    waiting, _, making, *_ = ranges
    assert (
        start_us <= waiting["ts"]
        and waiting["dur"] >= 10_000
        and making["ts"] >= waiting["ts"] + waiting["dur"]
    )
    assert making["args"] == {
        "dtype": "float32",
        "shape": "[9000]",
        "op": "sum",
        "tensors_in_collective": 2,
    }
    assert len(events_of(path, "i")) == 2  # rounds


def test_a_timeline_begins_and_ends_between_calls(tmp_path: Path) -> None:
    own = engine(Settings())
    own.wait(own.submit(GLOBAL, request("before", 3)))
    for name in ("one", "two"):
        own.start_timeline(str(tmp_path / f"{name}-{{rank}}.json"), mark_cycles=False)
        own.wait(own.submit(GLOBAL, request(name, 3)))
    own.stop_timeline()
    own.stop_timeline()
    own.wait(own.submit(GLOBAL, request("after", 3)))
    for name in ("one", "two"):
        rows = [event["args"]["name"] for event in events_of(tmp_path / f"{name}-0.json", "M")]
        assert rows == ["rank 0", name]


def test_a_call_is_in_the_file_when_it_returns(tmp_path: Path) -> None:
    """Not only after stop_timeline(): a script reads it, or the job is killed."""
    own = engine(Settings(timeline=str(tmp_path / "trace.json")))
    for name, length in (("inline", 3), ("alone", 9000)):
        own.wait(own.submit(GLOBAL, request(name, length)))
        written = json.loads((tmp_path / "trace.json").read_text() + "]")
        rows = {
            event["tid"]: event["args"]["name"]
            for event in written
            if event["name"] == "thread_name"
        }
        assert [event["name"] for event in written if rows.get(event.get("tid")) == name][1:] == [
            "NEGOTIATE_ALLREDUCE",
            "ALLREDUCE",
        ]
    own.stop_timeline()


def test_horovods_variables() -> None:
    assert (
        settings_of(
            {"HOROVOD_TIMELINE": "/tmp/x.json", "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
        ).timeline
        == "/tmp/x.json"
    )
    assert settings_of({"HOROVOD_TIMELINE_MARK_CYCLES": "1"}).marks_cycles
    assert (
        settings_of({"HOROVOD_TIMELINE": "DYNAMIC", "HOROVOD_STALL_CHECK_DISABLE": "1"}).timeline
        is None
    )
