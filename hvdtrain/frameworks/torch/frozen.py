"""Selects the trained weights of a torch model: model.freeze, model.thaw and model.lora."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.exceptions import TooHardError
from torch import nn

from hvdtrain.config import plugins
from hvdtrain.config.sections.model import ModelConfig
from hvdtrain.core.adapters import is_adapter
from hvdtrain.core.ties import Ties
from hvdtrain.errors import UserError, nearest, short
from hvdtrain.frameworks.by_name import thaw_entries
from hvdtrain.frameworks.torch.buffers import RUNNING
from hvdtrain.frameworks.torch.private_api import storage_of
from hvdtrain.optim.thawing import number_of_entry

_SHOWN = 6  # names in a line
_NOWHERE = 2**40  # an address
_MOST_WORK = 100_000  # max_work of numpy.shares_memory(): takes milliseconds


def freeze(model: nn.Module, config: ModelConfig) -> None:
    """Turns off gradients of frozen weights that model.thaw does not list, and stops their running
    statistics.

    Frozen are the weights that model.freeze matches, and with model.lora everything except the
    adapters, model.lora_train and model.weights_skip. An array with several names is frozen by any
    of them. Raises UserError if a pattern matches nothing or has no effect.
    """
    ties = ties_of(model)
    adapted = _adapted_names(model) if config.lora else set()
    names = [name for name in all_names(model) if not (config.lora and is_adapter(name))]
    _check_fits(
        "model.freeze", config.freeze, names, "no weight of the model", config.where("freeze")
    )
    frozen = ties.spread(_fitting(names, config.freeze))
    if config.lora:
        _check_trained(config, names, frozen | adapted)
        frozen |= set(names) - ties.spread(
            _fitting(names, [*config.lora_train, *config.weights_skip])
        )
        frozen |= ties.spread(adapted)
    entries = thaw_entries(config, ties)
    _check_thaw(
        config,
        entries.patterns,
        [name for name in names if name in frozen and name not in adapted],
        ties,
    )

    def stays(name: str) -> bool:
        return name in frozen and (name in adapted or entries.number_of(name) is None)

    for name, p in model.named_parameters():
        if stays(name):
            p.requires_grad_(False)
    for name, module in model.named_modules():
        if any(
            stays(f"{name}.{buffer}".removeprefix("."))
            for buffer in RUNNING
            if buffer in module._buffers
        ):
            stay(module)


def _adapted_names(model: nn.Module) -> set[str]:
    """Returns the names of the weights and biases of layers with an adapter."""
    from hvdtrain.frameworks.torch.lora_layer import LoraLayer

    layers = [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, LoraLayer)
    ]
    return {
        f"{name}.{own}".removeprefix(".")
        for name, layer in layers
        for own in ("weight", "bias")
        if getattr(layer, own) is not None
    }


def _fitting(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return [
        name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]


def _check_fits(
    key: str, patterns: Iterable[str], names: Sequence[str], what: str, where: str
) -> None:
    """Raises UserError if a pattern matches none of these names; what: the text after "matches",
    such as "no weight"."""
    for pattern in patterns:
        if not _fitting(names, [pattern]):
            raise UserError(
                f"{key}: {short(pattern)} matches {what}", where, nearest(pattern, names)
            )


def _check_trained(config: ModelConfig, names: Sequence[str], frozen: Collection[str]) -> None:
    """Raises UserError for weights that should be trained but are in `frozen`, because of
    model.freeze or an adapter."""
    free = [name for name in names if name not in frozen]
    what = (
        "no weight that could be trained: the others are frozen by model.freeze, or their layers "
        "have an adapter"
    )
    _check_fits(
        "model.lora_train", config.lora_train, free or ["none"], what, config.where("lora_train")
    )
    for name in (
        _fitting((name for name in names if name not in free), config.weights_skip)
        if config.weights is not None
        else ()
    ):
        layer = name.rpartition(".")[0]
        what = (
            f"model.weights_skip leaves {name} at its random initial values, but model.lora or "
            "model.freeze freezes it"
        )
        raise UserError(
            what,
            config.where("weights_skip"),
            f"leave {layer} out of model.lora and model.freeze: it is trained without an adapter",
        )


def _check_thaw(
    config: ModelConfig, entries: Sequence[Sequence[str]], frozen: Sequence[str], ties: Ties
) -> None:
    """Raises UserError if an entry of model.thaw matches no frozen weights, or only weights of
    earlier entries."""
    where = config.where("thaw")
    if entries and not frozen:
        raise UserError(
            f"model.thaw: {short(entries[0][0])} matches no weight that model.freeze matches",
            where,
            "add it to model.freeze=[...]",
        )
    for number, patterns in enumerate(entries):
        _check_fits("model.thaw", patterns, frozen, "no weight that model.freeze matches", where)
        if not any(number_of_entry(name, entries) == number for name in frozen):
            what = (
                f"model.thaw[{number}], names={list(patterns)}, matches only weights that earlier "
                "entries match"
            )
            raise UserError(what, where, "put it before them, or leave it out")
        fitting = set(_fitting(frozen, patterns))
        ties.check_whole(
            fitting.__contains__, f"model.thaw[{number}], names={list(patterns)},", where
        )


def stay(module: nn.Module) -> None:
    """Keeps a norm in evaluation mode."""
    module.train = functools.partial(_stay, module)  # type: ignore[method-assign]
    module.train()


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    """Replaces train() of a module that stays in evaluation mode."""
    return nn.Module.train(module, False)


def lines(model: nn.Module, config: ModelConfig) -> list[str]:
    """Returns header lines: weights trained besides adapters, and tied arrays that a key matches by
    one name."""
    ties = ties_of(model)
    names = all_names(model)
    texts = [
        *ties.lines(_fitting(names, config.freeze), "model.freeze"),
        *ties.lines(_fitting(names, config.lora_train), "model.lora_train"),
        *_trained_from_the_start(model, config, ties),
    ]
    if not config.lora:
        return texts
    from hvdtrain.frameworks.torch.lora_layer import LoraLayer

    trained = [
        name for name, p in model.named_parameters() if p.requires_grad and not is_adapter(name)
    ]
    layers = sum(isinstance(module, LoraLayer) for module in model.modules())
    beside = f", and {_some(trained)}" if trained else ""
    first = (
        f"model.lora: trained are the adapters of {layers} layers{beside}; all other weights and "
        "running statistics are frozen"
    )
    drawn = config.weights is None and not config.given and not plugins.is_dotted(config.name)
    return [
        first,
        *["model.lora without model.weights: what is frozen is as it was drawn"] * drawn,
        *texts,
    ]


def _trained_from_the_start(model: nn.Module, config: ModelConfig, ties: Ties) -> list[str]:
    """Returns a line for each entry of model.thaw that also matches parameters that are never
    frozen."""
    entries = thaw_entries(config, ties)
    named = [name for name, p in model.named_parameters() if p.requires_grad]
    free = [name for name in named if not entries.is_frozen(name)]
    return [
        f"model.thaw[{number}]: never frozen, and trained from the start: {_some(fitting)}"
        for number in range(len(entries.patterns))
        if (fitting := [n for n in free if number_of_entry(n, entries.patterns) == number])
    ]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (
        f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    )


def all_names(model: nn.Module) -> list[str]:
    """Returns every name of every weight, then of every buffer."""
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return [name for name, _ in named]


def frozen_names(model: nn.Module) -> list[str]:
    """Returns the names of the parameters that are not trained."""
    return [name for name, p in model.named_parameters() if not p.requires_grad]


def ties_of(model: nn.Module) -> Ties:
    """Returns which names of weights and buffers belong to one tensor."""
    first: dict[int, str] = {}
    named: list[tuple[str, torch.Tensor]] = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return Ties({name: first.setdefault(id(tensor), name) for name, tensor in named})


def check_overlaps(model: nn.Module, where: str) -> None:
    """Raises UserError if a weight overlaps in memory with another weight or a buffer, because an
    update of one would change the other."""
    held: dict[int, list[tuple[str, np.ndarray]]] = {}  # arrays of each storage
    buffers = {name for name, _ in model.named_buffers()}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor) or not tensor.numel() or tensor.layout is not torch.strided:
            continue
        held.setdefault(storage_of(tensor), []).append((name, _places(tensor)))
    for storage in held.values():
        for (name, places), (other, others) in _meeting(storage):
            if not {name, other} <= buffers and _share(places, others):
                what = (
                    f"{name} and {other} are two tensors with the same memory, so an update of "
                    "one changes the other"
                )
                fix = (
                    "use one nn.Parameter under both names, as in head.weight = embed.weight; "
                    "for a part of it, slice it in forward()"
                )
                raise UserError(what, where, fix)


class _ArrayInterface:
    """NumPy's array interface for a tensor: the places of its elements in its storage."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"|V{size}",
            "data": (_NOWHERE + tensor.storage_offset() * size, True),
        }


def _places(tensor: torch.Tensor) -> np.ndarray:
    """Returns an array that is never read; it describes to NumPy where the elements are, on any
    device."""
    return np.asarray(_ArrayInterface(tensor))


def _meeting(storage: list[tuple[str, np.ndarray]]) -> Iterator[tuple[tuple[str, np.ndarray], ...]]:
    """Yields pairs whose spans, from the first to the last byte, overlap."""
    spans = sorted((*_span(places), number) for number, (_, places) in enumerate(storage))
    for at, (_, end, number) in enumerate(spans):
        for begin, _, other in spans[at + 1 :]:
            if begin >= end:
                break
            yield storage[number], storage[other]


def _span(places: np.ndarray) -> tuple[int, int]:
    """Returns the first byte, and the one after the last."""
    begin = places.ctypes.data
    steps = zip(places.shape, places.strides, strict=True)
    return begin, begin + places.itemsize + sum((size - 1) * stride for size, stride in steps)


def _share(places: np.ndarray, others: np.ndarray) -> bool:
    """Whether they share an element, unlike two halves of columns; False if that takes long to find
    out."""
    try:
        return np.shares_memory(places, others, max_work=_MOST_WORK)  # type: ignore[arg-type]
    except TooHardError:
        return False
