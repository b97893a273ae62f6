"""Digests of the user's modules and objects that a configuration names, to compare ranks. Nothing
is imported or run."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import numpy as np

from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.section import is_object
from hvdtrain.core.syntax_tree import syntax_tree

MOST_MODULES = 2000
_OWN = __name__.partition(".")[0]  # hvdtrain's own files have a separate digest


def named_modules(config: Config) -> list[str]:
    """Returns the user's classes that a configuration names, and the classes of objects that a
    script passes: package.module:Class."""
    sections = [
        section
        for section in (config.data, config.task, config.model, config.optim)
        if plugins.is_users_own(section)
    ]
    named = [section.name for section in sections if not is_object(section.name)]
    others = [
        name
        for name in (*config.hooks, config.recipe.function)
        if name is not None and not is_object(name)
    ]
    return [
        *named,
        *others,
        *sorted({path for thing in given_objects(config).values() for path in paths_of(thing)}),
    ]


def module_digests(names: Iterable[str]) -> dict[str, str]:
    """Returns import path -> digest of the file, for the modules of `names` (package.module:Class)
    and everything that their import statements reach.

    Installed packages (site-packages, pip install --target) have versions, so only the named module
    is digested. Modules that are not found are skipped: importing them reports the error. Imports
    with a computed name are not detected.
    """
    digests: dict[str, str] = {}
    waiting = [(module, True) for name in names for module in _parents(_module_of(name))]
    while waiting and len(digests) < MOST_MODULES:
        module, named = waiting.pop()
        path = _file(module)
        if module in digests or path is None or (not named and _is_installed(path)):
            continue
        try:
            source = path.read_bytes()
        except OSError:  # in a zip archive
            continue
        digests[module] = hashlib.sha256(source).hexdigest()[:12]
        if path.suffix == ".py" and not _is_installed(path):
            imported = _imports(source, module, is_package=path.name == "__init__.py")
            waiting += [(parent, False) for name in imported for parent in _parents(name)]
    return digests


def _module_of(name: str) -> str:
    """Returns "package.module" for "package.module:Class" and "package.module.Class"."""
    return name.partition(":")[0] if ":" in name else name.rpartition(".")[0]


def _parents(module: str) -> list[str]:
    """Returns ["a", "a.b", "a.b.c"] for "a.b.c": importing it imports them all."""
    parts = module.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))] if parts[0] != _OWN else []


def _file(module: str) -> Path | None:
    """Returns the file that import would find; None for a module without a file."""
    top, *below = module.split(".")
    if top == "__main__":
        origin = getattr(sys.modules["__main__"], "__file__", None)
        return Path(origin) if origin and not below else None
    try:
        spec = importlib.util.find_spec(top)  # finds a top-level module without importing anything
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not below:
        return Path(spec.origin) if spec.has_location and spec.origin else None
    for folder in spec.submodule_search_locations or ():
        path = Path(folder).joinpath(*below)
        for candidate in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if candidate.is_file():
                return candidate
    return None


def _is_installed(path: Path) -> bool:
    """Whether pip or Python itself installed it."""
    python = (Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
    if {"site-packages", "dist-packages"} & set(path.parts) or any(
        path.is_relative_to(folder) for folder in python
    ):
        return True
    folders = [Path(entry) for entry in sys.path if entry and path.is_relative_to(entry)]
    folder = max(folders, key=lambda entry: len(entry.parts), default=None)
    return folder is not None and path.relative_to(folder).parts[0].removesuffix(
        ".py"
    ) in _installed_in(folder)


@functools.cache
def _installed_in(folder: Path) -> frozenset[str]:
    """Packages and modules that `pip install --target` has put into a folder. A checkout that is
    installed as editable has no RECORD."""
    records = [record.read_text(errors="replace") for record in folder.glob("*.dist-info/RECORD")]
    return frozenset(
        line.partition("/")[0].partition(",")[0].removesuffix(".py")
        for record in records
        for line in record.splitlines()
    )


def _imports(source: bytes, module: str, *, is_package: bool) -> Iterator[str]:
    """Yields the modules that its import statements name, inside of functions too; `from a import
    b` may mean the module a.b."""
    try:
        tree = syntax_tree(source)
    except (SyntaxError, ValueError, RecursionError):  # importing it reports the error
        return
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            levels = (
                package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            )
            origin = ".".join([*filter(None, levels), *([node.module] if node.module else [])])
            if origin:
                yield origin
                yield from (f"{origin}.{alias.name}" for alias in node.names if alias.name != "*")
            else:
                yield from (alias.name for alias in node.names)


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # address of an object, which differs between processes
_MOST_DEPTH = 4  # limit for nested functions and lists


def given_objects(config: Config) -> dict[str, Any]:
    """Returns the script's objects, by their names in messages; data have their own digests."""
    sections = (config, config.data, config.task, config.model, config.optim, config.recipe)
    given = [section.given for section in sections if section.given is not None]
    return {
        name: thing for one in given for name, thing in one.objects.items() if thing is not None
    }


def object_digests(config: Config) -> dict[str, str]:
    """Returns short digests of the script's objects; state that cannot be compared, such as values
    that are not numbers, is skipped."""
    return {
        f"the {name} of the script": _digest(thing) for name, thing in given_objects(config).items()
    }


def paths_of(thing: Any) -> set[str]:
    """Returns package.module:Class of an object's class, of all modules of a torch module, and of
    functions."""
    things: Iterable[Any] = thing.modules() if plugins.is_torch_module(thing) else [thing]
    return {
        f"{kind.__module__}:{kind.__qualname__}"
        for kind in map(_named, things)
        if getattr(kind, "__module__", None)
    }


def _named(thing: Any) -> Any:
    """Returns the thing itself if it is a function or a class, else its class."""
    if isinstance(thing, functools.partial):
        return _named(thing.func)
    return thing if hasattr(thing, "__qualname__") else type(thing)


def _digest(thing: Any) -> str:
    return hashlib.sha256(repr(list(_parts(thing, _MOST_DEPTH))).encode()).hexdigest()[:12]


def _parts(thing: Any, depth: int) -> Iterator[Any]:
    """Yields plain values that identify a thing, the same in every process."""
    if thing is None or isinstance(thing, (bool, int, float, complex, str, bytes)):
        yield repr(thing)
    elif depth and isinstance(thing, (list, tuple)):
        for inner in thing:
            yield list(_parts(inner, depth - 1))
    elif depth and isinstance(thing, dict):
        for key, inner in thing.items():
            yield (
                key if isinstance(key, str) else type(key).__name__,
                list(_parts(inner, depth - 1)),
            )
    elif isinstance(thing, functools.partial):
        yield [list(_parts(inner, depth)) for inner in (thing.func, thing.args, thing.keywords)]
    elif plugins.is_torch_module(thing):
        yield _ADDRESS.sub("", repr(thing))
        yield [
            (name, _shape(array), str(array.dtype)) for name, array in thing.state_dict().items()
        ]
        yield [sorted(_plain(module).items()) for module in thing.modules()]
    elif isinstance(thing, (type, ModuleType)):  # jax.numpy has a shape and a dtype, as arrays have
        yield getattr(thing, "__module__", ""), getattr(thing, "__qualname__", thing.__name__)
    elif isinstance(getattr(thing, "__code__", None), CodeType):
        yield thing.__qualname__, list(_code(thing.__code__))
        if depth:
            cells = [cell.cell_contents for cell in thing.__closure__ or () if cell != type(cell)()]
            cells = [inner for inner in cells if not isinstance(inner, str)]
            yield [
                list(_parts(inner, depth - 1))
                for inner in (thing.__defaults__, thing.__kwdefaults__, cells)
            ]
    elif hasattr(thing, "shape") and hasattr(thing, "dtype"):
        yield _array(thing)
    else:
        yield _named(thing).__module__, _named(thing).__qualname__, sorted(_plain(thing).items())


def _plain(thing: Any) -> dict[str, str]:
    """Returns the numeric settings of an object; strings such as "cuda:1" may legitimately
    differ."""
    found = getattr(thing, "__dict__", {})
    return {
        str(name): repr(value)
        for name, value in found.items()
        if isinstance(value, (bool, int, float)) and name != "training"
    }


def _code(code: CodeType) -> Iterator[Any]:
    """Yields the values of a code object, without line numbers: these are compared with the
    file."""
    yield code.co_code, code.co_names
    for constant in code.co_consts:
        yield (
            list(_code(constant))
            if isinstance(constant, CodeType)
            else _ADDRESS.sub("", repr(constant))
        )


def _shape(array: Any) -> tuple[int, ...]:
    """Returns the shape; empty for a parameter of a lazy layer, which has none yet."""
    try:
        return tuple(array.shape)
    except RuntimeError:
        return ()


def _array(thing: Any) -> Any:
    """Returns what identifies a NumPy array, or a tensor in host memory."""
    try:
        array = np.ascontiguousarray(thing)
        if array.dtype.hasobject:  # its bytes are addresses
            return array.dtype.str, array.shape
        return array.dtype.str, array.shape, hashlib.sha256(array.tobytes()).hexdigest()[:12]
    except (TypeError, ValueError, RuntimeError):
        return str(thing.dtype), tuple(thing.shape)
