"""Variable-length samples: data.pad, data.mask and data.pack."""

from __future__ import annotations

from hvdtrain.config.schema import Config
from hvdtrain.core.extras import implementing_module
from hvdtrain.data.field import Padding
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError


def padding_of(config: Config) -> dict[str, Padding]:
    """Reads data.pad and data.mask; with data.pack the padding of its tokens. Raises UserError if
    they contradict each other."""
    pad = config.data.pad
    masks = config.data.mask
    if other := next((name for name in masks if name not in pad), None):
        what = f"data.mask has {other}, but data.pad does not"
        raise UserError(
            what, config.where("data.mask"), f"data.pad={{{other}: 0}}, or leave it out"
        )
    if config.data.pack is not None:
        from hvdtrain.data.packed import PADDING

        return dict(PADDING)
    return {name: Padding(value, masks.get(name, f"{name}_mask")) for name, value in pad.items()}


def refuse_lengths(config: Config) -> None:
    """Raises UserError if samples of hvdtrain's own data sets would be padded or packed: they have
    one length, except texts, which are padded by themselves."""
    if config.data.is_of_texts:
        return
    if config.data.pad:
        key = "data.pad"
    elif config.data.mask:
        key = "data.mask"
    elif config.data.pack is not None:
        key = "data.pack"
    else:
        return
    what = (
        f"{key} needs your own data with variable-length samples; all samples of "
        f"data.name={config.data.name} have the same length"
    )
    raise UserError(
        what,
        config.where(key),
        "leave it out; or a torch Dataset, or a dict with a list of arrays",
    )


def packed_rows(config: Config, source: Source, name: str) -> Source:
    """Packs the set into rows of data.pack tokens. Raises what packed() raises."""
    length = config.data.pack
    if length is None:
        return source
    pack = implementing_module("data.pack").packed
    where = config.where("data.pack")
    return source.each_part(
        lambda part, of, first: pack(part, length, f"{name}, {of}" if of else name, where)
    )
