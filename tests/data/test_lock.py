"""The lock of a folder on a file system that has none; flock() is faked, since such a file system
needs a server."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from hvdtrain.data.files.folders import locked
from hvdtrain.errors import UserError


def refuse_locks(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def flock(handle: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    refuse_locks(monkeypatch, number)
    with pytest.raises(UserError) as caught, locked(tmp_path / "cache", "packs the images"):
        pass
    assert (
        caught.value.what
        == f"the file system of {tmp_path}/cache has no locks: {os.strerror(number)}"
    )
    assert (
        caught.value.where == f"{tmp_path}/cache"
        and "a folder on a local disk by data.cache=, data.stage=" in caught.value.fix
    )


def test_another_error_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refuse_locks(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"), locked(tmp_path, "packs the images"):
        pass
