"""A name is a file name: finds the file that a name means, and checks options against the signature of its build()."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from hvdtrain.configure import Origins, nearest
from hvdtrain.errors import UserError

# Names that share a file; every other name is its file's own. A leaf of one name needs no line here.
ALIASES: dict[str, dict[str, str]] = {
    "comm": {"horovod": "hvd", "single": "engine"},
    "data": {"mnist": "idx", "fashion_mnist": "idx", "kmnist": "idx", "cifar10": "cifar", "cifar100": "cifar"},
    "frames": {"torch": "on_torch", "numpy": "on_numpy"},
    "models": {f"resnet{depth}": "resnet" for depth in (18, 34, 50, 101, 152)},
    "optim": {},
}
_ENTRY = re.compile(r"^def (build|connect)\(", re.MULTILINE)


def files(folder: str) -> dict[str, Path]:
    """name -> file of every leaf in a folder, read without importing any: a leaf is a file that defines build() or connect()."""
    leaves = {path.stem: path for path in sorted((Path(__file__).parent / folder).glob("*.py")) if _ENTRY.search(path.read_text())}
    shared = {alias: leaves[stem] for alias, stem in ALIASES[folder].items() if stem in leaves}
    return {stem: path for stem, path in leaves.items() if stem not in ALIASES[folder].values()} | shared


def load(folder: str, name: str, where: str) -> ModuleType:
    """The module that `name` means in a folder, or a UserError with the nearest name."""
    known = files(folder)
    if name not in known:
        raise UserError(f"unknown name: {name}", where, nearest(name, sorted(known)))
    return importlib.import_module(f"hvdtrain.{folder}.{known[name].stem}")


def load_dotted(name: str, where: str) -> Callable[..., Any]:
    """What `package.module:Class` means. It is the user's own code, imported from the current folder or the environment."""
    module_name, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise UserError(f"no module named {error.name}", where, "add its folder to PYTHONPATH, or mend the name") from None
        raise
    except AttributeError:
        raise UserError(f"{module_name} has no {attribute}", where, "write package.module:Class") from None
    if not callable(found):
        raise UserError(f"{name} is no class or function", where, "write package.module:Class")
    return typing.cast("Callable[..., Any]", found)


def check_options(build: Callable[..., Any], options: Mapping[str, Any], section: str, origins: Origins) -> dict[str, Any]:
    """The options, converted to the types that the keyword-only parameters of build() are annotated with."""
    parameters = {p.name: p for p in inspect.signature(build).parameters.values() if p.kind is p.KEYWORD_ONLY}
    for name in options:
        if name not in parameters:
            known = ", ".join(f"{p.name}={p.default}" for p in parameters.values()) or "none"
            close = nearest(name, list(parameters)) if parameters else ""
            raise UserError(
                f"no such option: {section}.{name}", origins.where(f"{section}.{name}"), f"options here: {known}. {close}".rstrip(". ")
            )
    hints = typing.get_type_hints(build)
    return {name: _convert(value, hints[name], f"{section}.{name}", origins) for name, value in options.items()}


def _convert(value: Any, hint: Any, key: str, origins: Origins) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    one_field = dataclasses.make_dataclass("Option", [("value", hint, dataclasses.MISSING)])
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(one_field), {"value": value})).value  # type: ignore[union-attr]
    except OmegaConfBaseException:
        words = getattr(hint, "__name__", str(hint)) if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
        raise UserError(f"wrong value for {key}: {value!r}", origins.where(key), f"{key} takes {words}") from None
