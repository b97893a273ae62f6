"""What each device of a job achieves, measured by an extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.plugins import named
from hvdtrain.config.schema import Config
from hvdtrain.core.extras import throughput_measure
from hvdtrain.frameworks.learner import Learner
from hvdtrain.tasks.task import Task


class Throughput:
    """Figures of one device. By default there are none."""

    def start_fields(self) -> dict[str, Any]:
        """Returns fields of the event "start"."""
        return {}

    def of_device(self, rates: Mapping[str, Any]) -> dict[str, float]:
        """Returns fields of the events step, epoch, end and stop, computed from the rates of all
        devices."""
        return {}

    def header_lines(self, more: Sequence[str] = ()) -> list[str]:
        """Returns lines of the header. more: what else measures the device."""
        return []

    def words(self, fields: Mapping[str, Any]) -> str:
        """Formats the fields of of_device()."""
        return ""

    def on_other_ranks(
        self, config: Config, communicator: Communicator, learner: Learner
    ) -> Throughput:
        """Returns the figures of the ranks that continue after a loss. A collective."""
        return self


def measure_throughput(
    config: Config, task: Task, communicator: Communicator, learner: Learner, *, is_small: bool
) -> Throughput:
    """Measures rank 0's model and device, and returns the result on every rank. A collective.
    is_small: the model can run on the CPU in milliseconds."""
    name = throughput_measure()
    if not name:
        return Throughput()
    found: Throughput = named(name)(config, task, communicator, learner, is_small=is_small)
    return found
