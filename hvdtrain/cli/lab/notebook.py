"""A lab's page as a Jupyter notebook: a cell runs the lab, and where the page shows a figure a cell shows the reader's own."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_FIGURE = re.compile(r"^!\[[^]]*\]\(([\w-]+\.png)\)\n", re.MULTILINE)
_LINK = re.compile(r"\]\((?!\w+:|#)([^)]+)\)")


class Cell(NamedTuple):
    kind: Literal["markdown", "code"]
    text: str


def write_notebook(number: str, folder: Path, to: Path) -> None:
    """`to` is for the folder in which it is written: links and imports are relative to it.

    Raises FileExistsError: it may have a reader's work.
    """
    with to.open("x") as file:
        file.write(json.dumps(notebook(cells(number, folder, to.resolve().parent)), indent=1, ensure_ascii=False) + "\n")


def cells(number: str, folder: Path, beside: Path) -> Iterator[Cell]:
    """The page of `folder`, whose first block of commands becomes the cell that runs the lab; blocks of Python are cells as they are."""
    page = (folder / "README.md").read_text()
    to_folder = Path(os.path.relpath(folder, beside)).as_posix()
    imports = ["import sys", "", "from IPython.display import Image", "", f'sys.path.insert(0, "{to_folder}")  # lab.py']
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
            yield Cell("markdown", _LINK.sub(lambda link: f"]({_relative(link[1], to_folder)})", text))


def _pieces(page: str) -> Iterator[tuple[bool, str]]:
    """(is code, text): the commands, figures and Python of the page, and the text between them."""
    begin, commands = 0, 0
    for found in sorted([*_FENCE.finditer(page), *_FIGURE.finditer(page)], key=lambda match: match.start()):
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
    """A notebook as nbformat 4.5 has it."""
    written: list[dict[str, Any]] = []
    for index, cell in enumerate(all_cells):
        found = {"cell_type": cell.kind, "id": f"cell-{index}", "metadata": {}, "source": cell.text.splitlines(keepends=True)}
        written.append(found | ({"execution_count": None, "outputs": []} if cell.kind == "code" else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": written, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
