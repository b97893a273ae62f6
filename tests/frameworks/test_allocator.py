"""Freed memory stays with the process: page faults, counted in a process of its own."""

from __future__ import annotations

import ctypes

import pytest
from ranks import python

from hvdtrain.frameworks.torch import allocator

CODE = """
import resource, sys, torch
from hvdtrain.frameworks.torch import allocator
kept = allocator.keep(sys.argv[1] == "keep")
def work():
    [torch.ones(12_000_000) for _ in range(3)]  # 48 MB each: more than glibc ever keeps by itself
for _ in range(10):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    work()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this libc has no mallopt")
def test_freed_memory_is_reused() -> None:
    faults = {}
    for how in ("keep", "usual"):
        kept, faults[how] = python(["-c", CODE, how]).stdout.split()
        assert kept == str(how == "keep")
    assert int(faults["keep"]) < 1000 and int(faults["usual"]) > 50_000


@pytest.mark.parametrize("name", allocator.ENVIRONMENT)
def test_settings_in_the_environment_win(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1000000")
    assert not allocator.keep()
