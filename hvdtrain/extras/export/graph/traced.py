"""The computation of a torch model in evaluation, as torch.export records it, with a batch of any
size and, if the model allows it, sequences of any length."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hvdtrain.config.schema import Config
from hvdtrain.core.adapters import merged
from hvdtrain.core.own_line import own_frame, own_line
from hvdtrain.errors import MEMORY, UserError, exit_code_of, first_line, short
from hvdtrain.extras.export.graph.samples import random_samples
from hvdtrain.frameworks.torch.call import Passed, passed, whole_of
from hvdtrain.frameworks.torch.lora_layer import LoraLayer
from hvdtrain.frameworks.torch.private_api import tree_leaves
from hvdtrain.tasks.task import DeviceAndDtype, Task, part_of

_TRACED = 3  # samples; a size of 1 would count as a constant
_COMPARED = (1, 5)  # samples of each batch
_SHORTER = 3  # tokens of the second one, if the file takes sequences of any length
# arguments of a call -> the tensors that the file returns
Run = Callable[[Passed], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class TracedModel:
    """A model and its recorded computation."""

    model: nn.Module
    program: torch.export.ExportedProgram
    compared: Sequence[Passed]  # the batches of _COMPARED
    where: str  # for messages

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def size_bytes(self) -> int:
        """The bytes of weights and buffers."""
        return sum(tensor.nbytes for tensor in self.program.state_dict.values())

    @property
    def number_type(self) -> str:
        return name_of(next(self.model.parameters()).dtype)

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """The inputs by name, without values; their sizes may be symbols."""
        names = set(self.program.graph_signature.user_inputs)
        found = {n.name: n.meta.get("val") for n in self.program.graph.nodes if n.name in names}
        return {name: x for name, x in found.items() if isinstance(x, torch.Tensor)}

    @property
    def axes(self) -> dict[str, str]:
        """The name of each symbol in the sizes of inputs: batch, length, length_2."""
        symbols = [
            (f"{size}", axis)
            for x in self.inputs.values()
            for axis, size in enumerate(x.shape)
            if isinstance(size, torch.SymInt)
        ]
        lengths = dict.fromkeys(symbol for symbol, axis in symbols if axis)
        names = {
            symbol: "length" if number == 1 else f"length_{number}"
            for number, symbol in enumerate(lengths, start=1)
        }
        return names | {symbol: "batch" for symbol, axis in symbols if axis == 0}

    @property
    def signature(self) -> str:
        """The inputs for people: x float32 (batch, 3, 32, 32)."""
        return ", ".join(
            f"{name} {name_of(x.dtype)} ({', '.join(map(self._size, x.shape))})"
            for name, x in self.inputs.items()
        )

    def _size(self, size: int | torch.SymInt) -> str:
        """Returns 32, batch, or length <= 256."""
        name = self.axes.get(f"{size}", f"{size}")
        if isinstance(size, int) or name == "batch":
            return name
        known = self.program.range_constraints.get(size.node.expr)
        most = f"{known.upper}" if known is not None else ""
        return f"{name} <= {most}" if most.isdecimal() else name

    def check(self, run: Run, tolerance: float) -> str:
        """Compares the outputs of a file with the model's; returns a line for the user. Raises
        UserError if they differ by more than tolerance x the largest output, or 1 if that is
        less."""
        largest = 0.0
        for inputs in self.compared:
            try:
                expected = _tensors(called(self.model, inputs))
            except Exception as error:
                raise self.refusal("the model fails for random samples", error) from None
            try:
                found = run(inputs)
            except Exception as error:
                raise self.refusal("the file fails for random samples", error) from None
            if len(found) != len(expected):
                what = f"the file returns {len(found)} tensors, the model {len(expected)}"
                raise UserError(what, self.where, _FIX)
            for one, other in zip(expected, found, strict=True):
                largest = max(largest, self._difference(one, other, tolerance))
        counts = " and ".join(map(str, _COMPARED))
        how = "bit for bit" if largest == 0 else f"up to {largest:.1g}"
        return f"batches of {counts} random samples have the model's outputs, {how}"

    def _difference(self, one: torch.Tensor, other: torch.Tensor, tolerance: float) -> float:
        if one.shape != other.shape or one.dtype != other.dtype:
            what = (
                f"the file returns {name_of(other.dtype)} {tuple(other.shape)}, the model "
                f"{name_of(one.dtype)} {tuple(one.shape)}"
            )
            raise UserError(what, self.where, _FIX)
        one, other = one.double(), other.double()
        finite = one[one.isfinite()].abs()
        most = tolerance * max(1.0, finite.max().item() if finite.numel() else 0.0)
        difference = (one - other).abs().nan_to_num(0.0)
        largest = difference.max().item() if difference.numel() else 0.0
        if not torch.allclose(one, other, rtol=0.0, atol=most, equal_nan=True):
            what = (
                f"the outputs of the file differ from the model's by {largest:.1g}, which is more "
                f"than {most:.1g}"
            )
            raise UserError(what, self.where, _FIX)
        return largest

    def refusal(self, what: str, error: Exception) -> UserError:
        return _refusal(what, error, self.where)


_FIX = "--to model.safetensors writes the weights, for code that has the model"


def _refusal(what: str, error: Exception, where: str) -> UserError:
    """Returns the error of a library as one for the user; a lack of memory as it is."""
    if exit_code_of(error) == MEMORY:
        raise error
    cause = error
    while isinstance(cause.__cause__, Exception):
        cause = cause.__cause__
    # torch lists constraints that the model violates below its first line
    listed = [line for line in f"{cause}".splitlines() if line.startswith("  - ")]
    reason = f"{type(cause).__name__}: {first_line(cause)}"
    reason = short(listed[0].removeprefix("  - ").partition(". If")[0], 400) if listed else reason
    line = f"; {own_line(error)}" if own_frame(error) else ""
    return UserError(f"{what}: {reason}", f"{where}{line}", _FIX)


def trace(model: nn.Module, config: Config, task: Task) -> TracedModel:
    """Records a forward pass in evaluation mode. Raises UserError with the reason of torch.export
    if it cannot."""
    model = whole_of(model).eval().requires_grad_(False)
    where = config.where("model.name")
    example, shorter = (_arguments(model, config, task, _TRACED, cut) for cut in (0, 1))
    try:
        outputs = called(model, example)
        if isinstance(outputs, dict) and type(outputs) is not dict:
            _return_dict(model)
        program = _record(model, example, shorter)
    except Exception as error:
        what = f"torch.export cannot record model.name={short(config.model.name)}"
        raise _refusal(what, error, where) from None
    traced = TracedModel(model, program, [], where)
    shorter_by = _SHORTER if set(traced.axes.values()) > {"batch"} else 0
    cuts = zip(_COMPARED, (0, shorter_by), strict=True)
    compared = [_arguments(model, config, task, count, cut) for count, cut in cuts]
    return dataclasses.replace(traced, compared=compared)


def _record(model: nn.Module, example: Passed, shorter: Passed) -> torch.export.ExportedProgram:
    """Records a call. Sizes in which the examples differ may be any in the file, if the model
    allows it; the size of the batch has to be."""
    shapes = torch.export.ShapesCollection()
    for one, other in zip(_tensors(example), _tensors(shorter), strict=True):
        sizes = enumerate(zip(one.shape, other.shape, strict=True))
        lengths = {axis: torch.export.Dim.AUTO for axis, (m, n) in sizes if m != n}
        shapes[one] = {0: torch.export.Dim.DYNAMIC, **lengths}
    named = dict(example.named)
    dynamic = shapes.dynamic_shapes(model, example.positional, named)
    with quiet(), plain_attention():
        return torch.export.export(model, example.positional, named, dynamic_shapes=dynamic)


def _return_dict(model: Any) -> None:
    """Lets a model return a plain dict instead of a class of its library, such as ModelOutput of
    transformers, so that the file can be read without that library."""
    forward = model.forward

    @functools.wraps(forward)
    def with_dict(*positional: Any, **named: Any) -> dict[str, Any]:
        return dict(forward(*positional, **named))

    model.forward = with_dict


def _arguments(model: nn.Module, config: Config, task: Task, count: int, cut: int) -> Passed:
    """Returns the arguments of the model for random samples."""
    first = next(model.parameters())
    part = part_of(task, "torch", config, DeviceAndDtype(first.dtype, first.device))
    batch = {}
    for name, array in random_samples(task, count, cut).items():
        is_image = array.dtype == "uint8" and array.ndim == 4
        tensor = torch.from_numpy(array)
        batch[name] = tensor.permute(0, 3, 1, 2).contiguous() if is_image else tensor
    inputs = part.inputs(batch)
    generator = torch.Generator().manual_seed(count)

    def drawn(x: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of its own, as torch.export tells inputs apart by their identity."""
        if not x.is_floating_point():
            return x.clone()
        return torch.randn(x.shape, generator=generator, dtype=x.dtype)

    return passed(
        model,
        drawn(inputs)
        if isinstance(inputs, torch.Tensor)
        else {name: drawn(x) for name, x in inputs.items()},
    )


def called(model: Callable[..., Any], inputs: Passed) -> Any:
    with torch.no_grad(), plain_attention():
        return model(*inputs.positional, **inputs.named)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return tensors_of(tuple(tree) if isinstance(tree, Passed) else tree)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Returns the tensors of nested arguments or outputs, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def name_of(dtype: torch.dtype) -> str:
    return f"{dtype}".removeprefix("torch.")


def merge_adapters(model: nn.Module, scale: float) -> None:
    """Merges the adapters of model.lora into their layers, as export of weights does."""
    for layer in model.modules():
        if not isinstance(layer, LoraLayer):
            continue
        arrays = {
            f"layer.{name}": layer.get_parameter(name).detach().numpy()
            for name in ("weight", "lora_A", "lora_B")
        }
        weight = torch.from_numpy(merged(arrays, scale)["layer.weight"])
        layer.get_parameter("weight").detach().copy_(weight)
        del layer.lora_A, layer.lora_B
        layer.__class__ = type(layer).__bases__[1]  # of LoraLinear: nn.Linear


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """Switches off a fast path of nn.TransformerEncoder, whose nested tensors cannot be exported.
    Real positions get the same outputs up to rounding, and padding other ones."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides what torch prints and logs about its own code; its errors have the reason."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            with contextlib.redirect_stdout(io.StringIO()):
                yield
    finally:
        logging.disable(before)
