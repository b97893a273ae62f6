"""Runs the tests of a copy without one extra, or without any: `without_extra.py [NAME|all] [--
ARGUMENTS OF PYTEST]`.

Without NAME it takes another extra each day. The copy has the files that git tracks, except for the
folders and the tests of the missing extras: the chosen one and those that need it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rotation import today

from hvdtrain.core.extras import Extra, extras, needed_first

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ROOT / "hvdtrain" / "extras"
ALL = "all"


def copy_without(missing: Sequence[str], target: Path) -> None:
    """Copies the files of this checkout, without those of some extras, and their rows of the
    page."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for file in map(Path, listed.splitlines()):
        if (ROOT / file).is_file() and not any(_is_of(each, file) for each in missing):
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, target / file)
    page = target / "docs" / "extras.md"
    lines = page.read_text().splitlines(keepends=True)
    rows = tuple(f"| `{each}` |" for each in missing)
    page.write_text("".join(line for line in lines if not line.startswith(rows)))


def needing(name: str, among: Mapping[str, Extra] | None = None) -> list[str]:
    """The extras that do not work without one, sorted: those that need it, and those that need
    these. among: all extras, if not those of this checkout."""
    every = extras() if among is None else among
    found = {name}
    for each in needed_first(every):
        if found & set(every[each].needs):
            found.add(each)
    return sorted(found - {name})


def _is_of(name: str, file: Path) -> bool:
    """Whether a file of this checkout does not work without an extra."""
    return (
        file.is_relative_to(f"hvdtrain/extras/{name}")
        or is_test_of(name, file)
        or _is_configuration_of(name, file)
    )


def is_test_of(name: str, file: Path) -> bool:
    """Whether a test has the name of the extra, or imports it."""
    if file.match(f"tests/extras/test_{name}*.py"):
        return True
    is_test = file.parts[0] == "tests" and file.suffix == ".py" and (ROOT / file).is_file()
    return is_test and f"hvdtrain.extras.{name}" in (ROOT / file).read_text()


def _is_configuration_of(name: str, file: Path) -> bool:
    """Whether a file of configs/ names a plugin or sets a key of the extra."""
    if file.parts[0] != "configs":
        return False
    text = (ROOT / file).read_text()
    plugins = [path.stem for path in (EXTRAS / name).glob("*/**/*.py")]
    plugins += [alias for aliases in extras()[name].aliases.values() for alias in aliases]
    return any(re.search(rf"^ +name: {plugin}\b", text, re.M) for plugin in plugins) or any(
        re.search(rf"^{section}:.*\n(?:[ #].*\n|\n)*?  {field}: ", text, re.M)
        for section, field in _keys_of(name)
    )


def _keys_of(name: str) -> list[tuple[str, str]]:
    """Section and name of each key that an extra adds, as its keys.py has them."""
    file = EXTRAS / name / "keys.py"
    found, section = [], ""
    for line in file.read_text().splitlines() if file.exists() else ():
        if a_section := re.match(r'    section = "(\w+)"', line):
            section = a_section[1]
        elif field := re.match(r"    (\w+): .+ = Field\(", line):
            found.append((section, field[1]))
    return found


def names_of_extras() -> list[str]:
    return sorted(path.parent.name for path in EXTRAS.glob("*/__init__.py"))


def main() -> int:
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    names = names_of_extras()
    asked = (sys.argv[1:split] or [names[today().toordinal() % len(names)]])[0]
    if asked not in (*names, ALL):
        print(f"there is no extra {asked}; there are: {', '.join(names)}; or {ALL}")
        return 2
    missing = names if asked == ALL else [asked, *needing(asked)]
    with tempfile.TemporaryDirectory() as folder:
        copy_without(missing, Path(folder))
        print(f"without {', '.join(missing)}", flush=True)
        environment = os.environ | {"PYTHONPATH": folder}
        command = [sys.executable, "-m", "pytest", "-q", *sys.argv[split + 1 :]]
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
