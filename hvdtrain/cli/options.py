"""The options of a command, whose mistakes are UserErrors, and the types of their values."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from hvdtrain.errors import UserError, short


class CommandParser(argparse.ArgumentParser):
    """Raises UserError for a command line that it cannot read. A name has to be whole, and --help
    belongs to the command."""

    def __init__(self, command: str, fix: str = "", **more: Any) -> None:
        """command: its words after hvdtrain; fix: what to do after a mistake; more: of
        ArgumentParser."""
        super().__init__(
            prog=f"hvdtrain {command}", allow_abbrev=False, **{"add_help": False, **more}
        )
        self.where = f"command line of {command}"
        self._fix = fix or f"hvdtrain {command} --help shows its options"

    def error(self, message: str) -> NoReturn:
        raise UserError(message, self.where, self._fix)

    def names(self) -> list[str]:
        """All options, as they are written."""
        return [name for action in self._actions for name in action.option_strings]


_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class BenchParser(CommandParser):
    """The options that all benches have. What it does not know belongs to the configuration: use
    parse_known_args()."""

    def __init__(self, name: str) -> None:
        super().__init__(f"bench {name}", "hvdtrain bench --help")
        self.add_argument("--config")
        self.add_argument("--json")


def two_or_more(text: str) -> int:
    """A count of rounds or steps: quartiles need two values. Raises UserError."""
    if not text.isascii() or not text.isdecimal() or not 2 <= int(text[:9]) <= 10**6:
        raise UserError(
            f"{short(text)} is not a number of rounds or steps",
            "--rounds, --steps",
            "give 2 or more",
        )
    return int(text)


def one_or_more(text: str) -> int:
    """A count. Raises UserError."""
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise UserError(
            f"{text!r} is not a count", "--steps, --repeat, --per-node", "give 1 or more"
        )
    return int(text)


def read_rank_counts(text: str) -> list[int]:
    """ "4,1,2" -> [1, 2, 4]. Raises UserError."""
    if not re.fullmatch("[1-9][0-9]{0,4}(,[1-9][0-9]{0,4})*", text):
        raise UserError(
            f"cannot read the numbers of ranks {text!r}", "--ranks", "give them as in --ranks 1,2,4"
        )
    return sorted({int(count) for count in text.split(",")})


def read_sizes(text: str) -> list[int]:
    """ "1KiB,100MB" -> [1024, 100000000] bytes. Raises UserError."""
    sizes = set()
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)\s*(|B|[KMG]i?B)", item.strip(), re.ASCII | re.IGNORECASE)
        size = int(match[1]) * _BYTES[match[2].upper() or "B"] if match else 0
        if not size:
            raise UserError(
                f"cannot read the size {item!r}",
                "--sizes",
                "give bytes, as in --sizes 64,1KiB,4MiB,100MB",
            )
        sizes.add(size)
    return sorted(sizes)
