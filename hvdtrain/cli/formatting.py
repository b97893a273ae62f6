"""Numbers and tables as people read them."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def format_seconds(seconds: float) -> str:
    """Three digits: 4.21 us, 183 ms"""
    if seconds >= 1:
        unit, factor = "s", 1.0
    elif seconds >= 1e-3:
        unit, factor = "ms", 1e3
    else:
        unit, factor = "us", 1e6
    return f"{seconds * factor:#.3g}".rstrip(".") + f" {unit}"


def format_bytes(size: int) -> str:
    """1024 -> 1 KiB, 100000000 -> 100 MB, 1000 -> 1000 B"""
    for unit, factor in (("GiB", 2**30), ("GB", 10**9), ("MiB", 2**20), ("MB", 10**6), ("KiB", 2**10)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def plural(count: int, noun: str) -> str:
    """1 rank, 2 ranks"""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def align(rows: Sequence[Sequence[str]], left: Collection[int] = (0,), gap: str = "  ", least: Sequence[int] = ()) -> list[str]:
    """One line for each row, whose cells are as wide as their column.

    left: the columns that are aligned to the left, all others to the right; least: the smallest widths of the first columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[: len(least)] = map(max, widths, least)
    sides = [str.ljust if column in left else str.rjust for column in range(len(widths))]
    return [gap.join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)).rstrip() for row in rows]
