"""Which hosts are offered to a job: a fixed list, a file, or what a program prints; read again and again."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hvdtrain.cli.launch.launcher_commands import Host, read_hostfile
from hvdtrain.errors import UserError, short

SCRIPT_S = 10.0  # that the program may take
_LARGEST_BYTES = 2**24
_SCRIPT_FIX = "a program that prints a host in each line, as n1:4, and ends with 0 within 10 s"


class Offer(NamedTuple):
    """read(): the hosts that are offered now; may be none. It raises UserError where that cannot be told."""

    read: Callable[[], tuple[Host, ...]]
    is_local: bool = False  # this machine alone, without its name


def fixed(hosts: tuple[Host, ...]) -> Offer:
    return Offer(lambda: hosts)


def this_machine(ranks: int) -> Offer:
    return Offer(lambda: (Host("this machine", ranks),), is_local=True)


def of_file(path: Path) -> Offer:
    def read() -> tuple[Host, ...]:
        try:
            with path.open(encoding="utf-8") as file:
                return read_lines(file.read(_LARGEST_BYTES), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the hosts: {error}", "--hostfile", "a text file with a host in each line: n1 slots=4") from None

    return Offer(read)


def of_script(path: Path) -> Offer:
    """Raises UserError where there is no such program. It is started without a shell and without arguments."""
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise UserError(f"there is no program {path}", "--hosts-from", f"{_SCRIPT_FIX}: chmod +x")

    def read() -> tuple[Host, ...]:
        try:
            done = subprocess.run([path.absolute()], stdin=subprocess.DEVNULL, capture_output=True, timeout=SCRIPT_S, check=False)
        except subprocess.TimeoutExpired:
            raise UserError(f"the program did not end within {SCRIPT_S:g} s", f"--hosts-from {path}", _SCRIPT_FIX) from None
        except OSError as error:
            raise UserError(f"cannot run the program: {error}", f"--hosts-from {path}", _SCRIPT_FIX) from None
        if done.returncode:
            last = (done.stderr.decode(errors="replace").splitlines() or ["no message"])[-1]
            raise UserError(f"the program ended with {done.returncode}: {short(last)}", f"--hosts-from {path}", _SCRIPT_FIX)
        return read_lines(done.stdout[:_LARGEST_BYTES].decode(errors="replace"), f"--hosts-from {path}")

    return Offer(read)


def read_lines(text: str, where: str) -> tuple[Host, ...]:
    """Hosts in lines of a hostfile, which may have none just now. Raises UserError."""
    lines = text.splitlines()
    return read_hostfile(lines, where) if any(line.partition("#")[0].strip() for line in lines) else ()
