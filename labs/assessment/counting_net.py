"""The net.py of a grading: the same network, and a note of what each rank trains it with.

At its end, a process that has trained it writes share-RANK.json beside this file; share.py reads
it.
"""

from __future__ import annotations

import atexit
import json
import os
from pathlib import Path

import plain_net
import torch

ENTRIES = 8  # of each parameter: enough to tell networks apart that were trained apart


class Net(plain_net.Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            _note.step(self, x)
        return super().forward(x)


class _Note:
    """What this process has trained with so far."""

    def __init__(self) -> None:
        self.samples = 0
        self.first = 0.0  # sum of the first batch
        self.last = torch.zeros(0)  # weights before the last step
        self.net: Net | None = None

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, net: Net, x: torch.Tensor) -> None:
        """Of a batch (n, channels, H, W) that is trained with. The host does not wait for a device,
        but in the first step."""
        if self.net is None:
            self.first = float(x.double().sum())
            atexit.register(self.write)
        self.net = net
        self.samples = self.samples + len(x)
        self.last = _some_weights(net)

    def write(self) -> None:
        assert self.net is not None
        rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0"))
        end = _some_weights(self.net)
        note = {
            "samples": self.samples,
            "first": self.first,
            "last": self.last.tolist(),
            "end": end.tolist(),
        }
        Path(__file__).with_name(f"share-{rank}.json").write_text(json.dumps(note))


def _some_weights(net: Net) -> torch.Tensor:
    return torch.cat(
        [parameter.detach().flatten()[:ENTRIES].float() for parameter in net.parameters()]
    )


_note = _Note()
