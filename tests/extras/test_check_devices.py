"""The device of a rank in the report of check, with a fake torch.cuda or torch.xpu."""

from __future__ import annotations

import pytest
from faked_gpus import Gpus

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.extras.check.dry_run import pick_device


def test_a_gpu_of_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch calls it cuda."""
    Gpus(monkeypatch, 1, "AMD Instinct MI300X", "34aa", hip="6.4.43484")
    found = pick_device(configure(None, []), SingleProcessCommunicator())
    assert (found["name"], found["model"]) == ("cuda:0", "AMD Instinct MI300X (ROCm 6.4.43484)")


@pytest.mark.parametrize("words", [[], ["speed.device=xpu"]])
def test_a_gpu_of_intel(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 6, "Intel(R) Data Center GPU Max 1550", "34aa", kind="xpu")
    communicator = SingleProcessCommunicator()
    communicator.local_rank = 7
    found = pick_device(configure(None, words), communicator)
    assert (found["name"], found["model"], found["visible"]) == (
        "xpu:1",
        "Intel(R) Data Center GPU Max 1550 (Intel)",
        6,
    )
