"""Debian packages that the cluster tests need: missing packages are installed; if that fails, the
tests are skipped with a reason."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock

_POLICY = Path("/usr/sbin/policy-rc.d")  # what packages ask before they start a daemon; 101 is no


def need(*packages: str) -> None:
    """Installs these packages if needed; skips the test, with the reason, without root or apt-get,
    or if apt-get fails."""
    if not (missing := [package for package in packages if not _installed(package)]):
        return
    if os.geteuid() or not shutil.which("apt-get"):
        pytest.skip(f"needs {' '.join(missing)}: only root of a Debian machine can install them")
    with FileLock("/tmp/hvdtrain-apt.lock"), _no_daemons():
        for words in (["update"], ["install", "--no-install-recommends", *missing]):
            ran = subprocess.run(
                ["apt-get", "-y", "-qq", *words],
                capture_output=True,
                check=False,
                text=True,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            )
            if ran.returncode:
                pytest.skip(
                    f"apt-get {' '.join(words)}: {(ran.stderr or ran.stdout).strip()[-500:]}"
                )


def _installed(package: str) -> bool:
    ran = subprocess.run(
        ["dpkg-query", "-W", "-f", "${db:Status-Status}", package],
        capture_output=True,
        check=False,
        text=True,
    )
    return ran.stdout == "installed"


@contextmanager
def _no_daemons() -> Iterator[None]:
    """Packages start nothing while this lasts."""
    before = _POLICY.read_bytes() if _POLICY.exists() else None
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink() if before is None else _POLICY.write_bytes(before)
