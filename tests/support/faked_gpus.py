"""GPUs that torch seems to see, in tests on machines without one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch


class Gpus:
    """torch.cuda or torch.xpu of a process that sees so many GPUs."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        count: int,
        name: str,
        uuid: str,
        hip: str | None = None,
        kind: str = "cuda",
    ) -> None:
        self.chosen: list[torch.device] = []
        monkeypatch.setattr(f"torch.{kind}.device_count", lambda: count)
        monkeypatch.setattr(f"torch.{kind}.set_device", self.chosen.append)
        monkeypatch.setattr(
            f"torch.{kind}.get_device_properties",
            lambda device: SimpleNamespace(name=name, uuid=uuid, total_memory=1),
        )
        monkeypatch.setattr("torch.version.hip", hip)
