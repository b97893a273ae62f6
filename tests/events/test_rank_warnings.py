"""Warnings on the standard error: each of Python once, whatever the number of ranks; nobody waits
for a reader that has paused."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
import warnings
from typing import Any

import pytest
from ranks import HANG_S

from hvdtrain.events.rank_log import RankWarnings, rank_warnings

HOST = socket.gethostname()


class Gathered:
    """What rank 0 sends; without it this is rank 0."""

    def __init__(self, *others: Any) -> None:
        self.others = others
        self.given: list[Any] = []

    def broadcast_object(self, thing: Any) -> Any:
        self.given.append(thing)
        return [*self.others, thing][0]


def warn(text: str, times: int = 1) -> None:
    for _ in range(times):
        with (
            warnings.catch_warnings()
        ):  # as libraries do: then Python forgets which warnings it has shown
            pass
        warnings.warn_explicit(text, UserWarning, "net.py", 5)


def shown(text: str) -> str:
    return f"net.py:5: UserWarning: {text}\n"


@pytest.fixture(autouse=True)
def as_in_a_program() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        yield


def test_a_single_process_shows_each_once_and_every_message_of_a_library(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with rank_warnings(0, 1) as mine:
        warn("late", 3)
        for _ in range(2):
            logging.getLogger("lib").warning("again")
        mine.exchange(Gathered())  # asks nobody
    assert capsys.readouterr().err == shown("late") + "again\nagain\n"


def test_a_script_that_is_the_whole_job_keeps_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with rank_warnings(0, 1, from_script=True), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn("late", 2)
    assert len(caught) == 2 and capsys.readouterr().err == ""


def test_rank_0_shows_and_tells(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = Gathered()
    with rank_warnings(0, 2) as mine:
        warn("late", 2)
        assert capsys.readouterr().err == f"rank 0 on {HOST}: WARNING: {shown('late')}"
        mine.exchange(ranks)
        warn("late")
        mine.exchange(ranks)
    assert [[text.rstrip().splitlines()[0] for text in given] for given in ranks.given] == [
        ["net.py:5: UserWarning: late"],
        [],
    ]
    assert capsys.readouterr().err == ""


def test_another_rank_shows_what_rank_0_has_not(capsys: pytest.CaptureFixture[str]) -> None:
    with rank_warnings(1, 2) as mine:
        warn("on all")
        warn("on this one", 2)
        assert capsys.readouterr().err == ""
        mine.exchange(Gathered([shown("on all"), shown("later on this one")]))
        assert capsys.readouterr().err == f"rank 1 on {HOST}: WARNING: {shown('on this one')}"
        warn("later on this one")
        mine.exchange(Gathered([]))
        assert capsys.readouterr().err == ""
        warn("at the end")
    assert capsys.readouterr().err == f"rank 1 on {HOST}: WARNING: {shown('at the end')}"


@pytest.mark.clock
def test_a_reader_that_has_paused_costs_one_second_and_is_told_what_it_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    filled = 0
    try:
        while True:
            filled += os.write(writer, b"x" * 512)
    except BlockingIOError:
        os.set_blocking(writer, True)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "__stderr__", stream)
        handler = RankWarnings()
        record = [
            logging.LogRecord("lib", logging.WARNING, "", 0, text, None, None)
            for text in ("one", "two", "three", "four")
        ]
        start_s = time.monotonic()
        handler.handle(record[0])
        waited_s = time.monotonic()
        for each in record[1:3]:
            handler.handle(each)
        assert waited_s - start_s > 0.9 > time.monotonic() - waited_s
        text = b""
        while b"one" not in text:
            text += os.read(reader, 65536)
        waiting = handler._waiting
        assert waiting is not None
        waiting.wait(HANG_S)
        handler.handle(record[3])
        assert (
            os.read(reader, 65536)
            == b"four\n(2 warnings left out before: nobody read this output)\n"
        )
        monkeypatch.undo()
    os.close(reader)
