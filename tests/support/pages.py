"""Runs the code of a page of docs/ in page order, and compares its output with the output that the
page shows.

    ```python             run in one namespace, __main__, as the cells of a notebook are
    ```python script.py   written to that file (any language), for a later block to run
    ```sh                 run by bash
    ```text               what the block above it prints, in part: `...` stands for lines or for the
    rest of a line that are left out
    ```none               is shown only: what another program or another job prints

`python pages.py PAGE FOLDER` runs a page in a folder and writes the results there, as lines of JSON
in pages.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ranks import HANG_S, python

RESULTS = "pages.json"
TOLERANCE = 0.03  # of a loss or an accuracy on another machine, whose sums round differently
_FENCE = re.compile(r"^```(\w*) ?(\S*)$")
# differs from run to run
_TIMING = re.compile(r"\d+\.\d+(?= s\b)|[\d,]+(?= (?:images|samples|tokens)/s)")
# a line of hvdtrain: epoch, seconds, epoch s, images/s or samples/s
_EPOCH = re.compile(r"^( +\d+) +\d+\.\d +\d+\.\d +\d+ (?= )")
_NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d{4,}(?!\d)")  # a loss or an accuracy
_MPIRUN = f'mpirun() {{ timeout -k 5 {HANG_S:g} mpirun "$@"; }}\n'


@dataclass(frozen=True)
class Block:
    """One piece of code of a page."""

    number: int  # among all of the page, from 1
    line: int  # line of the page on which its text begins
    language: str
    file: str  # file that it is written to; empty if it is run
    text: str

    @property
    def name(self) -> str:
        return f"block {self.number} ({self.language}, line {self.line})"


@dataclass(frozen=True)
class Result:
    """The outcome of a block that was run."""

    number: int
    output: str  # standard output
    error: str  # empty if it succeeded
    seconds: float


def blocks(page: Path) -> list[Block]:
    """All blocks, in page order."""
    found: list[Block] = []
    opened: tuple[int, str, str] | None = None
    lines = page.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        if opened and line == "```":
            first, language, file = opened
            found.append(
                Block(
                    len(found) + 1,
                    first + 1,
                    language,
                    file,
                    "\n".join(lines[first : number - 1]) + "\n",
                )
            )
            opened = None
        elif not opened and (fence := _FENCE.match(line)):
            opened = (number, fence[1], fence[2])
    assert opened is None, f"{page}:{opened} is not closed"
    return found


def run_page(page: Path, folder: Path, *, is_warm: bool = True) -> dict[int, Result]:
    """Runs a page in a separate process, up to the first block that fails. Returns the outcome of
    each block by its number."""
    done = python([__file__, str(page.resolve()), str(folder)], is_warm=is_warm)
    path = folder / RESULTS
    results = [
        Result(**fields)
        for fields in map(json.loads, path.read_text().splitlines() if path.exists() else ())
    ]
    last = results[-1].number if results else 0
    assert done.returncode == 0, (
        f"{page.name}: exit code {done.returncode} behind block "
        f"{last}\n{done.stdout}\n{done.stderr}"
    )
    return {result.number: result for result in results}


def failures(page: Path, results: dict[int, Result]) -> list[str]:
    """A message for each block that failed, did not run, or printed something else than the page
    shows."""
    found_failures: list[str] = []
    before: Block | None = None
    for block in blocks(page):
        if block.language == "text":
            assert before and block.text.strip(), (
                f"{page.name}:{block.line}: output of nothing, or no output"
            )
            result = results.get(before.number)
            if result and not result.error:
                found_failures += [
                    f"{page.name}, output of {before.name}: {one}"
                    for one in differences(block.text, result.output)
                ]
        elif not block.file and block.language != "none":
            before = block
            if block.number not in results:
                found_failures.append(f"{page.name}, {block.name} did not run")
            elif error := results[block.number].error:
                found_failures.append(f"{page.name}, {block.name} failed:\n{error}")
    return found_failures


def differences(shown: str, output: str) -> list[str]:
    """A message for each line of the page that is not among the lines printed, in the same order.

    Times are not compared; losses and accuracies (numbers with four decimals or more) up to
    TOLERANCE; the rest exactly, except blanks.
    """
    found_failures: list[str] = []
    printed = output.splitlines()
    place = 0
    for line in filter(str.strip, shown.splitlines()):
        if line.strip() == "...":
            continue
        found = next((at for at in range(place, len(printed)) if _alike(line, printed[at])), None)
        if found is None:
            rest = "\n".join(printed[place:])
            found_failures.append(
                f"no line like\n  {line}\nin what was "
                f"printed{' after the line before it' * bool(place)}:\n{rest}"
            )
        else:
            place = found + 1
    return found_failures


def _alike(shown: str, printed: str) -> bool:
    if shown.endswith(" ..."):
        shown = shown.removesuffix(" ...")
        words = len(shown.split())
        printed = re.match(rf"\s*(?:\S+\s*){{0,{words}}}", printed)[0]  # type: ignore[index]
    shape, numbers = _parts(shown)
    printed_shape, printed_numbers = _parts(printed)
    return shape == printed_shape and all(
        abs(a - b) <= TOLERANCE for a, b in zip(numbers, printed_numbers, strict=True)
    )


def _parts(line: str) -> tuple[str, list[float]]:
    """The words of a line, without times and numbers, and its numbers that are compared."""
    line = _TIMING.sub(" # ", _EPOCH.sub(r"\1 # ", line))
    return " ".join(_NUMBER.sub(" = ", line).split()), [
        float(number) for number in _NUMBER.findall(line)
    ]


def _run(page: Path, folder: Path) -> None:
    """Runs a page in a folder, up to the first block that fails."""
    os.chdir(folder)
    sys.path[0] = str(folder)
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main  # a class of the page is then __main__:Net, as in a notebook
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with Path(RESULTS).open("w", buffering=1) as log:
        for block in blocks(page):
            if block.file:
                Path(block.file).write_text(block.text)
            elif block.language in ("python", "sh"):
                result = _run_block(block, page, main)
                print(json.dumps(asdict(result)), file=log)
                if result.error:
                    break


def _run_block(block: Block, page: Path, main: types.ModuleType) -> Result:
    start = time.monotonic()
    error = ""
    with _captured() as printed:
        if block.language == "sh":
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", _MPIRUN + block.text],
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
            error = f"exit code {done.returncode}\n{done.stderr}" * (done.returncode != 0)
        else:
            try:
                exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), vars(main))
            except BaseException:  # also the SystemExit of a job that failed
                error = traceback.format_exc()
    return Result(block.number, printed[0], error, round(time.monotonic() - start, 2))


@contextlib.contextmanager
def _captured() -> Iterator[list[str]]:
    """What this process and its children print inside, once it is over."""
    printed: list[str] = []
    kept = os.dup(1)
    with tempfile.TemporaryFile("w+") as stream:
        sys.stdout.flush()
        os.dup2(stream.fileno(), 1)
        try:
            yield printed
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)
            stream.seek(0)
            printed.append(stream.read())


if __name__ == "__main__":
    _run(Path(sys.argv[1]), Path(sys.argv[2]))
