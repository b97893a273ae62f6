"""What a script has of torch before prepare(): its device, and its lines in messages. Without
torch, until it asks for the device."""

from __future__ import annotations

from typing import Any

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.frameworks.own_loop import Words

WORDS = Words(
    prepare="model, optimizer = ctx.prepare(model, optimizer)",
    one="one module that has all parts, with one optimizer of several groups",
    gradient="ctx.backward(loss)",
    step="optimizer.step()",
    resume="state = ctx.resume()",
    parts="ctx.accumulate()",
    counted="ctx.backward(loss, count=N), or ctx.accumulate() where loss_of returns (loss, N)",
)


def begin(config: Config, communicator: Communicator) -> None:
    """Nothing: prepare() sets up what the model's device needs."""


def pick_device(config: Config, communicator: Communicator) -> Any:
    """The torch.device of this rank."""
    from hvdtrain.frameworks.torch.device import pick_device as device_of

    return device_of(config, communicator)
