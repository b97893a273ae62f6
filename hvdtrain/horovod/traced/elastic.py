"""Elastic training for variables, and for errors that a compiled function raises in its library's
own form."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.horovod import elastic
from hvdtrain.horovod.engine.errors import HorovodInternalError
from hvdtrain.horovod.libraries import value_of
from hvdtrain.horovod.traced.on_host import FAILURES
from hvdtrain.horovod.traced.variables import broadcast_variables


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates func(state, ...) as hvdtrain.horovod.elastic.run() does: after the loss of a rank
    the others continue from their last commit.

    Errors of functions that TensorFlow or JAX compiled count if a call of hvdtrain.horovod failed
    in them.
    """

    @functools.wraps(func)
    def translated(state: elastic.State, *args: Any, **kwargs: Any) -> Any:
        FAILURES.clear()
        try:
            return func(state, *args, **kwargs)
        except HorovodInternalError:
            raise
        except Exception as error:
            if not FAILURES:
                raise
            raise FAILURES.pop() from error

    return elastic.run(translated)


class VariablesState(elastic.ObjectState):
    """Variables of Keras or TensorFlow, and values as attributes of these names."""

    def __init__(self, variables: Callable[[], Sequence[Any]], **values: Any) -> None:
        """variables: returns the current variables, in a fixed order."""
        self._variables = variables
        self._keep()
        super().__init__(**values)

    def save(self) -> None:
        self._keep()
        super().save()

    def restore(self) -> None:
        for variable, array in zip(self._variables(), self._kept, strict=True):
            variable.assign(array)
        super().restore()

    def sync(self) -> None:
        broadcast_variables(self._variables(), root_rank=0)
        self._keep()
        super().sync()

    def _keep(self) -> None:
        self._kept = [_array_of(variable) for variable in self._variables()]


def _array_of(variable: Any) -> np.ndarray:
    value = value_of(variable)
    return np.array(value.detach().cpu() if hasattr(value, "detach") else value)
