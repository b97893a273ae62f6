"""DistributedOptimizer: an optimizer of Keras whose gradients are combined over ranks before it applies them; models that have one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvdtrain.horovod.basics import ProcessSet, global_process_set
from hvdtrain.horovod.call import Average, Compression, Compressor
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.traced.gradient_reduction import GradientReduction, refuse_placements
from hvdtrain.horovod.traced.on_host import as_written

_WHERE = "hvd.DistributedOptimizer()"
_ONCE = "wrap the optimizer of Keras, once"


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """The optimizer, of a class below its own, with its variables: gradients are combined over ranks before it applies them.

    name: of the reductions. backward_passes_per_step: the sum of so many gradients is applied, with average_aggregated_gradients their
    mean; it is Keras' gradient_accumulation_steps, and ranks reduce once in so many passes. With a LossScaleOptimizer, which has to judge
    the gradients of all ranks, they reduce in every pass; under the policy mixed_float16 an optimizer without a loss scale gets one here.

    Raises BadCall for arguments of Horovod's that would do nothing: devices, groups, scale_local_gradients=False.
    """
    refuse_placements(_WHERE, device_dense=device_dense, device_sparse=device_sparse, num_groups=num_groups, groups=groups)
    if not scale_local_gradients:
        what = "scale_local_gradients=False has no meaning: the gradients of all variables are reduced"
        raise BadCall(what, _WHERE, "the call without it")
    if isinstance(optimizer, (Reducing, ReducingScaled)):
        raise BadCall("this optimizer is a DistributedOptimizer already", _WHERE, _ONCE)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        what = f"{type(optimizer).__module__}.{type(optimizer).__qualname__} is no optimizer of Keras 3"
        raise BadCall(what, _WHERE, "keras.optimizers.SGD(...), say")
    optimizer = _with_loss_scale(optimizer)
    factor = _accumulate(optimizer, backward_passes_per_step, average_aggregated_gradients)
    name = name or f"gradients of {optimizer.name}"
    reduction = GradientReduction(name, _WHERE, compression, op, gradient_predivide_factor, sparse_as_dense, process_set)
    return _below(optimizer, reduction, factor)


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    **arguments: Any,
) -> Any:
    """The model of a file, as keras.saving.load_model() loads it, whose optimizer is a DistributedOptimizer with the state of the file.

    arguments: of DistributedOptimizer. The file is as one that was saved without it, and Keras alone loads it too.
    """
    objects = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=objects)
    if model.optimizer is None:
        what, fix = f"{filepath}: this model was saved without an optimizer", "keras.saving.load_model(), model.compile(optimizer=...)"
        raise BadCall(what, "hvd.load_model()", fix)
    model.optimizer = DistributedOptimizer(model.optimizer, compression=compression, **arguments)
    return model


class Reducing:
    """The methods that DistributedOptimizer puts before those of an optimizer."""

    _reduction: GradientReduction
    _factor: float  # of reduced gradients
    gradient_accumulation_steps: int | None

    @as_written
    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """Reduces, but for gradients that are accumulated: these once they are applied."""
        base: Any = super()
        return base.apply(grads if self.gradient_accumulation_steps else self._reduced(grads), trainable_variables)

    @as_written
    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        """Keras calls it for the gradients that are applied; on JAX in other passes too, where it does not use the result."""
        base: Any = super()
        if self.gradient_accumulation_steps:
            grads = self._reduced_in_update(grads) if keras.backend.backend() == "jax" else self._reduced(grads)
        return base._clip_gradients(grads)

    def _reduced_in_update(self, grads: Sequence[Any]) -> Any:
        optimizer: Any = self
        is_update = (optimizer._iterations + 1) % optimizer.gradient_accumulation_steps == 0
        return keras.ops.cond(is_update, lambda: self._reduced(grads), lambda: list(grads))

    def _reduced(self, grads: Sequence[Any]) -> list[Any]:
        reduced = self._reduction.reduce(grads)
        return reduced if self._factor == 1 else [grad if grad is None else grad * self._factor for grad in reduced]

    @property
    def loss_scale_factor(self) -> float | None:
        factor: float | None = self.__dict__["loss_scale_factor"]
        return factor

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: float | None) -> None:
        """Raises BadCall where a LossScaleOptimizer is put around this one, as by compile(): it would judge each rank's gradients alone."""
        if value is None and "loss_scale_factor" in self.__dict__:
            what = (
                "a LossScaleOptimizer around a DistributedOptimizer leaves out a step on one rank, while the others wait for its gradients"
            )
            raise BadCall(what, _WHERE, "hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))")
        self.__dict__["loss_scale_factor"] = value


class ReducingScaled:
    """The methods that DistributedOptimizer puts before those of a LossScaleOptimizer: it judges what all ranks have added up."""

    _reduction: GradientReduction
    _factor: float
    _reduced = Reducing._reduced

    @as_written
    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        base: Any = super()
        return base.apply(self._reduced(grads), trainable_variables)  # type: ignore[misc]

    def stateless_apply(self, optimizer_variables: Any, grads: Sequence[Any], trainable_variables: Any) -> Any:
        """Keras' own does not call apply()."""
        base: Any = super()
        return base.stateless_apply(optimizer_variables, self._reduced(grads), trainable_variables)  # type: ignore[misc]


def _with_loss_scale(optimizer: Any) -> Any:
    """Inside of a LossScaleOptimizer where compile() would put it there."""
    scaled = keras.optimizers.LossScaleOptimizer
    is_mixed = keras.config.dtype_policy().name == "mixed_float16"
    if not is_mixed or isinstance(optimizer, scaled) or optimizer.loss_scale_factor is not None:
        return optimizer
    return scaled(optimizer, name="loss_scale_optimizer")


def _accumulate(optimizer: Any, passes: int, is_mean: bool) -> float:
    """Has Keras accumulate over so many passes; the factor of the reduced gradients, by which their mean becomes Horovod's sum."""
    if passes <= 0:
        raise BadCall("backward_passes_per_step must be > 0", _WHERE, "1 or more")
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if passes == 1:
        return 1.0
    if inner.gradient_accumulation_steps:
        what = f"backward_passes_per_step={passes}, and gradient_accumulation_steps={inner.gradient_accumulation_steps} of the optimizer"
        raise BadCall(what, _WHERE, "one of them")
    if inner.built:
        raise BadCall("this optimizer is built without accumulated gradients", _WHERE, "backward_passes_per_step before the first step")
    inner.gradient_accumulation_steps = passes
    return 1.0 if is_mean else float(passes)


def _below(optimizer: Any, reduction: GradientReduction, factor: float) -> Any:
    """This optimizer, of a class that has its class' name and the methods that reduce before its own."""
    kind = type(optimizer)
    methods = ReducingScaled if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else Reducing
    settings = {"_reduction": reduction, "_factor": factor, "__module__": kind.__module__}
    found: Any = object.__new__(type(kind.__name__, (methods, kind), settings))
    found.__dict__.update(optimizer.__dict__)
    return found
