"""The keras framework: a user's keras.Model on any backend of Keras 3 (torch, JAX, TensorFlow),
trained by hvdtrain's rules.

The backend computes outputs and gradients; NumPy computes losses, the reduction over ranks and
updates on the host. KERAS_BACKEND or ~/.keras/keras.json selects the backend.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.plugins import call_own, is_dotted
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Batch
from hvdtrain.core.own_line import own_line
from hvdtrain.core.progress import Hyper, fold
from hvdtrain.errors import UserError
from hvdtrain.frameworks.by_name import build_rule, check_patterns, twice_activated
from hvdtrain.frameworks.host import HostLearner, HostModel
from hvdtrain.frameworks.keras.objects import (
    added_loss,
    assigned_in_call,
    build_variables,
    check_and_describe,
    named_variables,
    users_object,
)
from hvdtrain.frameworks.learner import Learner, fair_threads
from hvdtrain.optim.rule import Array, Ops, Rule
from hvdtrain.tasks.task import DeviceAndDtype, Task, part_of

_MEANS = ("moving_mean", "moving_variance")  # running statistics of norms


def build(config: Config, task: Task, communicator: Communicator) -> Learner:
    """Builds the learner of framework=keras. Every rank calls it.

    Raises UserError if Keras is missing, if the object is not a Keras model, or if the model does
    not fit the task.
    """
    _share_cores(communicator)
    dtype = np.dtype("float64" if config.speed.precision == "fp64" else "float32")
    part_of(task, "numpy", config, DeviceAndDtype(dtype))
    keras = load_keras(config.where("framework"), dtype)
    _use_gpu(keras.backend.backend(), config, communicator)
    keras.utils.set_random_seed(fold(config.seed) % 2**31)
    model = KerasModel(keras, _make(keras, config, task), config, task, dtype)
    trained = {name: p.shape for name, p in model.weights.items()}
    check_patterns(config, trained, frozen=model.buffers)
    rule = build_rule(config)
    return HostLearner(
        config,
        task,
        model,
        OfKernels(rule, model.kernels) if config.optim.name == "muon" else rule,
        communicator,
        dtype,
    )


def _share_cores(communicator: Communicator) -> None:
    """Limits this rank to its share of the host's cores. Every rank calls it, before Keras is
    imported."""
    threads = fair_threads(communicator)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def _use_gpu(backend: str, config: Config, communicator: Communicator) -> None:
    """Selects one of the host's GPUs for this rank, if the backend sees any. Every rank calls
    it."""
    local_rank = communicator.local_rank
    if backend == "torch":
        accelerator = importlib.import_module("torch").accelerator
        if count := accelerator.device_count():
            accelerator.set_device_index(local_rank % count)
    elif backend == "tensorflow":
        devices = importlib.import_module("tensorflow").config
        if gpus := devices.list_physical_devices("GPU"):
            with contextlib.suppress(
                RuntimeError
            ):  # the script has used TensorFlow before, and has chosen
                devices.set_visible_devices(gpus[local_rank % len(gpus)], "GPU")
                devices.experimental.set_memory_growth(gpus[local_rank % len(gpus)], True)
    else:
        from hvdtrain.frameworks.jax.start import start_jax

        jax = importlib.import_module("jax")
        start_jax(jax, config, communicator)
        devices = jax.local_devices()
        jax.config.update("jax_default_device", devices[local_rank % len(devices)])


def load_keras(where: str, dtype: np.dtype[Any]) -> Any:
    """Imports keras and sets the default dtype of layers. Raises UserError if it cannot be
    imported."""
    try:
        keras = importlib.import_module("keras")
    except ImportError as error:
        raise UserError(
            f"framework=keras needs Keras 3: {error}",
            where,
            "pip install 'hvdtrain[keras]', and KERAS_BACKEND=torch",
        ) from error
    if not hasattr(keras, "ops"):
        raise UserError(
            f"framework=keras needs Keras 3; this is {keras.__version__}",
            where,
            "pip install 'keras>=3'",
        )
    if keras.backend.backend() not in _BACKENDS:
        what = f"the Keras backend {keras.backend.backend()} cannot compute gradients"
        raise UserError(what, where, f"KERAS_BACKEND={' or '.join(_BACKENDS)}")
    if dtype == np.float64 and keras.backend.backend() == "jax":
        importlib.import_module("jax").config.update("jax_enable_x64", True)
    keras.config.set_floatx(dtype.name)
    if keras.config.dtype_policy().name in ("float32", "float64"):  # not a mixed one of the user's
        keras.config.set_dtype_policy(dtype.name)
    if dtype == np.float64:
        _keep_float64()
    return keras


def _keep_float64() -> None:
    """Has Keras compute in float64. On torch and JAX its table of result types names float32 in its
    place (3.15, dtypes.result_type())."""
    with contextlib.suppress(ImportError, AttributeError, LookupError):
        dtypes = importlib.import_module("keras.src.backend.common.dtypes")
        if dtypes.BIT64_TO_BIT32_DTYPE["float64"] != "float64":
            dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"


def _make(keras: Any, config: Config, task: Task) -> Any:
    """Creates the keras.Model of model.name. Raises UserError if the result is not a model."""
    where = config.where("model.name")
    if not is_dotted(config.model.name):
        what = (
            f"framework=keras trains your own models, but model.name={config.model.name} is a "
            "model of hvdtrain"
        )
        raise UserError(
            what,
            where,
            "model.name=package.module:function that returns a keras.Model; or "
            "hvdtrain.train(model=...)",
        )
    model = call_own(config.model, dict(task.sizes))
    if not isinstance(model, keras.Model):
        what = f"{config.model.name} returned a {type(model).__name__}, not a keras.Model"
        raise UserError(what, where, "a keras.Sequential or keras.Model; or framework=torch, jax")
    return model


@dataclass(frozen=True)
class OfKernels:
    """A rule for which the first axis of a parameter is its outputs, on kernels of Keras, (...,
    inputs, outputs)."""

    rule: Rule
    kernels: frozenset[str]  # names
    order: tuple[int, ...] = ()  # order of a kernel's axes in the optimizer rule

    @property
    def momentum(self) -> float:
        return self.rule.momentum

    def of_parameter(self, name: str, shape: tuple[int, ...], excluded: bool) -> Rule:
        if name not in self.kernels:
            return self.rule.of_parameter(name, shape, excluded)
        axes = len(shape)
        order = axes - 1, axes - 2, *range(axes - 2)  # (outputs, inputs, height, width)
        return replace(
            self,
            rule=self.rule.of_parameter(name, tuple(shape[axis] for axis in order), excluded),
            order=order,
        )

    def init(self, p: Array, ops: Ops) -> tuple[Any, ...]:
        return self.rule.init(p, ops)

    def update(
        self, g: Array, state: tuple[Any, ...], P: Array, h: Hyper, ops: Ops
    ) -> tuple[Array, tuple[Any, ...]]:
        """Applies the rule to P, g and state arrays in Keras' layout."""
        p, kept = self.rule.update(
            _turned(g, self.order),
            tuple(_turned(one, self.order) for one in state),
            _turned(P, self.order),
            h,
            ops,
        )
        back = tuple(self.order.index(axis) for axis in range(len(self.order)))
        return _turned(p, back), tuple(_turned(one, back) for one in kept)


def _turned(array: Any, order: tuple[int, ...]) -> Any:
    return np.ascontiguousarray(array.transpose(order)) if np.ndim(array) == len(order) else array


class KerasOutputs(NamedTuple):
    """The outputs of a model for a batch."""

    outputs: np.ndarray
    added_loss: float  # the sum of the layers' added losses


class Backend(Protocol):
    """How one backend of Keras computes outputs with gradients."""

    def outputs(self, model: Any, x: np.ndarray) -> KerasOutputs: ...
    def training_outputs(self, model: Any, x: np.ndarray) -> KerasOutputs:
        """Returns the outputs in training mode, before a call of gradient()."""

    def seed(self, seed: int) -> None:
        """Seeds random generators other than the model's own seeds."""

    def gradient(self, error: np.ndarray, share: float) -> Sequence[Any]:
        """Returns the gradient of each trainable variable, in order, for the sum of `error` times
        the outputs plus `share` times the added loss.

        None if neither depends on a variable.
        """


class OnTorch:
    """Keras on torch."""

    def __init__(self) -> None:
        self.torch = importlib.import_module("torch")
        self._model: Any = None
        self._outputs: Any = None
        self._added: Any = None

    def outputs(self, model: Any, x: np.ndarray) -> KerasOutputs:
        with self.torch.no_grad():
            outputs = model(x, training=False)
            return KerasOutputs(_to_host(outputs), _to_float(added_loss(model.losses)))

    def training_outputs(self, model: Any, x: np.ndarray) -> KerasOutputs:
        self._model = model
        self._outputs = model(x, training=True)
        self._added = added_loss(model.losses)
        return KerasOutputs(_to_host(self._outputs.detach()), _to_float(self._added))

    def seed(self, seed: int) -> None:
        """Seeds torch, whose dropout Keras uses here."""
        self.torch.manual_seed(seed % 2**63)

    def gradient(self, error: np.ndarray, share: float) -> Sequence[Any]:
        values = [variable.value for variable in self._model.trainable_variables]
        of_outputs = self.torch.from_numpy(error).to(self._outputs.device, self._outputs.dtype)
        ends = [(self._outputs, of_outputs)]
        if getattr(self._added, "requires_grad", False):
            ends.append((self._added, self.torch.full_like(self._added, share)))
        self._outputs = None
        self._added = None
        found = self.torch.autograd.grad(
            [end for end, _ in ends], values, [g for _, g in ends], allow_unused=True
        )
        return [None if g is None else _to_host(g) for g in found]


class OnTensorFlow:
    """Keras on TensorFlow."""

    def __init__(self) -> None:
        self.tensorflow = importlib.import_module("tensorflow")
        self._model: Any = None
        self._tape: Any = None
        self._ends: list[Any] = []  # the outputs and the added loss

    def outputs(self, model: Any, x: np.ndarray) -> KerasOutputs:
        outputs = model(x, training=False)
        return KerasOutputs(_to_host(outputs), _to_float(added_loss(model.losses)))

    def training_outputs(self, model: Any, x: np.ndarray) -> KerasOutputs:
        self._model = model
        with self.tensorflow.GradientTape() as self._tape:
            outputs = model(x, training=True)
            added = self.tensorflow.convert_to_tensor(added_loss(model.losses), outputs.dtype)
        self._ends = [outputs, added]
        return KerasOutputs(_to_host(outputs), _to_float(added))

    def seed(self, seed: int) -> None:
        """Does nothing: there are no other random generators."""

    def gradient(self, error: np.ndarray, share: float) -> Sequence[Any]:
        values = [variable.value for variable in self._model.trainable_variables]
        of_ends = [
            self.tensorflow.constant(g, end.dtype)
            for g, end in zip((error, share), self._ends, strict=True)
        ]
        found = self._tape.gradient(self._ends, values, of_ends)
        self._tape = None
        self._ends = []
        return [
            None if g is None else _to_host(self.tensorflow.convert_to_tensor(g)) for g in found
        ]


class OnJax:
    """Keras on JAX; operations on a batch are compiled for each batch size."""

    def __init__(self) -> None:
        self.jax = importlib.import_module("jax")
        self._forward: Any = None
        self._evaluate: Any = None
        self._pull_back: Any = None

    def outputs(self, model: Any, x: np.ndarray) -> KerasOutputs:
        if self._evaluate is None:
            self._evaluate = self.jax.jit(
                lambda trained, other, x: self._called(model, trained, other, x, False)[0]
            )
        outputs, added = self._evaluate(*self._values(model), x)
        return KerasOutputs(_to_host(outputs), _to_float(added))

    def training_outputs(self, model: Any, x: np.ndarray) -> KerasOutputs:
        if self._forward is None:

            def forward(trained: Any, other: Any, x: Any) -> Any:
                return self.jax.vjp(
                    lambda values: self._called(model, values, other, x, True),
                    trained,
                    has_aux=True,
                )

            self._forward = self.jax.jit(forward)
        (outputs, added), self._pull_back, others = self._forward(*self._values(model), x)
        for variable, value in zip(model.non_trainable_variables, others, strict=True):
            variable.assign(value)
        return KerasOutputs(_to_host(outputs), _to_float(added))

    def _called(self, model: Any, trained: Any, other: Any, x: Any, training: bool) -> Any:
        """Returns ((outputs, added loss), new values of the other variables)."""
        flag = {"training": training} if model._call_has_training_arg else {}
        outputs, others, losses = model.stateless_call(
            trained, other, x, return_losses=True, **flag
        )
        return (outputs, self.jax.numpy.asarray(added_loss(losses), outputs.dtype)), others

    def seed(self, seed: int) -> None:
        """Does nothing: there are no other random generators."""

    def gradient(self, error: np.ndarray, share: float) -> Sequence[Any]:
        of_ends = self.jax.numpy.asarray(error), self.jax.numpy.asarray(share, error.dtype)
        found = self._pull_back(of_ends)[0]
        self._pull_back = None
        return [_to_host(g) for g in found]

    @staticmethod
    def _values(model: Any) -> tuple[list[Any], list[Any]]:
        return [v.value for v in model.trainable_variables], [
            v.value for v in model.non_trainable_variables
        ]


_BACKENDS: dict[str, Callable[[], Backend]] = {
    "torch": OnTorch,
    "jax": OnJax,
    "tensorflow": OnTensorFlow,
}


def _layers_with_kernels(keras: Any, model: Any) -> list[Any]:
    """Returns the layers whose kernels are (..., inputs, outputs)."""
    kinds = keras.layers.Dense, keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D
    return [layer for layer in model._flatten_layers() if isinstance(layer, kinds)]


def _to_host(value: Any) -> np.ndarray:
    """Converts a tensor of any backend to an array."""
    return np.asarray(sys.modules["keras"].ops.convert_to_numpy(value))


def _to_float(value: Any) -> float:
    return float(_to_host(value))


class KerasModel(HostModel):
    """A keras.Model as HostLearner computes with it."""

    def __init__(
        self, keras: Any, model: Any, config: Config, task: Task, dtype: np.dtype[Any]
    ) -> None:
        """Raises UserError if the model fails for inputs of the task, or if its outputs are not
        what the task needs."""
        self.model = model
        self._dtype = dtype
        self.module = model
        self.notes = check_and_describe(users_object(model, config), config.where("model.name"))
        self._backend: Backend = _BACKENDS[keras.backend.backend()]()
        transform = task.transform
        assert transform is not None, task.name  # part_of(task, "numpy") has rejected other tasks
        self._transform = replace(
            transform, dtype=dtype.name, keeps_integers=True, channels_last=True
        )
        x = self.inputs(_zeros(task, 2))
        outputs = _checked_outputs(model, self._backend, x, config, task)
        self._outputs = outputs.shape[1:]
        self.notes += _activated(outputs, model, config)
        self.notes += assigned_in_call(model, config.where("model.name"), x)
        named = dict(named_variables(model))
        drawn = {id(v) for v in model.variables} - {id(v) for v in model.weights}
        self._trained = {name: v for name, v in named.items() if v.trainable and id(v) not in drawn}
        self._others = {
            name: v for name, v in named.items() if not v.trainable and id(v) not in drawn
        }
        self._seeds = [v for v in model.variables if id(v) in drawn]
        kernels = {id(layer.kernel) for layer in _layers_with_kernels(keras, model)}
        self.kernels = frozenset(name for name, v in self._trained.items() if id(v) in kernels)
        self._order = [id(v) for v in model.trainable_variables]
        if wrong := {str(v.dtype) for v in self._trained.values()} - {dtype.name}:
            what = f"the model computes in {', '.join(sorted(wrong))}, but the job in {dtype}"
            fix = (
                "keras.config.set_floatx('float64') before the model is created; or "
                "speed.precision=fp32"
            )
            raise UserError(what, config.where("speed.precision"), fix)
        self.weights: Mapping[str, np.ndarray] = {
            name: _to_host(v.value).copy() for name, v in self._trained.items()
        }
        if dtype == np.float64 and keras.backend.result_type("float64", "float64") != "float64":
            self.notes.append(
                f"speed.precision=fp64: Keras {keras.__version__} on {keras.backend.backend()} "
                "rounds some numbers to float32"
            )
        self.title = (
            f"{model.name}, %, keras {keras.__version__} on {keras.backend.backend()}, {dtype}"
        )

    def inputs(self, batch: Mapping[str, Any]) -> np.ndarray:
        """Returns the model's inputs (n, ...), images as (n, H, W, C)."""
        return self._transform(batch["x"])

    def assign(self, weights: Mapping[str, np.ndarray]) -> None:
        for name, variable in self._trained.items():
            variable.assign(weights[name])

    def constrained(self) -> dict[str, np.ndarray]:
        weights = {}
        for name, variable in self._trained.items():
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))
                weights[name] = _to_host(variable.value).copy()
        return weights

    def outputs(self, x: np.ndarray) -> np.ndarray:
        of_none = KerasOutputs(np.zeros((0, *self._outputs), self._dtype), 0.0)
        return self._kept(self._backend.outputs(self.model, x) if len(x) else of_none)

    def training_outputs(self, x: np.ndarray) -> np.ndarray:
        return self._kept(self._backend.training_outputs(self.model, x))

    def _kept(self, found: KerasOutputs) -> np.ndarray:
        self._added_loss = found.added_loss
        return found.outputs

    def added_loss(self) -> float:
        return self._added_loss

    def gradient(self, error: np.ndarray, share: float) -> np.ndarray:
        of_each = dict(zip(self._order, self._backend.gradient(error, share), strict=True))
        found = [(of_each[id(v)], v.shape) for v in self._trained.values()]
        return np.concatenate(
            [np.zeros(shape, self._dtype).ravel() if g is None else g.ravel() for g, shape in found]
        )

    def saved(self) -> bytes:
        """Returns the model with its weights as the content of a Keras file."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.keras"
            self.model.save(path)
            return path.read_bytes()

    def seed(self, seed: int) -> None:
        self._backend.seed(seed)
        for number, variable in enumerate(self._seeds):
            drawn = fold(seed, number)
            variable.assign(
                np.array([drawn >> 32 & 0xFFFFFFFF, drawn & 0xFFFFFFFF], np.uint32).astype(
                    str(variable.dtype)
                )
            )

    def buffers(self) -> dict[str, np.ndarray]:
        return {name: _to_host(v.value).copy() for name, v in self._others.items()}

    def assign_buffers(self, buffers: Mapping[str, np.ndarray]) -> None:
        for name, array in buffers.items():
            self._others[name].assign(array)

    def is_mean(self, buffer: str) -> bool:
        return buffer.rpartition(".")[2] in _MEANS


def _zeros(task: Task, count: int) -> Batch:
    return {
        name: np.zeros((count, *field.shape), field.dtype) for name, field in task.fields.items()
    }


def _activated(outputs: np.ndarray, model: Any, config: Config) -> list[str]:
    """Returns a header line if the model applies an activation that the loss applies again."""
    activation = twice_activated(config)
    if activation is None:
        return []
    # detected for any layer or operation: the outputs add up to one
    if activation.name == "softmax":
        sums = outputs.sum(-1)
        is_twice = bool((outputs >= 0).all()) and np.allclose(sums, 1, rtol=0, atol=1e-4)
    else:
        is_twice = _last_activation(model) == activation.name
    return [activation.line] if is_twice else []


def _last_activation(model: Any) -> str:
    """Returns the activation of the output layer of a Sequential or functional model; empty for a
    subclass, whose layers have no known order."""
    outputs = getattr(model, "outputs", None)
    if not isinstance(outputs, list) or len(outputs) != 1:
        return ""
    layer = outputs[0]._keras_history.operation
    if getattr(layer, "outputs", None):  # a model in this one
        return _last_activation(layer)
    return getattr(getattr(layer, "activation", None), "__name__", "")


def _checked_outputs(
    model: Any, backend: Backend, x: np.ndarray, config: Config, task: Task
) -> np.ndarray:
    """Returns the outputs for x, building the model if necessary. Raises UserError."""
    where = config.where("model.name")
    try:
        build_variables(model, config, x)
        if isinstance(several := model(x, training=False), (dict, list, tuple)):
            what = (
                f"the model returns {len(several)} outputs, but framework=keras trains models "
                "with one"
            )
            fix = (
                "keras.Model(model.inputs, the output to train); or framework=torch with "
                "KERAS_BACKEND=torch, which uses the first output"
            )
            raise UserError(what, where, fix)
        outputs = backend.outputs(model, x).outputs
    except UserError:
        raise
    except Exception as error:
        what = f"the model fails for inputs {x.shape} of {x.dtype}: {type(error).__name__}: {error}"
        raise UserError(
            what,
            f"{where}; {own_line(error)}",
            f"the model gets (n, {', '.join(map(str, x.shape[1:]))})",
        ) from error
    if not task.fits(outputs.shape, len(x)):
        what = f"for inputs {x.shape} the model returns {outputs.shape}, not {task.outputs(len(x))}"
        raise UserError(
            what,
            where,
            "end the model with outputs of that shape, without softmax, for "
            f"task.name={task.name}: {task.summary}",
        )
    return outputs


def shapes(config: Config, task: Task) -> dict[str, tuple[int, ...]]:
    """Returns the parameters by name, as created by build(). Allocates the weights."""
    dtype = np.dtype("float32")
    part_of(task, "numpy", config, DeviceAndDtype(dtype))
    keras = load_keras(config.where("framework"), dtype)
    return {
        name: p.shape
        for name, p in KerasModel(
            keras, _make(keras, config, task), config, task, dtype
        ).weights.items()
    }
