"""Callbacks for model.fit() on several ranks: broadcast of the initial state, metrics over all
ranks, learning rates, and the best model of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from hvdtrain.horovod.basics import ProcessSet, global_process_set
from hvdtrain.horovod.call import Average
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.job import JOB
from hvdtrain.horovod.reductions import allreduce
from hvdtrain.horovod.traced.gradient_reduction import refuse_placements
from hvdtrain.horovod.traced.variables import broadcast_variables


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcasts the weights and optimizer of rank `root_rank` to all ranks, before the first step
    of fit(). Each rank keeps its own random seed.

    A model that has no weights before it has seen data gets them after the first step.
    """

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        local_variables: Any = None,
        *,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        """local_variables: one or several variables that each rank keeps unchanged; the optimizer's
        variables are broadcast in any case."""
        super().__init__()
        refuse_placements(type(self).__name__, device=device)
        self._root = root_rank
        self._process_set = process_set
        self._is_done = False
        self._local: list[Any] = []
        for variable in (
            [local_variables]
            if isinstance(local_variables, keras.Variable)
            else local_variables or ()
        ):
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Leaves this variable of the model to each rank."""
        if not isinstance(var, keras.Variable):
            what = (
                f"a local variable is a {type(var).__module__}.{type(var).__qualname__}, not a "
                "Keras variable"
            )
            raise BadCall(
                what,
                type(self).__name__,
                "for example local_variables=model.layers[0].trainable_variables",
            )
        self._local.append(var)

    def on_train_begin(self, logs: Any = None) -> None:
        if self.model.built:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._broadcast()

    def _broadcast(self) -> None:
        if self._is_done:
            return
        model = self.model
        optimizer = self.model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        local = {id(variable) for variable in self._local}
        common = [variable for variable in model.weights if id(variable) not in local]
        broadcast_variables(
            [*common, *(optimizer.variables if optimizer is not None else ())],
            self._root,
            self._process_set,
        )
        self._is_done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages each metric over ranks at the end of an epoch, for later callbacks and for the
    history."""

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        refuse_placements(type(self).__name__, device=device)
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not logs or JOB.engine.size == 1 or not self._process_set.included():
            return
        names = sorted(name for name, value in logs.items() if np.ndim(value) == 0)
        values = np.array([float(logs[name]) for name in names])
        means = allreduce(
            values,
            name=f"metrics of epoch {epoch + 1}: {', '.join(names)}",
            op=Average,
            process_set=self._process_set,
        )
        logs.update(zip(names, means.tolist(), strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to initial_lr x multiplier, from start_epoch until before end_epoch.

    multiplier: a function of the epoch; a number is the factor of each epoch, multiplier ** (epoch
    - start_epoch), as in Horovod. staircase: it changes at the beginning of an epoch, else with
    each batch: the epoch is then a fraction. momentum_correction: an optimizer's accumulated
    momentum changes in proportion (Goyal et al. 2017, arXiv:1706.02677, section 2.1).
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise BadCall(
                "Parameter `initial_lr` is required",
                type(self).__name__,
                "for example initial_lr=0.1",
            )
        self._initial = initial_lr
        self._staircase = staircase
        self._corrects = momentum_correction
        self._multiplier = multiplier
        self._start = start_epoch
        self._end = math.inf if end_epoch is None else end_epoch
        self._steps = steps_per_epoch
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        if self._steps is None and not self._staircase:
            self._steps = (self.params or {}).get("steps")
            if not self._steps:
                what = (
                    "steps_per_epoch is unknown, but a rate that changes within an epoch needs it"
                )
                raise BadCall(what, type(self).__name__, "steps_per_epoch=N")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if not self._start <= self._epoch < self._end:
            return
        if self._staircase and batch == 0:
            self._set(self._epoch)
        elif not self._staircase and self._steps:
            self._set(self._epoch + batch / self._steps)

    def _set(self, epoch: float) -> None:
        # Callback.model: with JAX it then has the current variables
        optimizer = self.model.optimizer
        before = rate_of(optimizer)
        now = self._initial * self._factor(epoch)
        optimizer.learning_rate = now
        if self._corrects and before > 0 and now != before:
            for velocity in _velocities(optimizer):
                velocity.assign(velocity * (now / before))

    def _factor(self, epoch: float) -> float:
        return (
            self._multiplier(epoch)
            if callable(self._multiplier)
            else self._multiplier ** (epoch - self._start)
        )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = rate_of(self.model.optimizer)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from initial_lr / size to initial_lr during the first warmup_epochs
    (Goyal et al. 2017, section 2.2)."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self._steps, "the rate of a batch, before on_train_begin()"
            epoch += 1.0 / self._steps  # the last batch has the full rate
            return 1.0 / JOB.engine.size * (epoch * (JOB.engine.size - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch
        )
        self._verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if epoch == self._end - 1 and self._verbose and JOB.engine.rank == 0:
            print(
                f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to "
                f"{rate_of(self.model.optimizer):g}."
            )


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """ModelCheckpoint with save_best_only that only rank 0 writes. Put it after
    MetricAverageCallback to judge by all ranks."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: Any = "epoch",
        *,
        filepath: Any,
        save_weights_only: bool = False,
    ) -> None:
        how: dict[str, Any] = {
            "mode": mode,
            "save_freq": save_freq,
            "save_weights_only": save_weights_only,
        }
        super().__init__(filepath, monitor=monitor, verbose=verbose, save_best_only=True, **how)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if JOB.engine.rank == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if JOB.engine.rank == 0:
            super().on_epoch_end(epoch, logs)


def rate_of(optimizer: Any) -> float:
    """Returns the learning rate of the next step."""
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def _velocities(optimizer: Any) -> list[Any]:
    """Returns the momentum variables that include the learning rate: of SGD and RMSprop."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not getattr(inner, "momentum", 0):
        return []
    slots: list[Any] = getattr(inner, "momentums", None) or getattr(inner, "_momentums", [])
    return [each for each in slots if each is not None]
