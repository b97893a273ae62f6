"""The numbers and words in the cells of a table."""

from __future__ import annotations

import math
import re

from hvdtrain.errors import short

WHOLE = re.compile(r"[-+]?[0-9]+")
NUMBER = re.compile(
    r"[-+]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?|nan|inf(inity)?)", re.IGNORECASE
)
EXACT = 2.0**53  # float64 represents all integers up to this
_TRUTH = {"true": 1, "false": 0}


def is_missing(text: str) -> bool:
    """Whether a string means a missing value."""
    text = text.strip()
    words = ("", "na", "n/a", "#n/a", "<na>", "nan", "null")
    return text.lower() in words or text in ("None", "NaT")  # "none" may be a class


def kind_of(texts: list[str]) -> str:
    """Returns the kind of a column: whole, float, truth, empty; words, if cells may be class names;
    else text, if any cell is not a number."""
    if texts and not any(texts):
        return "empty"
    if all(map(WHOLE.fullmatch, texts)):
        return "whole"
    if all(map(NUMBER.fullmatch, texts)):  # 1.0e+00, which has a letter
        return "float"
    there = [text for text in texts if not is_missing(text)]
    if there and all(text.lower() in _TRUTH for text in there):
        return "truth"
    # classes may be named + and -
    if there and all(any(map(str.isalpha, t)) or not any(map(str.isdigit, t)) for t in there):
        return "text" if any(map(NUMBER.fullmatch, there)) else "words"
    return "text"


def number(text: str) -> float:
    """Parses a float64. Raises ValueError for strings that only some programs read as a number,
    such as 1_000, and for numbers beyond float64."""
    text = text.strip()
    if not NUMBER.fullmatch(text):
        raise ValueError(f"could not convert {short(repr(text), 40)}")
    parsed = float(text)
    if math.isinf(parsed) and "inf" not in text.lower():
        raise ValueError(f"{short(text, 40)} is outside the range of float64")
    if abs(parsed) >= EXACT and WHOLE.fullmatch(text) and int(parsed) != int(text):
        raise ValueError(f"{short(text, 40)} loses digits as a float64, {parsed:.0f}")
    return parsed


def whole_number(text: str) -> int:
    """Parses an int64. Raises ValueError if the string is not one."""
    text = text.strip()
    if not WHOLE.fullmatch(text):
        found = float(text) if NUMBER.fullmatch(text) else math.nan  # 2.0 is a whole number
        if not found.is_integer() or abs(found) >= EXACT:
            raise ValueError(f"could not convert {short(repr(text), 40)}")
        return int(found)
    if not is_int64(text):
        raise ValueError(f"{short(text, 40)} is outside the range of int64")
    return int(text)


def is_int64(text: str) -> bool:
    if not WHOLE.fullmatch(text):
        return False
    digits = text.lstrip("+-").lstrip("0") or "0"
    most = 2**63 if text.startswith("-") else 2**63 - 1
    return len(digits) < 20 and int(digits) <= most


def truth(text: str) -> int:
    """Returns 1 for TRUE and 0 for FALSE, in any case. Raises ValueError for anything else."""
    flag = _TRUTH.get(text.strip().lower())
    if flag is None:
        raise ValueError(f"could not convert {short(repr(text), 40)}")
    return flag
