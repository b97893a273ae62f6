"""Folders as check sees them: who holds the lock of a run folder, and a file system without
locks."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from pathlib import Path

import pytest

from hvdtrain.config.read import configure
from hvdtrain.core.folder import Folder
from hvdtrain.extras.check import dry_run
from hvdtrain.extras.check.dry_run import _locks_work
from hvdtrain.training.lock_holder import Holder, this_process, to_bytes
from hvdtrain.training.run_lock import LOCK, read_holder

MINE = this_process()
ELSEWHERE = MINE._replace(token="0123456789abcdef", host="n7", machine="another", since_s=1.8e9)


@pytest.mark.parametrize(
    ("holder", "level", "words"),
    [
        (MINE, "error", "run is in use by another job: process"),
        (MINE._replace(ending=True), "note", "run is in use by another job: process"),
        (MINE._replace(process_start=1), "note", "which is gone"),
        (ELSEWHERE, "warning", r"on n7, since 2027-.*, without a sign of life for \d+ s"),
    ],
)
def test_check_reports_who_has_the_folder(
    tmp_path: Path, holder: Holder, level: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "BEAT_S", 0.1)
    run = tmp_path / "run"
    run.mkdir()
    (run / LOCK).write_bytes(to_bytes(holder))
    found = [
        finding
        for finding in dry_run.try_run_folder(configure(None, [f"run={run}"])).findings
        if LOCK in finding.where
    ]
    assert [finding.level for finding in found] == [level]
    assert re.search(words, found[0].what)
    with Folder.open(run) as folder:
        assert read_holder(folder) == holder


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    """flock() is faked, since such a file system needs a server."""
    assert _locks_work(tmp_path)

    def flock(handle: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert not _locks_work(tmp_path)
