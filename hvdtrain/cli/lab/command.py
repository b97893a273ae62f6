"""hvdtrain lab: runs an experiment of the course, whose pages and scripts are in labs/ of the repository, or makes a notebook of it."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.cli.lab.child import start, wait
from hvdtrain.cli.lab.notebook import write_notebook
from hvdtrain.errors import DONE, UserError, short

USAGE = """\
hvdtrain lab             lists the labs
hvdtrain lab 1 [--quick] [--out FOLDER]
  --quick   smaller, in 0.3 to 1.2 minutes of two cores
  --out     figures, tables and run folders are written there (default: lab-1, with --quick lab-1-quick);
            the same command again goes on, or begins anew where the lab takes a minute
hvdtrain lab 1 --help
  all options of that lab
hvdtrain lab 1 --notebook FILE.ipynb
  the page as a Jupyter notebook, which runs the lab and shows its figures; trains nothing
each lab is a folder of labs/ with a page (README.md) that says what to see in its figures"""
_PATIENCE_S = 30.0  # after Ctrl-C; longer than the lab's own with its jobs


def lab(arguments: Sequence[str]) -> int:
    """Runs `lab`; returns the exit code. Raises UserError."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE)
        return DONE
    found = _labs()
    if not arguments:
        print("\n".join(f"{number}  {_title(folder)}\n   {folder / 'README.md'}" for number, folder in _pages(found)))
        return DONE
    folder = found.get(arguments[0])
    if folder is None:
        what = f"there is no lab {short(arguments[0])}"
        raise UserError(what, "command line of lab", f"hvdtrain lab {'|'.join(found)} [--quick] [--out FOLDER]")
    if any(argument.partition("=")[0] == "--notebook" for argument in arguments):
        return _notebook(arguments[0], folder, arguments[1:])
    return wait([start([sys.executable, "-m", "hvdtrain.cli.lab.script", str(folder / "lab.py"), *arguments[1:]])], _PATIENCE_S)[0]


def _notebook(number: str, folder: Path, options: Sequence[str]) -> int:
    given = options[0].split("=", 1) if len(options) == 1 else options  # --notebook=FILE, --notebook FILE
    if len(given) != 2 or given[0] != "--notebook" or not given[1].endswith(".ipynb"):
        raise UserError(
            "--notebook takes a file, and no other option", "command line of lab", f"hvdtrain lab {number} --notebook FILE.ipynb"
        )
    name = given[1]
    try:
        write_notebook(number, folder, Path(name))
    except FileExistsError:
        raise UserError(f"{short(name)} is there already", "--notebook", "another name; or remove it") from None
    except OSError as error:
        what = f"cannot write {short(name)}: {error.strerror or error}"
        raise UserError(what, "--notebook", "a file in a folder that exists") from None
    print(f"notebook: {name}\nopen it:  jupyter lab {shlex.quote(name)}")
    return DONE


def _pages(labs: Mapping[str, Path]) -> list[tuple[str, Path]]:
    """The labs by number, and the assessment, which no command runs."""
    return [*labs.items(), ("-", next(iter(labs.values())).parent / "assessment")]


def _labs() -> dict[str, Path]:
    """By number. Raises UserError where hvdtrain was installed without its repository."""
    root = Path(__file__).resolve().parents[3] / "labs"
    folders = {match[1]: path.parent for path in sorted(root.glob("*/lab.py")) if (match := re.match(r"(\d+)-", path.parent.name))}
    if not folders:
        what = "the labs are in the repository, not in the installed package"
        raise UserError(what, str(root), "clone the repository, and run `python -m hvdtrain lab` in it")
    return folders


def _title(folder: Path) -> str:
    return (folder / "README.md").read_text().partition("\n")[0].lstrip("# ")
