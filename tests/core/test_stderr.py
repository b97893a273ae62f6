"""Lines on the standard error, whatever the state of the process that writes them."""

from __future__ import annotations

import _thread
import threading

import pytest

from hvdtrain.core import process


@pytest.mark.parametrize("error", [None, RuntimeError("can't start new thread")])
def test_a_line_is_written_where_no_thread_begins(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As where memory is exhausted: the system makes the thread, which ends before its first line;
    or it makes none."""

    def start_new_thread(*args: object) -> None:
        if error:
            raise error

    monkeypatch.setattr(_thread, "start_new_thread", start_new_thread)
    assert process.write_stderr("out of memory", wait_s=0.01) is None
    assert capfd.readouterr().err == "out of memory\n"


def test_a_late_thread_does_not_write_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    started = []
    monkeypatch.setattr(
        _thread, "start_new_thread", lambda run, args: started.append(threading.Thread(target=run))
    )
    process.write_stderr("once", wait_s=0.01)
    started[0].run()
    assert capfd.readouterr().err == "once\n"
