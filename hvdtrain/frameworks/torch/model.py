"""Builds the torch model of model.name or of a script, with its norms and initial weights, and
checks its outputs against the task."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch
from torch import is_grad_enabled, nn
from torch.utils.checkpoint import checkpoint

from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.core.adapters import is_adapter, merged
from hvdtrain.core.arrays import Arrays, Batch
from hvdtrain.core.own_line import own_line
from hvdtrain.data.field import Field
from hvdtrain.errors import UserError, short
from hvdtrain.frameworks import by_name
from hvdtrain.frameworks.torch.buffers import copied_buffers
from hvdtrain.frameworks.torch.call import Called, call, shapes_of, takes_by_name
from hvdtrain.frameworks.torch.foreign.counted import TooLarge, counted, most_bytes
from hvdtrain.frameworks.torch.foreign.downloads import watched
from hvdtrain.frameworks.torch.forward import first_of, whole_outputs
from hvdtrain.frameworks.torch.frozen import check_overlaps, freeze
from hvdtrain.frameworks.torch.norm import CPU, use_norm
from hvdtrain.frameworks.torch.private_api import FakeTensor, TorchDispatchMode
from hvdtrain.tasks.task import DeviceAndDtype, Task, TaskPart, part_of, wrong_shapes
from hvdtrain.tasks.torch_functions import check_alone


def normed_model(
    config: Config, task: Task, communicator: Communicator, device: torch.device = CPU
) -> torch.nn.Module:
    """Builds the model and applies norm.kind, model.classifier_std and model.recompute. device: the
    device on which it will be."""
    model = build_model(config, task)
    if config.model.classifier_std is not None:
        outputs = task.sizes.get("outputs", task.sizes.get("vocabulary", 0))
        init_classifier(
            model, outputs, config.model.classifier_std, config.where("model.classifier_std")
        )
    norm = config.norm
    model = use_norm(model, norm.kind, norm.ghost, norm.statistics, communicator, device)
    recompute_blocks(model, config.model.recompute, config.where("model.recompute"))
    check_overlaps(model, config.where("model.name"))
    if config.model.lora:
        _adapt(model, config, task)
    freeze(model, config.model)
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(
            f"model.freeze={list(config.model.freeze)} leaves nothing to train",
            config.where("model.freeze"),
            "fewer names",
        )
    return model


def _adapt(model: nn.Module, config: Config, task: Task) -> None:
    """Adds adapters. Raises UserError if an adapter would have no effect. Other errors of the model
    are reported where it is checked."""
    from hvdtrain.frameworks.torch import lora

    lora.adapt(model, config.model)
    try:
        lora.check_calls(
            model,
            example(2, config, task, next(model.parameters()).detach().new_empty(0)),
            config.model,
        )
    except UserError:
        raise
    except Exception:
        return


def first_samples_of(model: torch.nn.Module) -> int:
    """Returns how many training samples model.begin_with(inputs) takes before the first step, its
    first_samples; 0 for a model without it."""
    return (
        int(getattr(model, "first_samples", 5000))
        if callable(getattr(model, "begin_with", None))
        else 0
    )


def check_first_samples(model: torch.nn.Module, config: Config) -> None:
    """Raises UserError if first_samples is not a count, or if rank 0 would have only a part of the
    weights that begin_with() computes."""
    count = (
        getattr(model, "first_samples", 1) if callable(getattr(model, "begin_with", None)) else 1
    )
    if not isinstance(count, int) or count < 1:
        what = f"first_samples of model.name={config.model.name} is {short(repr(count))}"
        raise UserError(
            what,
            config.where("model.name"),
            "a whole number of training samples for begin_with(), 1 or more",
        )
    keys = {
        "shard.stage": config.shard.stage == 3,
        "parallel": config.parallel.cuts,
    }
    for key in (key for key, cuts in keys.items() if cuts and first_samples_of(model)):
        what = f"begin_with() of model.name={config.model.name} needs whole weights on rank 0"
        raise UserError(
            what, config.where(key) if "." in key else key, f"leave {key} out, or shard.stage=2"
        )


class MasksWithGaps(TorchDispatchMode):
    """Answers libraries that check whether a mask without values is true everywhere, to omit it.
    It answers False, which takes the most memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_asked = (
            func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool
        )
        if is_asked and (args[0].is_meta or isinstance(args[0], FakeTensor)):
            return False
        return func(*args, **(kwargs or {}))


def check_outputs(
    model: torch.nn.Module, config: Config, task: Task, like: torch.Tensor | None = None
) -> None:
    """Raises UserError if a forward pass of two samples of zeros does not return what the task
    needs; with norm.kind=sync, also of an empty batch.

    like: a tensor with the device of the inputs and the dtype of the weights; None: the model's
    first parameter.
    """
    first = next(model.parameters()) if like is None else like
    where = config.where("model.name")
    part = part_of(task, "torch", config, DeviceAndDtype(first.dtype, first.device))
    has_numbers = not (first.is_meta or isinstance(first, FakeTensor))
    # the first call imports torch._dynamo, which takes a second
    masks = contextlib.nullcontext() if has_numbers else MasksWithGaps()
    for count in (2, 0) if config.norm.kind == "sync" else (2,):
        batch = zeros(count, task, first)
        inputs = part.inputs(batch)
        _check_names(model, part, where)
        kind = "images" if isinstance(inputs, torch.Tensor) and inputs.ndim == 4 else "inputs"
        try:
            with torch.no_grad(), masks:
                outputs = call(model.eval(), inputs)
        except UserError:
            raise
        except Exception as error:
            what = (
                f"the model fails for {kind} {shapes_of(inputs)}: {type(error).__name__}: {error}"
            )
            fix = (
                f"the model gets {_sizes(inputs)}"
                if count
                else "x.flatten(1) takes an empty batch, which norm.kind=sync may give a rank"
            )
            raise UserError(what, f"{where}; {own_line(error)}", fix) from error
        found = first_of(whole_outputs(outputs))  # a user's loss may take several outputs
        if not isinstance(found, torch.Tensor) or not task.fits(tuple(found.shape), count):
            shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            what = (
                f"for {kind} {shapes_of(inputs)} the model returns {shape}, not "
                f"{task.outputs(count)}"
            )
            raise UserError(
                what,
                where,
                f"end the model with outputs of that shape, for task.name={task.name}: "
                f"{task.summary}",
            )
        if first.device.type != "meta":  # shapes() has no numbers
            _check_loss(part, outputs, batch, config, task)
    if task.examples is not None and first.device.type != "meta":
        _check_functions(model, part, task.fields, task.examples, first)


def _check_names(model: torch.nn.Module, part: TaskPart, where: str) -> None:
    """Raises UserError if forward() lacks a parameter of an input that a model has to take by
    its name."""
    names = getattr(part, "by_name", ())
    if not takes_by_name(model, names):
        what = (
            f"the job passes {' and '.join(names)} to forward() of {type(model).__name__}, which "
            "has no such parameters"
        )
        raise UserError(
            what,
            where,
            f"def forward(self, {', '.join(names)}), using each of them; or model.name=gpt",
        )


def _check_functions(
    model: torch.nn.Module,
    part: TaskPart,
    fields: Mapping[str, Field],
    examples: Batch,
    like: torch.Tensor,
) -> None:
    """Raises UserError if the result of a user's function for a sample depends on other samples."""
    batch = {}
    for name, field in fields.items():
        tensor = torch.from_numpy(examples[name]).to(like.device)
        batch[name] = (
            tensor.permute(0, 3, 1, 2)
            if field.dtype == "uint8" and len(field.shape) == 3
            else tensor
        )
    with torch.no_grad():
        check_alone(part, call(model.eval(), part.inputs(batch)), batch)


def _check_loss(
    part: TaskPart, outputs: Any, batch: dict[str, torch.Tensor], config: Config, task: Task
) -> None:
    """Raises UserError if the task's loss fails for these outputs, or is not one of each
    sample."""
    where = config.where("task.name")
    try:
        # the outputs need no gradient: a loss that needs one depends on something else
        with torch.enable_grad():
            each = part.each(outputs, batch, training=True)
    except UserError:
        raise
    except Exception as error:
        what = (
            f"the loss of task.name={task.name} fails for what the model gives: "
            f"{type(error).__name__}: {error}"
        )
        raise UserError(
            what, f"{where}; {own_line(error)}", "another model, or another task.name"
        ) from error
    if wrong := wrong_shapes(task, each, len(next(iter(batch.values())))):
        raise UserError(
            f"each() of task.name={task.name} {wrong}", where, "docs/tasks.md has an example"
        )
    if isinstance(each.loss, torch.Tensor) and each.loss.requires_grad:
        what = (
            "the loss has a gradient for other tensors than the outputs: parameters of its own, "
            "or those of the script's model, although only a copy of that model "
        )
        fix = "let the loss depend on the outputs only; optim.weight_decay penalizes weights"
        raise UserError(f"{what}is trained", where, fix)


def _sizes(inputs: Called) -> str:
    """Describes input shapes: (n, 1, 8, 8): n images of 1 channel and 8x8 pixels; x.flatten(1) is
    (n, 64)."""
    if not isinstance(inputs, torch.Tensor):
        return ", ".join(
            f"{name} {str(each.dtype).removeprefix('torch.')} "
            f"(n{''.join(f', {size}' for size in each.shape[1:])})"
            for name, each in inputs.items()
        )
    sizes = f"(n, {', '.join(map(str, inputs.shape[1:]))})"
    if inputs.dtype == torch.int64:
        return (
            f"{sizes} of int64, as the data have them; for floats x.float() in forward(), floats "
            "in the data, or task.standardize=true"
        )
    if inputs.ndim != 4:
        return f"{sizes} of {str(inputs.dtype).removeprefix('torch.')}"
    _, channels, height, width = inputs.shape
    return (
        f"{sizes}: n images of {channels} channels and {height}x{width} pixels; x.flatten(1) is "
        f"(n, {channels * height * width})"
    )


def example(count: int, config: Config, task: Task, like: torch.Tensor) -> Called:
    """Returns the model's inputs for `count` samples of zeros, with the device and dtype of
    `like`."""
    inputs: Called = part_of(task, "torch", config, DeviceAndDtype(like.dtype, like.device)).inputs(
        zeros(count, task, like)
    )
    return inputs


def zeros(count: int, task: Task, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the fields of `count` samples of zeros without padding, images as (n, C, H, W), on
    the device of `like`."""
    batch = {}
    for name, field in task.fields.items():
        is_image = field.dtype == "uint8" and len(field.shape) == 3
        shape = (field.shape[2], *field.shape[:2]) if is_image else field.shape
        batch[name] = torch.full(
            (count, *shape), field.is_mask, dtype=getattr(torch, field.dtype), device=like.device
        )
    return batch


def build_model(config: Config, task: Task) -> torch.nn.Module:
    """Builds a plugin of torch/models/ by name, or the user's package.module:Class. Raises
    UserError if it is not a trainable model."""
    name = config.model.name
    where = config.where("model.name")
    try:
        with watched(config), counted(most_bytes()):
            model: torch.nn.Module = _called(config, task)
    except TooLarge as error:
        raise UserError(
            f"{name} has {error}",
            where,
            "fewer or smaller layers; shard.stage=3 gives each rank a part of them",
        ) from None
    if not isinstance(model, torch.nn.Module):
        raise UserError(
            f"{name} returned a {type(model).__name__}, not a torch.nn.Module",
            where,
            "give a class of modules, or another framework=",
        )
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        what = (
            f"the model is wrapped in {type(model).__name__}, but hvdtrain distributes samples "
            "and reduces gradients itself"
        )
        raise UserError(what, where, "pass the wrapped model: model.module")
    _refuse_hooks_on_parts(model, config)
    if "transformers" in sys.modules:
        from hvdtrain.frameworks.torch.libraries.transformers import without_past

        without_past(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(
            f"{name} has no parameter to train",
            where,
            "give a model with parameters that require a gradient",
        )
    return model


def _called(config: Config, task: Task) -> Any:
    """Calls the plugin or the user's function; returns a Keras model as a torch module."""
    is_users_function = plugins.is_dotted(config.model.name) and config.model.given is None
    if is_users_function:
        plugins.own_function(config.model)  # imports Keras if needed
        if "keras" in sys.modules:
            from hvdtrain.frameworks.torch.keras_module import set_number_type

            set_number_type(config)
    model = by_name.build_model(config, task, "frameworks/torch/models")
    if sys.modules.get("keras") is not None:
        from hvdtrain.frameworks.torch.keras_module import as_module

        model = as_module(model, config, task)
    return model


def checked_model(config: Config, task: Task) -> torch.nn.Module:
    """Returns the model of one rank; a user's class is checked with a forward pass."""
    model = normed_model(config, task, SingleProcessCommunicator())
    if plugins.is_dotted(
        config.model.name
    ):  # plugins fit every task; a user's lazy layers get their shapes here
        check_outputs(model, config, task)
    return model


def init_classifier(model: nn.Module, classes: int, std: float, where: str) -> None:
    """Draws the weights of the last linear layer with `classes` outputs from N(0, std^2), and sets
    its bias to 0.

    Goyal 2017, arXiv:1706.02677, 5.1, use std 0.01. "Last" refers to the order in which the model's
    layers were created.

    Raises UserError if the model has no such layer.
    """
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, nn.Linear) and layer.out_features == classes
    ]
    if not layers:
        what = (
            f"{type(model).__name__} has no linear layer with {classes} outputs, one for each class"
        )
        raise UserError(
            what, where, "leave model.classifier_std out, or end the model with an nn.Linear"
        )
    nn.init.normal_(layers[-1].weight, std=std)
    if layers[-1].bias is not None:
        nn.init.zeros_(layers[-1].bias)


def recompute_blocks(model: nn.Module, which: Literal["none", "all"] | int, where: str) -> None:
    """Makes the model's `blocks` recompute activations: all of them, or the N-th, 2 N-th, ... Names
    of parameters and buffers do not change.

    Dropout uses the same mask again, and buffers are updated once (Chen et al. 2016,
    arXiv:1604.06174). Raises UserError without `blocks`.
    """
    if which == "none":
        return
    blocks = list(getattr(model, "blocks", ()))
    if not all(isinstance(block, nn.Module) for block in blocks) or not blocks:
        what = (
            f"model.recompute={which} recomputes blocks, but {type(model).__name__} has no "
            "attribute `blocks`"
        )
        raise UserError(
            what,
            where,
            "model.recompute=none, or a model that has blocks: gpt, wide_resnet, resnet18 ...",
        )
    every = 1 if which == "all" else which
    for block in blocks[every - 1 :: every]:
        block.forward = functools.partial(_recomputed, block, block.forward)


def _recomputed(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not (block.training and is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(
        forward,
        *args,
        use_reentrant=False,
        context_fn=functools.partial(_contexts, block),
        **kwargs,
    )


def _contexts(
    block: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns the contexts of the first and the second computation."""
    return contextlib.nullcontext(), copied_buffers(block)


def _copy_marks(original: nn.Parameter, p: nn.Parameter) -> None:
    """Attributes that a script has set, and hooks of its gradient, which a copy of a parameter
    lacks."""
    vars(p).update({name: value for name, value in vars(original).items() if name not in vars(p)})
    for hook in (original._backward_hooks or {}).values():
        p.register_hook(hook)
    for hook in (getattr(original, "_post_accumulate_grad_hooks", None) or {}).values():
        p.register_post_accumulate_grad_hook(hook)


def _refuse_hooks_on_parts(model: nn.Module, config: Config) -> None:
    """Raises UserError if parameters are replaced by their parts, without the hooks of their
    gradients."""
    key = "shard.stage" if config.shard.stage == 3 else "parallel"
    if (config.shard.stage == 3 or config.parallel.cuts) and (
        name := next((n for n, p in model.named_parameters() if p._backward_hooks), "")
    ):
        what = f"the model registers a gradient hook on {name}, but {key} divides it among ranks"
        raise UserError(
            what,
            config.where(key) if "." in key else key,
            "shard.stage=2, or a hook on a module's backward pass",
        )


class WeightsHolder(Protocol):
    """The interface through which a script's model gets weights from a learner."""

    config: Config
    model: torch.nn.Module

    def weights(self) -> Arrays: ...


class GivenModel:
    """Makes a job's model from a script's model: trains a copy, and copies its weights to the
    script's model at the end.

    The script's model does not change until take(); hooks, norms and parts of a job belong to the
    copy.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def __call__(self) -> torch.nn.Module:
        """Copies the model. Raises UserError if it cannot be copied, or if two tensors share
        memory, which they would not in the copy."""
        check_overlaps(self.model, "hvdtrain.train(), model")
        try:
            model = copy.deepcopy(self.model)
        except Exception as error:
            what = (
                f"model={type(self.model).__name__} cannot be copied: {type(error).__name__}: "
                f"{error}"
            )
            raise UserError(
                what, "hvdtrain.train(), model", "a class or function that creates the model"
            ) from error
        for original, p in zip(self.model.parameters(), model.parameters(), strict=True):
            _copy_marks(original, p)
        return model

    def take(self, learner: WeightsHolder) -> None:
        """Copies the learner's weights and buffers into the script's model, which keeps its device
        and number type. A collective."""
        arrays = learner.weights()
        has_adapters = bool(learner.config.model.lora)
        if has_adapters:
            arrays = merged(arrays, learner.config.model.lora_scale)
        state = {
            name: torch.from_numpy(arrays[name])
            if name in arrays
            else value  # a module's extra state need not be an array
            for name, value in learner.model.state_dict().items()
            if not (has_adapters and is_adapter(name))
        }
        self.model.load_state_dict(state)
        self.model.train(learner.model.training)
