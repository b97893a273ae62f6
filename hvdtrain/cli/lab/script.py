"""How the script of a lab begins and ends: its options, its folder, and no traceback for what a user can mend or for Ctrl-C."""

from __future__ import annotations

import argparse
import json
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from hvdtrain.cli.options import CommandParser
from hvdtrain.errors import DONE, UserError, short

STAMP = "lab.json"  # in the folder of a lab: which one, and with which options
_PLACES = ("out", "data_root")  # options that say where something is, not what is trained


class Parser(CommandParser):
    """The options of one lab."""

    def __init__(self, script: str, about: str | None, quick: str) -> None:
        """script: its file; about: its docstring; quick: what --quick leaves out."""
        self.number = Path(script).resolve().parent.name.partition("-")[0]
        command = f"hvdtrain lab {self.number}"
        more = f"{command} --notebook FILE.ipynb\n  writes the page as a Jupyter notebook, which runs the lab; trains nothing"
        formatter = argparse.RawDescriptionHelpFormatter
        about = (about or "").partition("\n")[0]
        super().__init__(f"lab {self.number}", add_help=True, description=about, epilog=more, formatter_class=formatter)
        self.add_argument("--quick", action="store_true", help=quick)
        folders = f"{self.folder(quick=False)}, with --quick {self.folder(quick=True)}"
        self.add_argument("--out", type=Path, metavar="FOLDER", help=f"for figures, tables and run folders (default: {folders})")

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
    """Makes the folder, or takes it up where the same lab ran in it with the same options. Raises UserError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        found = sorted(path.name for path in out.iterdir())
        before = (out / STAMP).read_text() if STAMP in found else ""
        if found and before != json.dumps(what):
            raise UserError(f"{out} holds {_shown(before, found)}", f"--out {out}", "another --out, or remove that folder")
        (out / STAMP).write_text(json.dumps(what))
    except OSError as error:
        raise UserError(f"cannot write in {short(str(out))}: {error.strerror}", "--out", "a folder that can be written") from None


def _shown(stamp: str, names: list[str]) -> str:
    return f"another run of a lab: {short(stamp)}" if stamp else f"other files, and no {STAMP}: {short(', '.join(names[:3]))}"


if __name__ == "__main__":  # python -m hvdtrain.cli.lab.script LAB.PY [OPTION ...]: Ctrl-C is quiet while the lab imports torch, too
    del sys.argv[0]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except KeyboardInterrupt:
        sys.exit(_interrupted("hvdtrain lab"))
