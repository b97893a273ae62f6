"""Plugins: a name selects a file of a folder. The file's build() creates the object, and its
keyword-only parameters are the options."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import inspect
import json
import re
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from hvdtrain.config.of_a_run import is_recorded, not_in_this_copy
from hvdtrain.config.schema import OPEN_SECTIONS, Config
from hvdtrain.config.sections.data import DataConfig
from hvdtrain.config.sections.model import ModelConfig
from hvdtrain.config.sections.optim import OptimConfig
from hvdtrain.config.sections.section import OpenSection, go_on, is_object
from hvdtrain.config.sections.task import TaskConfig
from hvdtrain.core.extras import aliases, libraries
from hvdtrain.core.syntax_tree import syntax_tree
from hvdtrain.errors import UserError, closest, nearest, short

# Names that share a file. Every other name is the name of its file, and needs no line here.
ALIASES: dict[str, dict[str, str]] = {
    "comm": {"single": "communicator"},
    "data/datasets": {
        **dict.fromkeys(("mnist", "fashion_mnist", "kmnist"), "idx"),
        **dict.fromkeys(("cifar10", "cifar100"), "cifar"),
    },
    "events/trackers": {},
    "frameworks": {},
    **{
        f"frameworks/{name}/models": {
            f"resnet{depth}": "resnet" for depth in (18, 34, 50, 101, 152)
        }
        | {f"resnet{depth}": "cifar_resnet" for depth in (8, 14, 20, 32, 44, 56, 110)}
        for name in ("jax", "torch")
    },
    "optim": {},
    "tasks": {},
}
KEYS = {  # folder -> the key whose value names its files
    **{folder: f"{section}.name" for section, folder in OPEN_SECTIONS.items()},
    "frameworks/jax/models": "model.name",
    "comm": "comm.engine",
    "frameworks": "framework",
    "events/trackers": "log.trackers",
}
PACKAGE = Path(__file__).parents[1]
# names that annotations of options may use, besides Python's types
ANNOTATIONS = {
    "Literal": Literal,
    "Path": Path,
}
MOST_NAME = 200  # characters
_ENTRY = re.compile(r"^def (build|connect)\(", re.MULTILINE)


@functools.cache  # it reads every file, and each check of a configuration asks several times
def files(folder: str) -> Mapping[str, Path]:
    """Returns name -> file of every plugin in a folder, without importing any: NAME.py or
    NAME/build.py that defines build() or connect(), here or in the same folder of an extra."""
    paths: dict[str, Path] = {}
    for here in (PACKAGE / folder, *sorted(PACKAGE.glob(f"extras/*/{folder}"))):
        paths |= {path.stem: path for path in sorted(here.glob("*.py"))}
        paths |= {path.parent.name: path for path in sorted(here.glob("*/build.py"))}
    plugins = {
        name: path for name, path in sorted(paths.items()) if _ENTRY.search(path.read_text())
    }
    names = ALIASES[folder] | aliases(folder)
    shared = {alias: plugins[stem] for alias, stem in names.items() if stem in plugins}
    of_names = {stem: path for stem, path in plugins.items() if stem not in names.values()}
    return MappingProxyType(of_names | shared)


def load(folder: str, name: str, where: str) -> ModuleType:
    """Returns the module of a plugin. Raises UserError with the nearest name if there is none."""
    path = find(folder, name, where).relative_to(PACKAGE.parent).with_suffix("")
    return importlib.import_module(".".join(path.parts))


def of_imported_frameworks(file: str) -> list[ModuleType]:
    """Returns frameworks/NAME/FILE.py of each framework whose library NAME has been imported: the
    job's script or model may use it."""
    folders = sorted(path.parent.name for path in PACKAGE.glob(f"frameworks/*/{file}.py"))
    return [
        importlib.import_module(f"{PACKAGE.name}.frameworks.{name}.{file}")
        for name in folders
        if sys.modules.get(name) is not None
    ]


def of_imported_libraries() -> list[ModuleType]:
    """Returns the module of an extra for each library of models that has been imported: the job's
    model may be of it."""
    return [
        importlib.import_module(module)
        for library, module in libraries().items()
        if sys.modules.get(library) is not None
    ]


def named(name: str) -> Any:
    """Returns hvdtrain's object "package.module:name". Tables of data use names for objects that
    only some jobs import."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def is_torch_module(thing: Any) -> bool:
    """Whether an object is a torch.nn.Module; does not import torch."""
    return any(
        kind.__module__ == "torch.nn.modules.module" and kind.__name__ == "Module"
        for kind in type(thing).__mro__
    )


def find(folder: str, name: str, where: str) -> Path:
    """Returns the file of a plugin. Raises UserError with the nearest name if there is none."""
    known = files(folder)
    if name not in known:
        from hvdtrain.config.words_of_other_tools import data_of_path, right_value, without_a_value

        right = right_value(KEYS[folder], name)
        path = data_of_path(name) if folder == "data/datasets" else None
        fix = (
            f"did you mean {right}?"
            if right is not None and (right in known or is_dotted(right))
            else path or without_a_value(KEYS[folder], name) or nearest(name, sorted(known))
        )
        raise UserError(
            f"unknown name{' for framework=jax' if folder == 'frameworks/jax/models' else ''}: "
            f"{short(name)}",
            where,
            fix,
        )
    return known[name]


def load_dotted(name: str, where: str) -> Callable[..., Any]:
    """Returns the user's `package.module:Class`, imported as usual (PYTHONPATH). Raises UserError
    if the name, its module or its attribute is not found or cannot be called.
    """
    module_name, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    fix = "write package.module:Class"
    if len(name) > MOST_NAME or not all(
        part.isidentifier() for part in [*module_name.split("."), attribute]
    ):
        raise UserError(f"{short(name)} names no class", where, fix)
    from hvdtrain.core.import_torchvision import define_missing_operators

    define_missing_operators()  # the module may import torchvision
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise UserError(
                f"no module named {error.name}",
                where,
                "add its folder to PYTHONPATH, or correct the name",
            ) from None
        raise
    member = getattr(module, attribute, None)
    if member is None and module_name == "__main__":
        raise UserError(f"the program does not define class {attribute}", where, of_a_script(name))
    if member is None:
        raise UserError(
            f"{module_name} has no {attribute}",
            where,
            f"{fix}; {_nearest_of(attribute, module)}".removesuffix("; "),
        )
    if not callable(member):
        raise UserError(f"{name} is neither a class nor a function", where, fix)
    if not of_python(
        name
    ):  # otherwise check_names() rejects it as a model; no Python builtin is an optimizer
        _check_own(member, name, where)
    return typing.cast("Callable[..., Any]", member)


def of_a_script(name: str) -> str:
    """Returns how to resume a job with a class that only its script defines; empty for a class in a
    module."""
    if not name.startswith("__main__:"):
        return ""
    return (
        f"{name.partition(':')[2]} is a class of a script: start that script again, with "
        "resume=RUN in its hvdtrain.train()"
    )


def of_python(name: str) -> bool:
    """Whether a dotted name belongs to a module of Python itself: os:system, builtins.exec."""
    return re.split("[.:]", name)[0] in sys.stdlib_module_names


def _check_own(found: Callable[..., Any], name: str, where: str) -> None:
    """Rejects a Python builtin under another module's name, and a callable without a readable
    signature."""
    origin = (
        f"{getattr(found, '__module__', '')}"
        if isinstance(found, type) or inspect.isroutine(found)
        else ""
    )
    if origin and of_python(origin):
        raise UserError(
            f"{name} is {origin}.{found.__name__}, part of Python itself",
            where,
            "give a class or function of your own",
        )
    try:
        inspect.signature(found)
    except (TypeError, ValueError):
        raise UserError(
            f"{name} has no signature that Python can read",
            where,
            "give a class or function of your own that calls it",
        ) from None


def _nearest_of(attribute: str, module: ModuleType) -> str:
    close = difflib.get_close_matches(
        attribute.lower(), [name.lower() for name in dir(module)], n=1
    )
    return next(
        (f"did you mean {name}?" for name in dir(module) if close and name.lower() == close[0]), ""
    )


def check_names(config: Config) -> None:
    """Raises UserError for an unknown name, an unknown option or an option of the wrong type;
    imports no plugin."""
    find("frameworks", config.framework, config.where("framework"))
    if config.comm.engine != "auto":
        find("comm", config.comm.engine, config.comm.where("engine"))
    for tracker in config.log.trackers:
        find("events/trackers", tracker, config.log.where("trackers"))
    for section in (config.data, config.task, config.model, config.optim):
        _refuse_object(section)
        if (
            section is not config.optim and is_users_own(section) and of_python(section.name)
        ):  # otherwise it would be called: os:system
            what = f"{short(section.name)} is part of Python itself, not a {section.section}"
            raise UserError(what, section.where("name"), "write package.module:Class")
        if section is config.model and config.framework != "torch" and is_library(section.name):
            what = (
                f"framework={config.framework} does not support model.name={short(section.name)}, "
                "a model of torch"
            )
            raise UserError(what, section.where("name"), "framework=torch, or another model")
        if not is_users_own(section):  # a user's class checks its options itself
            convert_options(section, folder_of(section.section, config.framework))


def own_function(section: OpenSection) -> Callable[..., Any]:
    """Returns the function for a section whose name is not a plugin: a user's function, or the
    constructor of a script's object. Raises UserError if it is not found.
    """
    name: str = section.name  # type: ignore[attr-defined]
    if section.given is not None and section.given.name is not None:
        return section.given.make
    _refuse_object(section)
    library, _, rest = name.partition(":")
    if section.section == "model" and is_library(name):
        module: Any = importlib.import_module(libraries()[library])
        return typing.cast("Callable[..., Any]", module.model_of(rest, section.where("name")))
    return load_dotted(name, section.where("name"))


def is_library(name: str) -> bool:
    """Whether a model's name begins with a library and a colon, as in timm:convnext_tiny."""
    library, colon, _ = name.partition(":")
    return bool(colon) and library in libraries()


def _refuse_object(section: OpenSection) -> None:
    """Raises UserError if a name stands for a script's object, which this program does not have."""
    name: str = section.name  # type: ignore[attr-defined]
    if is_object(name) and section.given is None:
        what = f"{section.section}.name={short(name)} is an object that only its script defines"
        raise UserError(what, section.where("name"), go_on(section.section))


def is_users_own(section: OpenSection) -> bool:
    """Whether a section's name is an import path; for data it must contain a colon:
    package.module:function."""
    name: str = section.name  # type: ignore[attr-defined]
    return ":" in name if section.section == "data" else is_dotted(name)


def call_own(section: OpenSection, known: dict[str, Any]) -> Any:
    """Returns the result of package.module:function of a section, called with its options and with
    the entries of `known` that it has parameters for. Raises UserError if it is not found or the
    options do not match.
    """
    name: str = section.name  # type: ignore[attr-defined]
    function = own_function(section)
    signature = signature_of(function)
    arguments = {key: value for key, value in known.items() if key in signature.parameters} | dict(
        section.options
    )
    try:
        signature.bind(**arguments)
    except TypeError as error:
        fix = fix_of_parameters(section, signature)
        raise UserError(
            f"{name}{signature} does not fit: {error}", section.where("name"), fix
        ) from None
    return function(**arguments)


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Returns the signature of a callable; for a class whose metaclass takes (*args, **kwargs), the
    signature of __init__."""
    signature = inspect.signature(function)
    if not isinstance(function, type) or any(
        p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values()
    ):
        return signature
    _, *parameters = inspect.signature(function.__init__).parameters.values()  # type: ignore[misc]
    return signature.replace(parameters=parameters)


def convert_options(
    section: DataConfig | TaskConfig | ModelConfig | OptimConfig, folder: str
) -> dict[str, Any]:
    """Returns the options of a section as arguments of its build(). Raises UserError for an unknown
    name or a wrong option."""
    return _converted(section, find(folder, section.name, section.where("name")))


def is_dotted(name: str) -> bool:
    """Whether a name is an import path, package.module:Class or torch.optim.RMSprop, and not a
    plugin."""
    return ":" in name or "." in name


def folder_of(section: str, framework: str) -> str:
    """Returns the folder of the plugins of an open section; JAX models have their own."""
    return (
        "frameworks/jax/models"
        if section == "model" and framework == "jax"
        else OPEN_SECTIONS[section]
    )


def entry_of(path: Path) -> ast.FunctionDef:
    """Returns the build() or connect() of a plugin as a syntax tree."""
    body = syntax_tree(path.read_text()).body
    return next(
        node
        for node in body
        if isinstance(node, ast.FunctionDef) and node.name in ("build", "connect")
    )


@functools.cache
def options_of(path: Path) -> type[BaseModel]:
    """Returns the options of a plugin: types and defaults from the signature of its build(),
    descriptions from its docstring (`option: text`)."""
    build = entry_of(path)
    descriptions = _descriptions(ast.get_docstring(build) or "")
    fields: dict[str, Any] = {}
    for argument, default in zip(build.args.kwonlyargs, build.args.kw_defaults, strict=True):
        assert argument.annotation is not None and default is not None, (
            f"{path}: {argument.arg} has no type or no default"
        )
        field = Field(default=ast.literal_eval(default), description=descriptions.get(argument.arg))
        fields[argument.arg] = (ast.unparse(argument.annotation), field)
    config = ConfigDict(extra="forbid", strict=True, defer_build=True, protected_namespaces=())
    model: type[BaseModel] = create_model(path.stem, __config__=config, **fields)
    model.model_rebuild(_types_namespace=ANNOTATIONS)
    return model


def _descriptions(docstring: str) -> dict[str, str]:
    """Returns option -> text, from the lines `option: text` of a docstring. Lines that are indented
    more continue a text."""
    descriptions: dict[str, str] = {}
    option = ""
    for line in docstring.splitlines():
        name, _, text = line.partition(": ")
        if option and line.startswith("    "):
            descriptions[option] += f" {line.strip()}"
            continue
        option = name if name.isidentifier() else ""
        if option:
            descriptions[option] = text
    return descriptions


def _converted(section: OpenSection, path: Path) -> dict[str, Any]:
    """Converts the options of a section to the types of the plugin's parameters: a list becomes a
    tuple, a text becomes a path.

    Raises UserError for an unknown option and for a value of another type. Values are judged as
    JSON, so "3" is not a number.
    """
    model = options_of(path)
    try:
        converted = model.model_validate_json(json.dumps(dict(section.options)))
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        option = str(details["loc"][0])
        if details["type"] == "extra_forbidden":
            raise _unknown_option(section, option, model) from None
        from hvdtrain.config.refusal import expected

        key = section.full_key(option)
        value = section.options[option]
        fix = expected(key, model.model_fields[option], value)
        raise UserError(
            f"wrong value for {key}: {short(repr(value))}", section.where(option), fix
        ) from None
    return {option: getattr(converted, option) for option in section.options}


def _unknown_option(section: OpenSection, option: str, model: type[BaseModel]) -> UserError:
    from hvdtrain.config.words_of_other_tools import right_key, without_a_key

    name: str = section.name  # type: ignore[attr-defined]
    options = {option: field.default for option, field in model.model_fields.items()}
    fields = list(type(section).model_fields)
    right = right_key(section.full_key(option), section.options[option]) or closest(
        option, [*options, *fields]
    )
    where = section.where(option)
    origin = where.partition(", ")[2]
    if not right and is_recorded(origin):
        key = section.full_key(option)
        return not_in_this_copy(key, section.options[option], origin)
    suggestion = (
        f"did you mean {right}?"
        if right
        else without_a_key(option) or f"known: {', '.join(fields)}"
    )
    listed = (
        ", ".join(f"{option}={shown_default(default)}" for option, default in options.items())
        or "none"
    )
    fix = f"{suggestion}{' ' if right else '; '}options of {name}: {listed}"
    return UserError(f"{section.section}.name={name} has no option {option}", where, fix)


def fix_of_parameters(section: OpenSection, signature: inspect.Signature) -> str:
    """Returns the fix for options that do not match a user's class: the parameter that a misspelt
    one resembles."""
    known = [*signature.parameters, *type(section).model_fields]
    unknown = next((option for option in section.options if option not in known), None)
    fix = f"give its parameters as {section.section}.<name>=<value>"
    if unknown is None:
        return fix
    from hvdtrain.config.words_of_other_tools import right_key

    close = closest(unknown, known)
    right = right_key(section.full_key(unknown)) or (close and section.full_key(close))
    return f"did you mean {right}? {fix}" if right else fix


def shown_default(default: Any) -> str:
    """Formats a default as one would type it: `[16,32]`, `true`, nothing for null."""
    if default is None:
        return ""
    if isinstance(default, str):
        return default
    return json.dumps(default, separators=(",", ":"))
