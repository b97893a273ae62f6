"""The options of a bench, and how its numbers are printed."""

from __future__ import annotations

import re

from hvdtrain.cli.options import CommandParser
from hvdtrain.errors import UserError, short

_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class BenchParser(CommandParser):
    """The options that all benches have. Other arguments belong to the configuration: use
    parse_known_args()."""

    def __init__(self, name: str) -> None:
        super().__init__(f"bench {name}", "hvdtrain bench --help")
        self.add_argument("--config")
        self.add_argument("--json")


def two_or_more(text: str) -> int:
    """Parses a count of rounds or steps, at least 2, because quartiles need two values. Raises
    UserError."""
    if not text.isascii() or not text.isdecimal() or not 2 <= int(text[:9]) <= 10**6:
        raise UserError(
            f"{short(text)} is not a number of rounds or steps",
            "--rounds, --steps",
            "give 2 or more",
        )
    return int(text)


def one_or_more(text: str) -> int:
    """Parses a count. Raises UserError."""
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise UserError(
            f"{text!r} is not a count", "--steps, --repeat, --per-node", "give 1 or more"
        )
    return int(text)


def read_rank_counts(text: str) -> list[int]:
    """Parses "4,1,2" to [1, 2, 4]. Raises UserError."""
    if not re.fullmatch("[1-9][0-9]{0,4}(,[1-9][0-9]{0,4})*", text):
        raise UserError(
            f"cannot read the numbers of ranks {text!r}", "--ranks", "give them as in --ranks 1,2,4"
        )
    return sorted({int(count) for count in text.split(",")})


def read_sizes(text: str) -> list[int]:
    """Parses "1KiB,100MB" to [1024, 100000000] bytes. Raises UserError."""
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


def format_seconds(seconds: float) -> str:
    """Formats seconds with three digits: 4.21 us, 183 ms."""
    if seconds >= 1:
        unit = "s"
        factor = 1.0
    elif seconds >= 1e-3:
        unit = "ms"
        factor = 1e3
    else:
        unit = "us"
        factor = 1e6
    return f"{seconds * factor:#.3g}".rstrip(".") + f" {unit}"


def format_bytes(size: int) -> str:
    """Formats bytes: 1024 as 1 KiB, 100000000 as 100 MB, 1000 as 1000 B."""
    for unit, factor in (
        ("GiB", 2**30),
        ("GB", 10**9),
        ("MiB", 2**20),
        ("MB", 10**6),
        ("KiB", 2**10),
    ):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"
