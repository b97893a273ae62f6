"""Arrays of a weights file that the model does not have: prefixes, adapters, and arrays that change
the meaning of others."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from hvdtrain.config.schema import Config
from hvdtrain.core.adapters import is_adapter, merged
from hvdtrain.core.arrays import Readable, in_memory
from hvdtrain.errors import UserError, short

# name parts added by DDP, torch.compile, FSDP, checkpoint wrappers
_WRAPPERS = (
    "module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
)
_COUNTS = ("n_averaged",)  # stored with the weights of torch.optim.swa_utils.AveragedModel
_BOUND_TO_NOTHING = ("num_batches_tracked",)  # no output depends on it


class Kind(NamedTuple):
    """A kind of array that determines how others are interpreted, by its name."""

    fits: str  # the end of a name, as a regular expression
    what: str
    fix: str


_PEFT = Kind(
    r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)\.(.+\.)?weight|\.base_layer\.\w+",
    "an adapter of peft",
    "model.merge_and_unload() of peft gives a model without adapters: save its state_dict()",
)
KINDS = (
    _PEFT,
    Kind(
        r"\.lora_[AB]",
        "an adapter without its scale",
        "hvdtrain export RUN --to FILE --merged, or model.weights=RUN",
    ),
    Kind(
        r"\.\w+_mask",
        "the mask of a pruned weight",
        "torch.nn.utils.prune.remove(layer, 'weight'), then save the state_dict()",
    ),
    Kind(
        r"\.parametrizations\..+|\.\w+_(g|v|u|orig)",
        "a part of a parametrized weight (weight_norm, spectral_norm)",
        "torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight'), then save the "
        "state_dict(); or a model with it",
    ),
    Kind(
        r"\.(qweight|qzeros|scales|g_idx|SCB|\w+_scale(_inv)?|\w+_zero_point|weight\.(absmax|quant_\w+|nested_\w+))",
        "a part of a quantized weight",
        "weights that are not quantized: model.dequantize() of transformers, then save the "
        "state_dict()",
    ),
    Kind(
        r"\.running_(mean|var)",
        "a running statistic of a batch norm",
        "a model with the batch norm of the file",
    ),
)


def without_wrappers(
    found: dict[str, Readable], names: Collection[str]
) -> tuple[dict[str, Readable], list[str]]:
    """Removes the parts of names that DDP, torch.compile and others add. Returns the arrays, and
    lines for the user."""
    plain = {
        name: ".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in found
    }
    wrapped = [name for name in found if name not in _COUNTS]
    is_all = (
        bool(wrapped)
        and all(name.split(".")[0] in _WRAPPERS for name in wrapped)
        and not found.keys() & set(names)
    )
    renamed = {
        name: plain[name] if is_all or (name not in names and plain[name] in names) else name
        for name in found
    }
    if len(set(renamed.values())) < len(renamed):
        return found, []  # then names stay as they are
    parts = sorted(
        {
            f"{part}."
            for name in found
            if renamed[name] != name
            for part in name.split(".")
            if part in _WRAPPERS
        }
    )
    if not parts:
        return found, []
    where = (
        f"all names of the file begin with {parts[0]}"
        if is_all and len(parts) == 1
        else f"names of the file have {' and '.join(parts)}"
    )
    return {renamed[name]: array for name, array in found.items()}, [f"{where}, which is left out"]


def with_adapters(
    found: dict[str, Readable],
    scale: float | None,
    names: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    config: Config,
) -> tuple[dict[str, Readable], list[str]]:
    """Keeps adapters that the model has, or merges them into the weights of their layers. Returns
    the arrays, and lines for the user.

    scale: of the file's adapters; None if the file does not contain it. Raises UserError if it is
    needed.
    """
    adapters = [name for name in found if is_adapter(name)]
    if not adapters or (
        not config.model.lora and all(name in names for name in adapters)
    ):  # parameters of the model itself
        return found, []
    if scale is None:
        kind = KINDS[1]
        raise UserError(
            f"{config.model.weights} has {adapters[0]}, {kind.what}",
            config.where("model.weights"),
            kind.fix,
        )
    same_shapes = {name: shapes[own] for name, own in names.items() if is_adapter(name)} == {
        name: found[name].shape for name in adapters
    }
    layers = len(adapters) // 2
    if config.model.lora and same_shapes and scale == config.model.lora_scale:
        return found, [f"        the adapters of {layers} layers are trained further"]
    whole = {name: in_memory(array) for name, array in found.items()}
    return {**merged(whole, scale)}, [
        f"        the adapters of {layers} layers are merged into their weights: W + {scale:g} B A"
    ]


def check_leftovers(
    left_over: Mapping[str, str],
    loaded: Iterable[str],
    names: Collection[str],
    path: str,
    where: str,
) -> None:
    """Raises UserError for an array without a place in the model that changes what the loaded ones
    mean.

    left_over: names in the file with number types; loaded: loaded names; names: all names of the
    model. Arrays of layers that the model does not have are ignored.
    """
    layers = _layers(loaded)
    for name, dtype in left_over.items():
        kind = next((kind for kind in KINDS if re.search(f"(?:{kind.fits})$", name)), None)
        if plain := _averaged(name, names):
            what = f"{path} contains both {name} and {plain}: averages and weights"
            raise UserError(what, where, "a file that contains only one of them")
        layer = name.rpartition(".")[0]
        if kind is _PEFT or (
            kind is not None and any(prefix in layers for prefix in _prefixes(name))
        ):
            raise UserError(
                f"{path} contains {name}, {kind.what}, but the model has no place for it",
                where,
                f"{kind.fix}; {_unused(name)}",
            )
        if (
            layer in layers
            and dtype.startswith("float")
            and name.rpartition(".")[2] not in _BOUND_TO_NOTHING
        ):
            what = f"{path} contains {name}, but the model has only the other weights of {layer}"
            raise UserError(what, where, f"the model of the file; {_unused(name)}")


def check_missing(
    missing: Iterable[str], names: Mapping[str, str], loaded: Iterable[str], path: str, where: str
) -> None:
    """Raises UserError if the file contains some weights of a layer and lacks others. names: as
    Learner.state_dict_names()."""
    layers = _layers(loaded)
    for name in missing:
        counts = names[name].startswith("p.") or name.endswith((".running_mean", ".running_var"))
        inside = name.partition(".parametrizations.")[0]
        layer = name.rpartition(".")[0] if inside == name else inside
        if counts and layer in layers and not is_adapter(name):
            what = f"{path} contains weights of {layer}, but not {name}"
            raise UserError(
                what,
                where,
                f"model.weights_skip=['{name}'] keeps its initial value; or a file with it",
            )


def _layers(loaded: Iterable[str]) -> set[str]:
    """Returns the modules that have their own arrays, except the model itself."""
    return {name.rpartition(".")[0] for name in loaded} - {""}


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _averaged(name: str, names: Collection[str]) -> str:
    """Returns the model's weight whose average has this name, such as ema.fc.weight; else empty."""
    plain = re.sub(r"^(\w*ema\w*|averaged?_model)\.(module\.)?|_ema$", "", name)
    return plain if plain != name and plain in names else ""


def _unused(name: str) -> str:
    return f"model.weights_names=['{short(name)}=unused.{short(name)}'] leaves it out"
