"""The import graph of hvdtrain: `python tests/support/import_graph.py` prints each package with the
packages it imports, top floor first.

With --mermaid the same as a diagram for docs/design.md. The exit code is 1 if an arrow points up or
is part of a cycle. Imports inside functions and under TYPE_CHECKING count like all others; a plugin
that is loaded by its name is no import.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from hvdtrain.core.extras import extras

ROOT = Path(__file__).resolve().parents[2] / "hvdtrain"

FLOORS = (  # lowest first; a module imports its own package and packages on lower floors
    ("errors", "version"),
    ("core",),
    ("config",),
    ("comm", "data", "events", "optim", "recipe"),
    ("tasks", "records", "horovod"),
    ("features",),
    ("frameworks",),
    ("training",),
    ("cli", "context"),
    ("api",),
    ("__init__", "__main__"),
    ("extras",),  # nothing may import them: they are found by listing their folder
)
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}


def module_of(path: Path) -> str:
    """hvdtrain/training/loop.py -> training.loop; hvdtrain/training/__init__.py -> training;
    hvdtrain/__init__.py -> __init__."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_of(path): path for path in sorted(ROOT.rglob("*.py"))}


@functools.cache
def imported_names(path: Path) -> set[str]:
    """Everything that a file imports, absolute and dotted: package.module and
    package.module.name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@functools.cache
def imported_modules(path: Path) -> set[str]:
    """The modules of hvdtrain that a file imports."""
    found = set()
    for name in imported_names(path):
        package, _, inner = name.partition(".")
        if package != "hvdtrain":
            continue
        parts = inner.split(".") if inner else []
        while parts and ".".join(parts) not in MODULES:
            parts.pop()
        found.add(".".join(parts) or "__init__")
    return found


def package_of(module: str) -> str:
    """training.health.monitor -> training.health; training.loop -> training; errors -> errors."""
    is_package = MODULES[module].name == "__init__.py" and module != "__init__"
    return module if is_package or "." not in module else module.rpartition(".")[0]


def top_of(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


def arrows() -> dict[str, set[str]]:
    """module -> the modules that it imports."""
    return {module: imported_modules(path) - {module} for module, path in MODULES.items()}


def package_arrows(*, top: bool) -> dict[str, set[str]]:
    """package -> the packages that it imports: whole top-level packages, or each folder by
    itself."""
    name = top_of if top else package_of
    graph: dict[str, set[str]] = defaultdict(set)
    for module, targets in arrows().items():
        graph[name(module)] |= {name(target) for target in targets} - {name(module)}
    return dict(graph)


def extra_of(module: str) -> str | None:
    """extras.sweep.command -> sweep; None for a module of no extra."""
    top, _, inner = module.partition(".")
    return inner.partition(".")[0] or None if top == "extras" else None


def other_extras() -> dict[str, dict[str, str]]:
    """extra -> the other extras that its files import or name in a text -> one such file."""
    files = {path: extra_of(module) for module, path in MODULES.items()}
    files |= dict.fromkeys(sorted((ROOT.parent / "labs").rglob("*.py")), "lab")  # it runs them
    found: dict[str, dict[str, str]] = {name: {} for name in extras()}
    for path, extra in files.items():
        if extra in found:
            names = set(re.findall(r"\bhvdtrain\.extras\.(\w+)", path.read_text()))
            name = str(path.relative_to(ROOT.parent))
            found[extra] |= dict.fromkeys(names - {extra}, name)
    return found


def between_extras() -> list[str]:
    """Where the extras that an extra uses are not those that it needs: a copy without one would not
    work."""
    wrong = []
    for name, others in other_extras().items():
        needs = extras()[name].needs
        wrong += [
            f"{file} uses {other}, which is not in `needs` of the extra {name}"
            for other, file in sorted(others.items())
            if other not in needs
        ]
        wrong += [
            f"the extra {name} needs {other}, but does not use it"
            for other in needs
            if other not in others
        ]
    return wrong


def upward() -> list[str]:
    """Imports of a package on the same floor or above."""
    return [
        f"{module} (floor {FLOOR[top_of(module)]}) imports {target} (floor {FLOOR[top_of(target)]})"
        for module, targets in arrows().items()
        for target in sorted(targets)
        if top_of(target) != top_of(module) and FLOOR[top_of(target)] >= FLOOR[top_of(module)]
    ]


def circle(graph: dict[str, set[str]]) -> list[str]:
    """One circle of a graph, or nothing."""
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def mermaid() -> str:
    """The top-level packages as a diagram; an arrow that follows from two others is left out."""
    graph = package_arrows(top=True)
    lines = ["graph TD"]
    for package in sorted(graph, key=lambda name: -FLOOR[name]):
        targets = graph[package] - {"errors", "version"}
        indirect = {below for target in targets for below in reachable(graph, target)}
        lines += [f"  {package} --> {target}" for target in sorted(targets - indirect)]
    return "\n".join(lines)


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Every package below one."""
    return {below for target in graph[start] for below in {target} | reachable(graph, target)}


def main() -> int:
    if "--mermaid" in sys.argv:
        print(mermaid())
        return 0
    graph = package_arrows(top=False)
    for package in sorted(graph, key=lambda name: (-FLOOR[top_of(name)], name)):
        print(
            f"{FLOOR[top_of(package)]}  {package:30} -> "
            f"{', '.join(sorted(graph[package])) or 'nothing'}"
        )
    count = sum(len(targets) for targets in graph.values())
    wrong = [
        *upward(),
        *between_extras(),
        *(f"a circle: {' -> '.join(ring)}" for ring in (circle(arrows()), circle(graph)) if ring),
    ]
    print(
        f"\n{len(MODULES)} modules, {len(graph)} packages, {count} arrows between packages; "
        f"upward or in a circle: {len(wrong)}"
    )
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
