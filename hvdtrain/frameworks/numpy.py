"""The numpy framework: one linear layer with hand-written gradients of each task's loss, the
reference for the other frameworks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.frameworks.by_name import build_rule, check_patterns
from hvdtrain.frameworks.host import HostLearner, HostModel
from hvdtrain.frameworks.learner import Learner
from hvdtrain.tasks.task import DeviceAndDtype, NumpyPart, Task, part_of


class NumpyLinear(HostModel):
    """outputs = x W' + b from zero weights, with the names and shapes of torch/models/linear.py."""

    def __init__(self, config: Config, task: Task, dtype: np.dtype[Any]) -> None:
        self.notes: list[str] = []
        self.module = None
        self.title = f"linear, %, numpy {dtype} on the CPU"
        self.weights: Mapping[str, np.ndarray] = {
            name: np.zeros(shape, dtype) for name, shape in shapes(config, task).items()
        }
        self._part: NumpyPart = part_of(task, "numpy", config, DeviceAndDtype(dtype))
        self._x = np.zeros(0)  # inputs of the last training_outputs()

    def inputs(self, batch: Mapping[str, Any]) -> np.ndarray:
        """Returns (n, features)."""
        x: np.ndarray = self._part.inputs(batch)
        return x

    def assign(self, weights: Mapping[str, np.ndarray]) -> None:
        self.weights = weights

    def outputs(self, x: np.ndarray) -> np.ndarray:
        logits: np.ndarray = x @ self.weights["fc.weight"].T + self.weights["fc.bias"]
        return logits

    def training_outputs(self, x: np.ndarray) -> np.ndarray:
        self._x = x
        return self.outputs(x)

    def gradient(self, error: np.ndarray, share: float) -> np.ndarray:
        return np.concatenate([(error.T @ self._x).ravel(), error.sum(0)])


def build(config: Config, task: Task, communicator: Communicator) -> Learner:
    """Builds the learner of framework=numpy for model.name=linear, which training/conflicts.py has
    checked."""
    check_patterns(config, shapes(config, task))
    dtype = np.dtype("float64" if config.speed.precision == "fp64" else "float32")
    return HostLearner(
        config, task, NumpyLinear(config, task, dtype), build_rule(config), communicator, dtype
    )


def shapes(config: Config, task: Task) -> dict[str, tuple[int, ...]]:
    """Returns the parameters by name, as created by build(), without allocating them. Raises
    UserError for a task that NumPy does not support."""
    part_of(task, "numpy", config, DeviceAndDtype(np.dtype(np.float64)))
    outputs = task.sizes["outputs"]
    return {"fc.weight": (outputs, math.prod(task.sizes["shape"])), "fc.bias": (outputs,)}
