"""DistributedOptimizer: a Keras optimizer that combines gradients over ranks before it applies
them, optionally except for some layers. Loads models with one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import keras

from hvdtrain.horovod.basics import ProcessSet, global_process_set
from hvdtrain.horovod.call import Average, Compression, Compressor
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.libraries import as_written
from hvdtrain.horovod.traced.gradient_reduction import GradientReduction, refuse_placements

_WHERE = "hvd.DistributedOptimizer()"
_ONCE = "wrap the Keras optimizer once"


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
    """Returns the optimizer, as a subclass of its class and with its variables, which combines
    gradients over ranks before it applies them.

    name: of the reductions. backward_passes_per_step: number of gradients whose sum, or mean with
    average_aggregated_gradients, is applied. It sets Keras' gradient_accumulation_steps, and ranks
    reduce once in this many passes. With a LossScaleOptimizer, which must check the gradients of
    all ranks, they reduce in every pass; under the policy mixed_float16 an optimizer without a loss
    scale gets one here.

    register_local_var(variable) of the returned optimizer makes a variable local to each rank: its
    gradient is not reduced, but divided by the number of ranks if scale_local_gradients is True.

    Raises BadCall for Horovod arguments that would have no effect: devices, groups.
    """
    refuse_placements(
        _WHERE,
        device_dense=device_dense,
        device_sparse=device_sparse,
        num_groups=num_groups,
        groups=groups,
    )
    if isinstance(optimizer, (Reducing, ReducingScaled)):
        raise BadCall("this optimizer is already a DistributedOptimizer", _WHERE, _ONCE)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        what = (
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__} is not a Keras 3 "
            "optimizer"
        )
        raise BadCall(what, _WHERE, "for example keras.optimizers.SGD(...)")
    optimizer = _with_loss_scale(optimizer)
    factor = _accumulate(optimizer, backward_passes_per_step, average_aggregated_gradients)
    name = name or f"gradients of {optimizer.name}"
    how = (
        compression,
        op,
        gradient_predivide_factor,
        sparse_as_dense,
        process_set,
        scale_local_gradients,
    )
    return _below(optimizer, GradientReduction(name, _WHERE, *how), factor)


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns a DistributedOptimizer with the variables of some layers local to each rank.

    local_layers: a built layer, or several. BroadcastGlobalVariablesCallback(local_variables=...)
    skips their variables, too.
    """
    how: dict[str, Any] = {
        "compression": compression,
        "op": op,
        "groups": groups,
        "process_set": process_set,
    }
    distributed = DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        scale_local_gradients=scale_local_gradients,
        **how,
    )
    for variable in variables_of_layers(local_layers, "hvd.PartialDistributedOptimizer()"):
        distributed.register_local_var(variable)
    return distributed


def variables_of_layers(local_layers: Any, where: str) -> list[Any]:
    """Returns the trainable variables of a layer, or of several. Raises BadCall for anything but a
    layer, and for a layer that is not built."""
    if local_layers is None:
        return []
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else list(local_layers)
    if not all(isinstance(layer, keras.layers.Layer) for layer in layers):
        raise BadCall(
            "All local layers must be of keras.layers.Layer type",
            where,
            "for example local_layers=[model.layers[0]]",
        )
    if unbuilt := [layer.name for layer in layers if not layer.built]:
        what = f"these local layers have no variables yet: {', '.join(unbuilt)}"
        raise BadCall(
            what,
            where,
            "keras.Input(...) as the model's first layer, or call model.build(shape) first",
        )
    return [variable for layer in layers for variable in layer.trainable_weights]


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
    **arguments: Any,
) -> Any:
    """Loads a model as keras.saving.load_model() does; its optimizer is a DistributedOptimizer with
    the saved state.

    Other arguments are passed to DistributedOptimizer. Keras alone can load the file, too, because
    it does not record DistributedOptimizer.
    """
    if legacy_opts:
        raise BadCall(
            "legacy_opts=True: Keras 3 has no keras.optimizers.legacy",
            "hvd.load_model()",
            "the call without it",
        )
    objects = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=objects)
    if model.optimizer is None:
        what = f"{filepath}: this model was saved without an optimizer"
        fix = "keras.saving.load_model(), model.compile(optimizer=...)"
        raise BadCall(what, "hvd.load_model()", fix)
    known = {id(variable) for variable in model.optimizer._trainable_variables}
    if model.optimizer.built and known != {id(variable) for variable in model.trainable_variables}:
        what = (
            f"{filepath}: Keras {keras.__version__} loads this optimizer without its variables, "
            "as from .h5 files"
        )
        raise BadCall(
            what,
            "hvd.load_model()",
            "a file whose name ends in .keras; or model.compile() with a new optimizer",
        )
    model.optimizer = DistributedOptimizer(model.optimizer, compression=compression, **arguments)
    return model


class Reducing:
    """The methods of an optimizer that DistributedOptimizer overrides."""

    _reduction: GradientReduction
    _factor: float  # factor of reduced gradients
    _trainable_variables: list[Any]
    gradient_accumulation_steps: int | None

    def register_local_var(self, var: Any) -> None:
        """Makes this variable local: its gradient is not reduced over ranks."""
        if not isinstance(var, keras.Variable):
            what = (
                f"a local variable is a {type(var).__module__}.{type(var).__qualname__}, not a "
                "Keras variable"
            )
            raise BadCall(what, _WHERE, "one of model.trainable_variables")
        if getattr(self, "global_clipnorm", None):
            what = (
                "local layers do not work with global_clipnorm: the norm would include their "
                "gradients, and ranks would scale the shared ones differently"
            )
            raise BadCall(
                what, _WHERE, "clipnorm= or clipvalue=, which clip each variable by itself"
            )
        self._reduction.local.add(id(var))

    @as_written
    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """Reduces gradients, but accumulated ones only when they are applied."""
        base: Any = super()
        given = None if trainable_variables is None else list(trainable_variables)
        found = self._trainable_variables if given is None else given
        if self.gradient_accumulation_steps:
            self.__dict__["_accumulated"] = [
                variable for grad, variable in zip(grads, found, strict=True) if grad is not None
            ]
            return base.apply(grads, given)
        return base.apply(self._reduced(grads, found), given)

    @as_written
    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        """Keras calls this for gradients that are applied; on JAX also in other passes, where it
        ignores the result."""
        base: Any = super()
        if self.gradient_accumulation_steps:
            found = self.__dict__["_accumulated"]
            grads = (
                self._reduced_in_update(grads, found)
                if keras.backend.backend() == "jax"
                else self._reduced(grads, found)
            )
        return base._clip_gradients(grads)

    def _reduced_in_update(self, grads: Sequence[Any], variables: Sequence[Any]) -> Any:
        optimizer: Any = self
        is_update = (optimizer._iterations + 1) % optimizer.gradient_accumulation_steps == 0
        return keras.ops.cond(
            is_update, lambda: self._reduced(grads, variables), lambda: list(grads)
        )

    def _reduced(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        reduced = self._reduction.reduce(grads, [id(variable) for variable in variables])
        return (
            reduced
            if self._factor == 1
            else [grad if grad is None else grad * self._factor for grad in reduced]
        )

    @property
    def loss_scale_factor(self) -> float | None:
        factor: float | None = self.__dict__.get("loss_scale_factor")  # none yet in from_config()
        return factor

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: float | None) -> None:
        """Raises BadCall if a LossScaleOptimizer wraps this one, for example by compile(): it would
        only check each rank's local gradients."""
        if value is None and "loss_scale_factor" in self.__dict__:
            what = (
                "a LossScaleOptimizer around a DistributedOptimizer skips a step on one rank "
                "while the others wait for its gradients"
            )
            raise BadCall(
                what,
                _WHERE,
                "hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))",
            )
        self.__dict__["loss_scale_factor"] = value


class ReducingScaled:
    """The methods of a LossScaleOptimizer that DistributedOptimizer overrides: it then checks the
    gradients of all ranks."""

    _reduction: GradientReduction
    _factor: float

    def register_local_var(self, var: Any) -> NoReturn:
        """Raises BadCall: a rank would skip a step because of a gradient that the others do not
        have."""
        what = (
            "local layers do not work with a LossScaleOptimizer: ranks would skip different steps"
        )
        raise BadCall(
            what, _WHERE, "the policy mixed_bfloat16, or an optimizer with loss_scale_factor"
        )

    @as_written
    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        base: Any = super()
        return base.apply(self._reduced(grads), trainable_variables)

    def stateless_apply(
        self, optimizer_variables: Any, grads: Sequence[Any], trainable_variables: Any
    ) -> Any:
        """Overridden because the method of Keras does not call apply()."""
        base: Any = super()
        return base.stateless_apply(optimizer_variables, self._reduced(grads), trainable_variables)

    def _reduced(self, grads: Sequence[Any]) -> list[Any]:
        return Reducing._reduced(self, grads, ())  # type: ignore[arg-type]


def _with_loss_scale(optimizer: Any) -> Any:
    """Wraps the optimizer in a LossScaleOptimizer if compile() would do so."""
    scaled = keras.optimizers.LossScaleOptimizer
    is_mixed = keras.config.dtype_policy().name == "mixed_float16"
    if not is_mixed or isinstance(optimizer, scaled) or optimizer.loss_scale_factor is not None:
        return optimizer
    return scaled(optimizer, name="loss_scale_optimizer")


def _accumulate(optimizer: Any, passes: int, is_mean: bool) -> float:
    """Makes Keras accumulate over `passes` passes; returns the factor that turns their mean into
    Horovod's sum."""
    if passes <= 0:
        raise BadCall("backward_passes_per_step must be > 0", _WHERE, "1 or more")
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if passes == 1:
        return 1.0
    if inner.gradient_accumulation_steps:
        what = (
            f"both backward_passes_per_step={passes} and the optimizer's "
            f"gradient_accumulation_steps={inner.gradient_accumulation_steps} are set"
        )
        raise BadCall(what, _WHERE, "one of them")
    if inner.built:
        raise BadCall(
            "this optimizer was built without gradient accumulation",
            _WHERE,
            "set backward_passes_per_step before the first step",
        )
    inner.gradient_accumulation_steps = passes
    return 1.0 if is_mean else float(passes)


def _below(optimizer: Any, reduction: GradientReduction, factor: float) -> Any:
    """Changes this optimizer's class to a subclass with the same name and the overriding
    methods."""
    kind = type(optimizer)
    methods = (
        ReducingScaled if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else Reducing
    )
    settings = {"_reduction": reduction, "_factor": factor, "__module__": kind.__module__}
    wrapped: Any = object.__new__(type(kind.__name__, (methods, kind), settings))
    wrapped.__dict__.update(optimizer.__dict__)
    return wrapped
