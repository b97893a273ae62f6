"""torchvision's operators are defined once, also where two threads want them at the same time."""

from __future__ import annotations

import sys
import threading
import time

import pytest
import torch

from hvdtrain.core import import_torchvision


class Library:
    """As torch.library.Library, which raises where a namespace is defined for the second time."""

    made = 0

    def __init__(self, namespace: str, kind: str) -> None:
        Library.made += 1
        time.sleep(0.05)  # so that the other thread would come between

    def define(self, schema: str) -> None:
        pass


def test_two_threads_define_the_operators_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)
    monkeypatch.setattr(import_torchvision, "_is_mismatched", lambda: both.wait(60) >= 0)
    monkeypatch.setattr(import_torchvision, "_libraries", [])
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.library, "Library", Library)
    threads = [
        threading.Thread(target=import_torchvision.define_missing_operators) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert Library.made == 1 and len(import_torchvision._libraries) == 1
