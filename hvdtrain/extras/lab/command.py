"""hvdtrain lab: runs an experiment of the course in the repository's labs/ folder, or converts it
to a notebook."""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, NoReturn

from hvdtrain.cli.options import CommandParser
from hvdtrain.core.process import start_child
from hvdtrain.errors import DONE, UserError, short

USAGE = """\
hvdtrain lab             lists the labs
hvdtrain lab 1 [--quick] [--out FOLDER]
  --quick   smaller, in 0.3 to 1.2 minutes of two cores
  --out     figures, tables and run folders are written there (default: lab-1, with --quick lab-1-quick);
            the same command resumes a lab, or starts it again if it takes only a minute
hvdtrain lab 1 --help
  all options of that lab
hvdtrain lab 1 --notebook FILE.ipynb
  the page as a Jupyter notebook, which runs the lab and shows its figures; trains nothing
each lab is a folder of labs/ with a page (README.md) that says what to see in its figures"""  # noqa: E501
_LAB_PATIENCE_S = 30.0  # after Ctrl-C; longer than a lab waits for its jobs


def lab(arguments: Sequence[str]) -> int:
    """Runs `lab`; returns the exit code. Raises UserError."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE)
        return DONE
    found = _labs()
    if not arguments:
        print(
            "\n".join(
                f"{number}  {_title(folder)}\n   {folder / 'README.md'}"
                for number, folder in _pages(found)
            )
        )
        return DONE
    folder = found.get(arguments[0])
    if folder is None:
        what = f"there is no lab {short(arguments[0])}"
        raise UserError(
            what, "command line of lab", f"hvdtrain lab {'|'.join(found)} [--quick] [--out FOLDER]"
        )
    if any(argument.partition("=")[0] == "--notebook" for argument in arguments):
        return _notebook(arguments[0], folder, arguments[1:])
    return wait_for(
        [
            start_process(
                [
                    sys.executable,
                    "-m",
                    "hvdtrain.extras.lab.command",
                    str(folder / "lab.py"),
                    *arguments[1:],
                ]
            )
        ],
        _LAB_PATIENCE_S,
    )[0]


def _notebook(number: str, folder: Path, options: Sequence[str]) -> int:
    # --notebook=FILE, --notebook FILE
    given = options[0].split("=", 1) if len(options) == 1 else options
    if len(given) != 2 or given[0] != "--notebook" or not given[1].endswith(".ipynb"):
        raise UserError(
            "--notebook takes a file, and no other option",
            "command line of lab",
            f"hvdtrain lab {number} --notebook FILE.ipynb",
        )
    name = given[1]
    try:
        write_notebook(number, folder, Path(name))
    except FileExistsError:
        raise UserError(
            f"{short(name)} already exists", "--notebook", "another name; or remove it"
        ) from None
    except OSError as error:
        what = f"cannot write {short(name)}: {error.strerror or error}"
        raise UserError(what, "--notebook", "a file in a folder that exists") from None
    print(f"notebook: {name}\nopen it:  jupyter lab {shlex.quote(name)}")
    return DONE


def _pages(labs: Mapping[str, Path]) -> list[tuple[str, Path]]:
    """Returns the labs by number, and the assessment, which no command runs."""
    return [*labs.items(), ("-", next(iter(labs.values())).parent / "assessment")]


def _labs() -> dict[str, Path]:
    """Returns the labs by number. Raises UserError if hvdtrain was installed without its
    repository."""
    root = Path(__file__).resolve().parents[3] / "labs"
    folders = {
        match[1]: path.parent
        for path in sorted(root.glob("*/lab.py"))
        if (match := re.match(r"(\d+)-", path.parent.name))
    }
    if not folders:
        what = "the labs are in the repository, not in the installed package"
        raise UserError(
            what, str(root), "clone the repository, and run `python -m hvdtrain lab` in it"
        )
    return folders


def _title(folder: Path) -> str:
    return (folder / "README.md").read_text().partition("\n")[0].lstrip("# ")


PATIENCE_S = 20.0  # a job writes a checkpoint first
KILL_S = 3.0  # from SIGTERM to SIGKILL
Process = subprocess.Popen[bytes]


def start_process(
    command: Sequence[str],
    output: IO[bytes] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Process:
    """Starts a process. output: receives its standard output and error."""
    return start_child(
        command, os.environ if environ is None else environ, signal.SIGTERM, output=output
    )


def wait_for(processes: Sequence[Process], patience_s: float = PATIENCE_S) -> list[int]:
    """Waits and returns the exit codes, 128 + N if signal N ended a process. After Ctrl-C, raises
    KeyboardInterrupt when all have ended."""
    try:
        codes = [process.wait() for process in processes]
    except KeyboardInterrupt:
        for process in _running(processes, patience_s):
            process.terminate()
        for process in _running(processes, KILL_S):
            process.kill()
        raise
    return [code if code >= 0 else 128 - code for code in codes]


def _running(processes: Sequence[Process], most_s: float) -> list[Process]:
    """Returns the processes that are still running after most_s seconds."""
    until_s = time.monotonic() + most_s
    while (
        running := [process for process in processes if process.poll() is None]
    ) and time.monotonic() < until_s:
        time.sleep(0.02)
    return running


_FENCE = re.compile(r"^```(\w*)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_FIGURE = re.compile(r"^!\[[^]]*\]\(([\w-]+\.png)\)\n", re.MULTILINE)
_LINK = re.compile(r"\]\((?!\w+:|#)([^)]+)\)")


class Cell(NamedTuple):
    kind: Literal["markdown", "code"]
    text: str


def write_notebook(number: str, folder: Path, to: Path) -> None:
    """Writes a lab as a notebook to `to`, whose folder links and imports are relative to.

    Raises FileExistsError, because the file may contain a reader's work.
    """
    with to.open("x") as file:
        file.write(
            json.dumps(
                notebook(cells(number, folder, to.resolve().parent)), indent=1, ensure_ascii=False
            )
            + "\n"
        )


def cells(number: str, folder: Path, beside: Path) -> Iterator[Cell]:
    """Returns the cells of the page in `folder`. Its first block of commands becomes the cell that
    runs the lab; Python blocks become cells unchanged."""
    page = (folder / "README.md").read_text()
    to_folder = Path(os.path.relpath(folder, beside)).as_posix()
    imports = [
        "import sys",
        "",
        "from IPython.display import Image",
        "",
        f'sys.path.insert(0, "{to_folder}")  # lab.py',
    ]
    run = [
        'quick = "--quick"  # "" for the whole lab',
        f'out = "lab-{number}-quick" if quick else "lab-{number}"',
        f"!{{sys.executable}} -m hvdtrain lab {number} {{quick}} --out {{out}}",
        "assert _exit_code == 0",
    ]
    is_run = False
    for is_code, text in _pieces(page):
        if is_code and not is_run:
            is_run = True
            yield Cell("code", "\n".join(imports))
            yield Cell("code", "\n".join([*(f"# {line}" for line in text.splitlines()), *run]))
        elif is_code and text.endswith(".png"):
            yield Cell("code", f'Image(f"{{out}}/{text}")')
        elif is_code:
            yield Cell("code", text.replace(f'"lab-{number}/', 'f"{out}/'))
        else:
            yield Cell(
                "markdown", _LINK.sub(lambda link: f"]({_relative(link[1], to_folder)})", text)
            )


def _pieces(page: str) -> Iterator[tuple[bool, str]]:
    """Yields (is code, text): the commands, figures and Python of the page, and the text between
    them."""
    begin = 0
    commands = 0
    for found in sorted(
        [*_FENCE.finditer(page), *_FIGURE.finditer(page)], key=lambda match: match.start()
    ):
        is_fence = found.re is _FENCE
        commands += is_fence and found[1] == "bash"
        if is_fence and found[1] != "python" and not (found[1] == "bash" and commands == 1):
            continue
        if text := page[begin : found.start()].strip():
            yield False, text
        yield True, found[2].strip() if is_fence else found[1]
        begin = found.end()
    if text := page[begin:].strip():
        yield False, text


def _relative(target: str, to_folder: str) -> str:
    return Path(os.path.normpath(f"{to_folder}/{target}")).as_posix()


def notebook(all_cells: Iterator[Cell]) -> dict[str, Any]:
    """Returns a notebook in nbformat 4.5."""
    written: list[dict[str, Any]] = []
    for index, cell in enumerate(all_cells):
        found = {
            "cell_type": cell.kind,
            "id": f"cell-{index}",
            "metadata": {},
            "source": cell.text.splitlines(keepends=True),
        }
        written.append(
            found | ({"execution_count": None, "outputs": []} if cell.kind == "code" else {})
        )
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": written,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


STAMP = "lab.json"  # in the folder of a lab: its number and options
_PLACES = ("out", "data_root")  # options for locations, which do not affect the training


class Parser(CommandParser):
    """The options of one lab."""

    def __init__(self, script: str, about: str | None, quick: str) -> None:
        """script: its file; about: its docstring; quick: what --quick skips."""
        self.number = Path(script).resolve().parent.name.partition("-")[0]
        command = f"hvdtrain lab {self.number}"
        more = (
            f"{command} --notebook FILE.ipynb\n  writes the page as a Jupyter notebook, which "
            "runs the lab; trains nothing"
        )
        formatter = argparse.RawDescriptionHelpFormatter
        about = (about or "").partition("\n")[0]
        super().__init__(
            f"lab {self.number}",
            add_help=True,
            description=about,
            epilog=more,
            formatter_class=formatter,
        )
        self.add_argument("--quick", action="store_true", help=quick)
        folders = f"{self.folder(quick=False)}, with --quick {self.folder(quick=True)}"
        self.add_argument(
            "--out",
            type=Path,
            metavar="FOLDER",
            help=f"for figures, tables and run folders (default: {folders})",
        )

    def folder(self, quick: bool) -> Path:
        return Path(f"lab-{self.number}{'-quick' if quick else ''}")


def run_lab(main: Callable[[argparse.Namespace], None], parser: Parser) -> NoReturn:
    """Runs the lab with the options of the command line, and exits."""
    sys.exit(_exit_code(main, parser))


def _exit_code(main: Callable[[argparse.Namespace], None], parser: Parser) -> int:
    try:
        options = parser.parse_args()
        options.out = options.out or parser.folder(options.quick)
        what = {name: value for name, value in vars(options).items() if name not in _PLACES}
        take_folder(options.out, {"lab": parser.number, **what})
        main(options)
        return DONE
    except UserError as error:
        print(f"hvdtrain: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return _interrupted(parser.prog)


def _interrupted(program: str) -> int:
    print(f"{program}: interrupted; the same command finishes it", file=sys.stderr)
    return 128 + signal.SIGINT


def take_folder(out: Path, what: dict[str, Any]) -> None:
    """Creates the folder, or reuses it if the same lab ran in it with the same options. Raises
    UserError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        found = sorted(path.name for path in out.iterdir())
        before = (out / STAMP).read_text() if STAMP in found else ""
        if found and before != json.dumps(what):
            raise UserError(
                f"{out} contains {_shown(before, found)}",
                f"--out {out}",
                "another --out, or remove that folder",
            )
        (out / STAMP).write_text(json.dumps(what))
    except OSError as error:
        raise UserError(
            f"cannot write in {short(str(out))}: {error.strerror}",
            "--out",
            "a folder that can be written",
        ) from None


def _shown(stamp: str, names: list[str]) -> str:
    return (
        f"another run of a lab: {short(stamp)}"
        if stamp
        else f"other files, and no {STAMP}: {short(', '.join(names[:3]))}"
    )


if __name__ == "__main__":
    # python -m hvdtrain.extras.lab.command LAB.PY [OPTION ...]: Ctrl-C is quiet while the lab
    # imports torch, too
    del sys.argv[0]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except KeyboardInterrupt:
        sys.exit(_interrupted("hvdtrain lab"))
