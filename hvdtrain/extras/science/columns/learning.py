"""What is learned of the training rows of a table: the kinds of its columns, fill values and
categories."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from hvdtrain.extras.science.columns.cells import NUMBER
from hvdtrain.extras.science.columns.encoding import DATE, TRUTH, Encoding, LearnedColumn
from hvdtrain.extras.science.columns.options import KINDS, ColumnOptions, Kind
from hvdtrain.extras.science.columns.problems import Problems
from hvdtrain.extras.science.columns.raw_table import RawColumn, RawTable

_MOST_DETECTED = 256  # maximum number of categories in a column whose kind is not set
_MOST_CATEGORIES = 4096
_FEW = 20  # different texts that never look like an identifier
_TRIED = 10_000  # different texts from which a kind is detected


def learn(table: RawTable, rows: np.ndarray, options: ColumnOptions, where: str) -> Encoding:
    """Learns kinds, fill values and categories of the training rows, int64 (n,). Raises UserError
    with all problems of the table."""
    problems = Problems(table, options.kinds)
    columns = tuple(
        _learned(name, column, rows, options, problems) for name, column in table.columns.items()
    )
    problems.check(where)
    return Encoding(columns)


def _learned(
    name: str, column: RawColumn, rows: np.ndarray, options: ColumnOptions, problems: Problems
) -> LearnedColumn:
    counts = column.counts(rows)
    has_value = counts > 0
    has_value[: 1 if column.texts and not column.texts[0] else 0] = False
    present = [column.texts[place] for place in np.flatnonzero(has_value)]
    missing = int(counts[~has_value].sum())
    fill = 0.0 if options.fills else None
    if not present:
        problems.add(name, "no training row has a value", "drop")
        return LearnedColumn(name, "number")
    asked = options.kinds.get(name)
    kind = next((kind for kind in KINDS if kind == asked), detected(present))
    if kind == "category":
        return _learned_categories(name, column, rows, options, problems)
    numbers = LearnedColumn(name, kind, fill).encode(column, rows, problems).numbers[:, 0]
    if options.missing == "mean":
        fill = math.fsum(numbers[has_value] * counts[has_value]) / int(counts[has_value].sum())
    elif options.missing == "median":
        fill = float(np.median(np.repeat(numbers[has_value], counts[has_value])))
    is_distinct = (
        kind == "number"
        and len(present) == len(rows) > _FEW
        and bool((numbers[has_value] % 1 == 0).all())
    )
    return LearnedColumn(name, kind, fill, missing, is_distinct=is_distinct)


def _learned_categories(
    name: str, column: RawColumn, rows: np.ndarray, options: ColumnOptions, problems: Problems
) -> LearnedColumn:
    counts = column.counts(rows)
    seen = {text: int(n) for text, n in zip(column.texts, counts, strict=True) if n}
    missing = seen.get("", 0)
    fill = 0.0 if options.fills else None
    if missing and fill is None:
        problems.add_missing(name, column, rows)
    names = sorted(seen, key=lambda text: (not text, text))
    rare = tuple(text for text in names if seen[text] < options.rare)
    kept = tuple(text for text in names if seen[text] >= options.rare)
    is_asked = name in options.kinds
    if not is_asked and len(seen) > _FEW and 2 * len(seen) > len(rows):
        what = f"{len(seen):,} different texts in {len(rows):,} rows, as an identifier has"
        problems.add(name, what, "drop")
    elif len(kept) > (most := _MOST_CATEGORIES if is_asked else _MOST_DETECTED):
        what = f"{len(kept):,} different texts, at most {most:,}; data.rare=N joins rare ones"
        problems.add(name, what, "drop" if is_asked else "category")
    return LearnedColumn(name, "category", fill, missing, kept, rare)


def detected(texts: Sequence[str]) -> Kind:
    """Returns the kind of more than half of the different texts; none of the texts is missing."""
    tried = texts[:: 1 + len(texts) // _TRIED]
    tests: dict[Kind, Callable[[str], bool]] = {
        "bool": lambda text: text.lower() in TRUTH,
        "number": lambda text: NUMBER.fullmatch(text) is not None,
        "date": lambda text: DATE.fullmatch(text) is not None,
    }
    for kind, test in tests.items():
        if 2 * sum(map(test, tried)) > len(tried):
            return kind
    return "category"
