"""A JAX model: a plugin of jax/models/ or a user's pair (init, apply), checked, with named
parameters in a fixed order."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.section import class_of_object, is_object
from hvdtrain.core.progress import fold
from hvdtrain.data.field import Field
from hvdtrain.errors import UserError
from hvdtrain.frameworks import by_name
from hvdtrain.frameworks.jax import task_parts
from hvdtrain.frameworks.jax.layers import Block, Functions, Params
from hvdtrain.frameworks.jax.library_models import functions_of, library_of, random_arguments
from hvdtrain.frameworks.jax.norm import BatchNorms
from hvdtrain.tasks.task import DeviceAndDtype, Task, TaskPart, outputs_of, part_of, wrong_shapes


class JaxDevice(NamedTuple):
    """The device that JAX computes on, and the number type of weights."""

    device: jax.Device  # the first one
    dtype: np.dtype  # float32 or float64
    others: tuple[jax.Device, ...] = ()  # further ones of this rank

    def enable_x64(self) -> contextlib.AbstractContextManager[Any]:
        """Enables float64 arrays of JAX inside, in this thread only, if that is `dtype`."""
        return jax.enable_x64(self.dtype == np.float64)

    def to_device(self, array: np.ndarray) -> jax.Array:
        """Copies the array to every device. A device may keep a view of its memory, so do not write
        to it afterwards."""
        with self.enable_x64():
            return jax.device_put(array, self.everywhere or self.device)

    def rows_to_devices(self, array: np.ndarray) -> jax.Array:
        """Splits the rows of the array evenly over the devices; with one device, like
        to_device()."""
        with self.enable_x64():
            return jax.device_put(
                array,
                _sharding((self.device, *self.others), by_rows=True)
                if self.others
                else self.device,
            )

    @property
    def everywhere(self) -> jax.sharding.Sharding | None:
        """The sharding of an array that is replicated on several devices; None for a single
        device."""
        return _sharding((self.device, *self.others), by_rows=False) if self.others else None


@functools.cache
def _sharding(devices: tuple[jax.Device, ...], by_rows: bool) -> jax.sharding.NamedSharding:
    mesh = jax.sharding.Mesh(np.array(devices), ("rows",))
    return jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec("rows") if by_rows else jax.sharding.PartitionSpec()
    )


class ForwardPass(NamedTuple):
    """A forward pass in training."""

    key: jax.Array  # for dropout
    samples: Any  # number of rows without padding


class JaxModel(NamedTuple):
    """Parameters in one order, and the functions of them."""

    title: str
    names: list[str]  # "fc.weight", of each parameter
    start: list[np.ndarray]
    structure: Any  # the structure of a user's parameter tree
    functions: Functions
    norms: BatchNorms
    outputs_of: Callable[[Any], Any]  # converts the model's result to the outputs for the task

    def outputs(
        self,
        weights: list[jax.Array],
        buffers: Params,
        x: jax.Array,
        of_pass: ForwardPass | None = None,
    ) -> tuple[jax.Array, Params]:
        """Returns the outputs (rows, ...) for x (rows, ...), as prepared by the task, and the
        buffers after the pass. of_pass: None in evaluation."""
        apply = self.functions.apply
        params = self.tree(weights)
        known = inspect.signature(apply).parameters
        more = {"key": of_pass.key} if of_pass and "key" in known else {}
        if "norms" not in known:
            return self.outputs_of(apply(params, x, **more)), buffers
        norms = self.norms.of_pass(
            of_pass.samples if of_pass else len(x), training=of_pass is not None
        )
        flow = apply({**params, **buffers}, x, norms=norms, **more)
        return self.outputs_of(flow.x), buffers | flow.buffers

    def tree(self, weights: list[jax.Array]) -> Params:
        """Returns the parameters in the structure of init()."""
        params: Params = jax.tree_util.tree_unflatten(self.structure, weights)
        return params


def key_data(seed: int) -> np.ndarray:
    """Returns 64 bits of seed as the two words of a threefry key; without float64, jax.random.key()
    would drop the upper 32 bits."""
    return np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


def key_of(data: Any) -> jax.Array:
    return jax.random.wrap_key_data(data, impl="threefry2x32")


def build_model(
    config: Config, task: Task, target: JaxDevice, communicator: Communicator
) -> JaxModel:
    """Builds the model with its initial weights, equal on all ranks. Raises UserError if it is not
    a JAX model."""
    name = config.model.name
    where = config.where("model.name")
    with target.enable_x64(), jax.default_device(target.device):
        part = part_of(task, "jax", config, DeviceAndDtype(target.dtype, parts=task_parts))
        batch = _two_samples(task, target)
        inputs = jax.eval_shape(part.inputs, batch)
        key = key_of(key_data(fold(config.seed)))
        functions = _functions(config, task, inputs, key, target.dtype)
        norms = BatchNorms(config.norm, functions.norms, communicator)
        paths, structure = jax.tree_util.tree_flatten_with_path(functions.init(key))
        names = [
            functions.name_of(jax.tree_util.keystr(path, simple=True, separator="."))
            for path, _ in paths
        ]
        _check_parameters(name, names, [array for _, array in paths], where)
        title = class_of_object(name) if is_object(name) else name
        model = JaxModel(
            title,
            names,
            [np.array(array, target.dtype) for _, array in paths],
            structure,
            functions,
            norms,
            outputs_of(part),
        )
        _check_outputs(model, config, task, part, batch, inputs)
    return model


def _two_samples(task: Task, target: JaxDevice) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of a batch of two samples."""
    return {
        name: jax.ShapeDtypeStruct((2, *field.shape), device_dtype(field, target.dtype))
        for name, field in task.fields.items()
    }


def _functions(
    config: Config, task: Task, inputs: jax.ShapeDtypeStruct, key: jax.Array, dtype: np.dtype
) -> Functions:
    """Returns the functions of a plugin, of a library's module, or the user's pair."""
    name = config.model.name
    where = config.where("model.name")
    model = by_name.build_model(
        config, task, "frameworks/jax/models", random_arguments(config, key)
    )
    if library := library_of(model):
        model = functions_of(library, model, inputs, dtype, key, config)
    is_pair = (
        isinstance(model, tuple) and len(model) == 2 and callable(model[0]) and callable(model[1])
    )
    if not isinstance(model, Functions) and not is_pair:
        what = f"{name} returned a {type(model).__name__}, not a pair of functions (init, apply)"
        fix = (
            "init(key) -> parameters, apply(parameters, images (n, H, W, C)) -> logits (n, "
            "classes); or a module of a library of JAX"
        )
        keras = sys.modules.get("keras")
        if keras is not None and isinstance(model, keras.Model):
            fix = "framework=keras with KERAS_BACKEND=jax"
        raise UserError(what, where, fix)
    functions = Functions(*model)
    return functions._replace(
        apply=with_recompute(
            functions.apply, name, config.model.recompute, config.where("model.recompute")
        )
    )


def _check_parameters(model: str, names: list[str], arrays: list[Any], where: str) -> None:
    if not names:
        raise UserError(
            f"{model} has no parameter to train", where, "let init(key) return a dict of arrays"
        )
    for name, array in zip(names, arrays, strict=True):
        if not isinstance(array, (np.ndarray, jax.Array)) or not jnp.issubdtype(
            array.dtype, jnp.floating
        ):
            kind = (
                f"an array of {array.dtype}"
                if hasattr(array, "dtype")
                else f"a {type(array).__name__}"
            )
            raise UserError(
                f"parameter {name} of {model} is {kind}",
                where,
                "let init(key) return only arrays of real numbers",
            )
        if names.count(name) > 1 or not name:
            raise UserError(
                f"{names.count(name)} parameters of {model} are named {name!r}",
                where,
                "give each a unique name, in a dict",
            )


def _check_outputs(
    model: JaxModel,
    config: Config,
    task: Task,
    part: TaskPart,
    batch: Any,
    inputs: jax.ShapeDtypeStruct,
) -> None:
    """Checks, by shapes only, that the model returns what the task needs for two samples."""
    weights = [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in model.start]
    found, _ = jax.eval_shape(model.outputs, weights, model.norms.start(), inputs)
    fits = isinstance(found, jax.ShapeDtypeStruct) and task.fits(found.shape, 2)
    if not fits or not jnp.issubdtype(found.dtype, jnp.floating):
        shape = (
            f"{found.dtype} {found.shape}"
            if isinstance(found, jax.ShapeDtypeStruct)
            else type(found).__name__
        )
        what = (
            f"for {'images' if inputs.ndim == 4 else 'inputs'} {inputs.shape} the model returns "
            f"{shape}, not {task.outputs(2)}"
        )
        fix = f"end the model with outputs of that shape, for task.name={task.name}: {task.summary}"
        raise UserError(what, config.where("model.name"), fix)
    each = jax.eval_shape(lambda outputs, batch: part.each(outputs, batch, True), found, batch)
    if wrong := wrong_shapes(task, each, 2):
        raise UserError(
            f"each() of task.name={task.name} {wrong}",
            config.where("task.name"),
            "docs/tasks.md has an example",
        )


def device_dtype(field: Field, dtype: np.dtype) -> np.dtype:
    """Returns the dtype of a field on the device: images are unchanged, bounded integers are int32,
    everything else has the model's dtype."""
    if field.dtype == "uint8" and len(field.shape) == 3:
        return np.dtype(np.uint8)
    return np.dtype(np.int32) if field.values else dtype


def with_recompute(
    apply: Callable[..., Any], name: str, which: Literal["none", "all"] | int, where: str
) -> Callable[..., Any]:
    """Returns the function of a model that recomputes blocks: all of them, or the N-th, 2 N-th, ...

    The model's function must call each block as wrap(number, block)(parameters, x), with its
    parameter `wrap`. Raises UserError if it has no such parameter.
    """
    if which == "none":
        return apply
    if "wrap" not in inspect.signature(apply).parameters:
        what = (
            f"model.recompute={which} recomputes blocks, but the function of model.name={name} "
            "has no parameter `wrap`"
        )
        raise UserError(
            what, where, "model.recompute=none, or a model that has blocks: gpt, resnet18, mlp ..."
        )
    every = 1 if which == "all" else which
    return functools.partial(apply, wrap=functools.partial(_wrap, every))


def _wrap(every: int, number: int, block: Block) -> Block:
    return jax.checkpoint(block) if (number + 1) % every == 0 else block
