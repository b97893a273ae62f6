"""A name is a file name: finds the file that a name means, and checks options against the signature of its build()."""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import json
import re
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from hvdtrain.config.refusal import type_name
from hvdtrain.config.schema import OPEN_SECTIONS, SECTIONS, Config
from hvdtrain.config.section import Provenance
from hvdtrain.errors import UserError, nearest, short

# Names that share a file; every other name is its file's own. A leaf of one name needs no line here.
ALIASES: dict[str, dict[str, str]] = {
    "comm": {"single": "communicator"},
    "data/datasets": {"mnist": "idx", "fashion_mnist": "idx", "kmnist": "idx", "cifar10": "cifar", "cifar100": "cifar"},
    "events/trackers": {},
    "frameworks": {},
    "frameworks/jax/models": {},
    "frameworks/torch/models": {f"resnet{depth}": "resnet" for depth in (18, 34, 50, 101, 152)},
    "optim": {},
}
PACKAGE = Path(__file__).parents[1]
MOST_NAME = 200  # characters
_ENTRY = re.compile(r"^def (build|connect)\(", re.MULTILINE)


def files(folder: str) -> dict[str, Path]:
    """name -> file of every plugin in a folder, read without importing any: NAME.py or NAME/build.py that defines build() or connect()."""
    here = PACKAGE / folder
    found = {path.stem: path for path in sorted(here.glob("*.py"))} | {path.parent.name: path for path in sorted(here.glob("*/build.py"))}
    plugins = {name: path for name, path in sorted(found.items()) if _ENTRY.search(path.read_text())}
    shared = {alias: plugins[stem] for alias, stem in ALIASES[folder].items() if stem in plugins}
    return {stem: path for stem, path in plugins.items() if stem not in ALIASES[folder].values()} | shared


def load(folder: str, name: str, where: str) -> ModuleType:
    """The module that `name` means in a folder, or a UserError with the nearest name."""
    path = find(folder, name, where).relative_to(PACKAGE.parent).with_suffix("")
    return importlib.import_module(".".join(path.parts))


def find(folder: str, name: str, where: str) -> Path:
    """The file that `name` means in a folder, or a UserError with the nearest name."""
    known = files(folder)
    if name not in known:
        raise UserError(
            f"unknown name{' for framework=jax' * (folder == 'frameworks/jax/models')}: {short(name)}", where, nearest(name, sorted(known))
        )
    return known[name]


def load_dotted(name: str, where: str) -> Callable[..., Any]:
    """What `package.module:Class` means: the user's own code, found as every import is (PYTHONPATH)."""
    module_name, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    fix = "write package.module:Class"
    if len(name) > MOST_NAME or not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        raise UserError(f"{short(name)} names no class", where, fix)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise UserError(f"no module named {error.name}", where, "add its folder to PYTHONPATH, or mend the name") from None
        raise
    found = getattr(module, attribute, None)
    if found is None:
        raise UserError(f"{module_name} has no {attribute}", where, f"{fix}; {_nearest_of(attribute, module)}".removesuffix("; "))
    if not callable(found):
        raise UserError(f"{name} is no class or function", where, fix)
    if not of_python(name):  # else check_names() refuses it as a model, and nothing of Python is an optimizer
        _check_own(found, name, where)
    return typing.cast("Callable[..., Any]", found)


def of_python(name: str) -> bool:
    """Whether a dotted name is of a module that Python itself brings: os:system, builtins.exec."""
    return re.split("[.:]", name)[0] in sys.stdlib_module_names


def _check_own(found: Callable[..., Any], name: str, where: str) -> None:
    """Refuses another module's name for something of Python's own, and what does not tell its parameters."""
    origin = f"{getattr(found, '__module__', '')}" if isinstance(found, type) or inspect.isroutine(found) else ""
    if origin and of_python(origin):
        raise UserError(f"{name} is {origin}.{found.__name__}, a part of Python", where, "give a class or function of your own")
    try:
        inspect.signature(found)
    except (TypeError, ValueError):
        raise UserError(f"{name} does not tell its parameters", where, "give a class or function of your own that calls it") from None


def _nearest_of(attribute: str, module: ModuleType) -> str:
    close = difflib.get_close_matches(attribute.lower(), [name.lower() for name in dir(module)], n=1)
    return next((f"did you mean {name}?" for name in dir(module) if close and name.lower() == close[0]), "")


def entry(path: Path) -> ast.FunctionDef:
    """The build() or connect() of a leaf, unread by Python: no framework is imported."""
    body = ast.parse(path.read_text()).body
    return next(node for node in body if isinstance(node, ast.FunctionDef) and node.name in ("build", "connect"))


def options(build: ast.FunctionDef) -> dict[str, str]:
    """option -> default, as it is written: the keyword-only parameters."""
    pairs = zip(build.args.kwonlyargs, build.args.kw_defaults, strict=True)
    return {argument.arg: ast.unparse(default) if default else "" for argument, default in pairs}


def check_names(config: Config, provenance: Provenance) -> None:
    """A UserError for a name or an option that no file knows, before anything is imported or read."""
    find("frameworks", config.framework, provenance.where("framework"))
    if config.comm.engine != "auto":
        find("comm", config.comm.engine, provenance.where("comm.engine"))
    for sink in config.log.trackers:
        find("events/trackers", sink, provenance.where("log.trackers"))
    for section in OPEN_SECTIONS:
        name, given = getattr(config, section).name, getattr(config, section).options
        if section == "model" and is_dotted(name) and of_python(name):  # it would be called: os:system
            raise UserError(f"{short(name)} is a part of Python, no model", provenance.where("model.name"), "write package.module:Class")
        if section == "data" or not is_dotted(name):  # the user's own class checks its own
            known = options(entry(find(folder_of(section, config), name, provenance.where(f"{section}.name"))))
            for option in given:
                if option not in known:
                    raise _unknown_option(section, name, option, known, provenance)


def is_dotted(name: str) -> bool:
    """Whether a name is an import path, package.module:Class or torch.optim.RMSprop, and no leaf's."""
    return ":" in name or "." in name


def folder_of(section: str, config: Config) -> str:
    """The folder whose files the names of an open section are: the models of JAX have their own."""
    return "frameworks/jax/models" if section == "model" and config.framework == "jax" else OPEN_SECTIONS[section]


def _unknown_option(section: str, name: str, option: str, known: Mapping[str, str], provenance: Provenance) -> UserError:
    keys = list(SECTIONS[section].model_fields)
    shown = ", ".join(f"{known_option}={default}" for known_option, default in known.items()) or "none"
    where = provenance.where(f"{section}.{option}")
    return UserError(
        f"{section}.name={name} has no option {option}", where, f"{nearest(option, [*known, *keys])} options of {name}: {shown}"
    )


def check_options(build: Callable[..., Any], options: Mapping[str, Any], section: str, provenance: Provenance) -> dict[str, Any]:
    """The options, converted to the types that the keyword-only parameters of build() are annotated with; check_names() knows them all."""
    hints = typing.get_type_hints(build)
    return {name: _convert(value, hints[name], f"{section}.{name}", provenance) for name, value in options.items()}


def _convert(value: Any, hint: Any, key: str, provenance: Provenance) -> Any:
    """A value by the rules of JSON, as in the sections: a list becomes a tuple, a text a path, but "3" is no number."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(hint).validate_json(json.dumps(value), strict=True)
    except ValidationError:
        raise UserError(f"wrong value for {key}: {short(repr(value))}", provenance.where(key), f"{key} takes {type_name(hint)}") from None
