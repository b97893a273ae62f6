"""Checks the outputs of a torch model against the task, with samples of zeros."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Batch
from hvdtrain.core.own_line import own_line
from hvdtrain.data.field import Field
from hvdtrain.data.packed import is_packed
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.call import (
    ATTENTION_MASK,
    PACKED_IN_TRANSFORMERS,
    Called,
    call,
    is_of_transformers,
    padding_mask,
    shapes_of,
    takes_by_name,
    without_optional,
)
from hvdtrain.frameworks.torch.check_packing import cannot_pack, check_packing
from hvdtrain.frameworks.torch.forward import first_of, whole_outputs
from hvdtrain.frameworks.torch.private_api import FakeTensor, TorchDispatchMode
from hvdtrain.tasks.task import DeviceAndDtype, Task, TaskPart, part_of, wrong_shapes
from hvdtrain.tasks.torch_functions import check_alone


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
        _check_names(model, part, inputs, where)
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
    if has_numbers and is_packed(task.fields) and is_of_transformers(model):
        check_packing(model, task, first.device, where)
    if task.examples is not None and first.device.type != "meta":
        _check_functions(model, part, task.fields, task.examples, first)


def _check_names(model: torch.nn.Module, part: TaskPart, inputs: Called, where: str) -> None:
    """Raises UserError if forward() lacks a parameter of an input that a model has to take by
    its name."""
    is_padded = isinstance(inputs, dict) and padding_mask(without_optional(inputs))
    if is_padded and is_of_transformers(model) and not takes_by_name(model, [ATTENTION_MASK]):
        raise UserError(
            f"{type(model).__name__} of transformers has no parameter {ATTENTION_MASK}, so it "
            "would see the padding",
            where,
            "a model that has one, or samples of one length",
        )
    names: tuple[str, ...] = getattr(part, "by_name", ())
    if names and is_of_transformers(model):
        if not takes_by_name(model, PACKED_IN_TRANSFORMERS):
            raise cannot_pack(model, "its forward() has no parameter position_ids", where)
    elif not takes_by_name(model, names):
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
    inputs = without_optional(inputs)
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
