"""The data of commands that train nothing: they write no copy, download or index."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.data.configured.opened import plugin_of


def unstaged(config: Config) -> Config:
    """Configures a command that trains nothing: data are read where they are, and not copied to
    data.stage."""
    return config.replace(data=config.data.replace(stage=None))


def unwritten(config: Config, scratch: Path) -> Config:
    """Configures a command that describes a job: data are read where they are, and not downloaded,
    staged or packed.

    An index of archives is made in `scratch`, which the command removes.
    """
    data = config.data.replace(stage=None)
    if plugins.is_users_own(data):
        return config.replace(data=data)
    changed = _unwritten_options(data.name, config.where("data.name"), scratch)
    if isinstance(source := data.options.get("source"), str):
        of_source = _unwritten_options(source, config.where("data.name"), scratch)
        changed["source_options"] = {**(data.options.get("source_options") or {}), **of_source}
    return config.replace(data=data.with_options(**changed))


def _unwritten_options(name: str, where: str, scratch: Path) -> dict[str, Any]:
    """Returns the options with which a data set writes nothing outside of `scratch`."""
    known = inspect.signature(plugins.load("data/datasets", name, where).build).parameters
    return {
        option: value
        for option, value in {"download": False, "packed": False, "cache": f"{scratch}"}.items()
        if option in known
    }


def published(config: Config) -> tuple[int, tuple[int, int, int], int] | None:
    """Returns the number of samples, the image shape and the number of classes of the full training
    set of data.name, if they are known without its files."""
    if plugins.is_users_own(config.data) or config.data.val_share is not None:
        return None
    sizes: tuple[int, tuple[int, int, int], int] | None = getattr(
        plugin_of(config), "TRAINING", {}
    ).get(config.data.name)
    return sizes
