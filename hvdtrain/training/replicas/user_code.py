"""Digests of the user's modules that a configuration names, and of those that they import; nothing is imported or run for it."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from hvdtrain.config import plugins
from hvdtrain.config.given import is_object
from hvdtrain.config.schema import Config
from hvdtrain.training.replicas.given_objects import given_objects, paths_of

MOST_MODULES = 2000
_OWN = __name__.partition(".")[0]  # hvdtrain's own files have a digest of their own


def named_modules(config: Config) -> list[str]:
    """The user's classes that a configuration names, and those of the objects that a script gives: package.module:Class."""
    sections = [section for section in (config.data, config.task, config.model, config.optim) if plugins.is_users_own(section)]
    named = [section.name for section in sections if not is_object(section.name)]
    return [*named, *sorted({path for thing in given_objects(config).values() for path in paths_of(thing)})]


def module_digests(names: Iterable[str]) -> dict[str, str]:
    """import path -> digest of its file, of the modules of `names` (package.module:Class) and of all that their import statements reach.

    Packages that are installed (site-packages) have versions: of them only the named module is digested. A module that is not found is
    left out: importing it reports it. Imports whose name is computed are not seen.
    """
    found: dict[str, str] = {}
    waiting = [(module, True) for name in names for module in _parents(_module_of(name))]
    while waiting and len(found) < MOST_MODULES:
        module, named = waiting.pop()
        path = _file(module)
        if module in found or path is None or (not named and _is_installed(path)):
            continue
        try:
            source = path.read_bytes()
        except OSError:  # in a zip archive
            continue
        found[module] = hashlib.sha256(source).hexdigest()[:12]
        if path.suffix == ".py" and not _is_installed(path):
            imported = _imports(source, module, is_package=path.name == "__init__.py")
            waiting += [(parent, False) for name in imported for parent in _parents(name)]
    return found


def _module_of(name: str) -> str:
    """ "package.module:Class" and "package.module.Class" -> "package.module" """
    return name.partition(":")[0] if ":" in name else name.rpartition(".")[0]


def _parents(module: str) -> list[str]:
    """ "a.b.c" -> ["a", "a.b", "a.b.c"]: importing it imports them all."""
    parts = module.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))] if parts[0] != _OWN else []


def _file(module: str) -> Path | None:
    """Where import would find it; None for a module without a file."""
    top, *below = module.split(".")
    if top == "__main__":
        origin = getattr(sys.modules["__main__"], "__file__", None)
        return Path(origin) if origin and not below else None
    try:
        spec = importlib.util.find_spec(top)  # of a top-level module: finds it, and imports nothing
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
    """Whether pip or Python itself brought it."""
    python = (Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
    return bool({"site-packages", "dist-packages"} & set(path.parts)) or any(path.is_relative_to(folder) for folder in python)


def _imports(source: bytes, module: str, *, is_package: bool) -> Iterator[str]:
    """The modules that its import statements name, inside of functions too; `from a import b` may mean the module a.b."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # importing it reports the error
        return
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            levels = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*filter(None, levels), *([node.module] if node.module else [])])
            if origin:
                yield origin
                yield from (f"{origin}.{alias.name}" for alias in node.names if alias.name != "*")
            else:
                yield from (alias.name for alias in node.names)
