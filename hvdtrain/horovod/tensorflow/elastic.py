"""hvd.elastic for TensorFlow: variables that continue from their last commit when a rank is
lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.horovod.elastic import ObjectState, State, init, shutdown
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.traced.elastic import VariablesState, run


class TensorFlowState(VariablesState):
    """Variables of TensorFlow, and values: TensorFlowState(variables, batch=0)."""

    def __init__(
        self, variables: Sequence[Any] | None = None, session: None = None, **values: Any
    ) -> None:
        if variables is None or session is not None:
            what = "global variables and sessions belong to TensorFlow 1"
            raise BadCall(what, "hvd.elastic.TensorFlowState()", "variables=[...], without session")
        self.variables = variables
        super().__init__(lambda: list(self.variables), **values)


def TensorFlowKerasState(
    model: Any, optimizer: Any = None, backend: None = None, **values: Any
) -> VariablesState:
    """Returns the KerasState of hvdtrain.horovod.keras.elastic."""
    from hvdtrain.horovod.keras.elastic import KerasState

    return KerasState(model, optimizer, backend, **values)


__all__ = [
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "init",
    "run",
    "shutdown",
]
