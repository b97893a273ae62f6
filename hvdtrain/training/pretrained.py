"""model.weights: the extra that loads the weights of a file or folder instead of the model's
initial weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core import extras
from hvdtrain.frameworks.learner import Learner


class Loaded(NamedTuple):
    """The loaded state, the same on all ranks."""

    digest: str  # digest of the state
    lines: list[str]  # for the user


def check_weights(config: Config) -> None:
    """Raises UserError if model.weights names no file or folder, or if no extra loads weights."""
    _extra(config).check_exists(
        Path(str(config.model.weights)).expanduser(), config.where("model.weights")
    )


def load_pretrained(
    config: Config, communicator: Communicator, learner: Learner, go_on: Callable[[], None]
) -> Loaded:
    """Loads pretrained weights into every rank's learner by the extra that does so. Every rank
    calls it. Raises UserError on all of them, also without that extra."""
    loaded: Loaded = _extra(config).load_pretrained(config, communicator, learner, go_on)
    return loaded


def _extra(config: Config) -> Any:
    module = extras.implementation("model.weights")
    return extras.load(module, "loads weights", "model.weights", config.where("model.weights"))
