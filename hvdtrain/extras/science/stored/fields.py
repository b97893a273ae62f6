"""Selects the arrays of a file that become the fields of a sample."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvdtrain.data.array_files import name_and_words
from hvdtrain.data.field import TARGETS
from hvdtrain.data.option_error import OptionError
from hvdtrain.data.source import Split
from hvdtrain.errors import UserError
from hvdtrain.extras.science.stored.options import Wanted
from hvdtrain.extras.science.stored.stored_array import (
    StoredFile,
    as_yaml,
)

FIELDS_KEY = "data.fields={x: NAME, y: NAME}"
_OTHERS = "data.fields={y: NAME}: all other columns are x"


def names_split(wanted: Wanted) -> bool:
    return any(
        "{split}" in text for texts in (wanted.fields or {}).values() for text in _listed(texts)
    )


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts)


def fields_of(wanted: Wanted, split: Split, file: StoredFile, path: Path) -> dict[str, list[str]]:
    """Returns the arrays of each field, as strings: from data.fields, else x and y of the file,
    else the target of a table and all other columns."""
    if wanted.fields is not None:
        for name, texts in wanted.fields.items():
            if not name.isidentifier() or not _listed(texts):
                raise OptionError(
                    f"data.fields has a field named {name!r:.40}",
                    "fields",
                    f"names of fields are words: {FIELDS_KEY}",
                )
        found = {
            name: [text.replace("{split}", split) for text in _listed(texts)]
            for name, texts in wanted.fields.items()
        }
        if not leaves_x_to_others(wanted):
            return found
        taken = {name_and_words(text)[0] for texts in found.values() for text in texts}
        taken |= {split_name(wanted) or "", *file.coordinates}
        return {
            "x": _inputs([name for name in file.names if name not in taken], wanted, file, path)
        } | (found)
    names = [
        name for name in file.names if name != split_name(wanted) and name not in file.coordinates
    ]
    known = {name.lstrip("/"): name for name in names}
    targets = [name for name in TARGETS if name in known]
    if len(targets) > 1 and not {"x", "y"} <= known.keys():
        without = [name for name in names if name.lstrip("/") not in TARGETS]
        x = f"[{', '.join(map(as_yaml, without))}]" if 0 < len(without) <= 24 else "NAME"
        choices = [f"data.fields={{x: {x}, y: {as_yaml(known[name])}}}" for name in targets]
        raise UserError(f"which of {', '.join(targets)} is y?", str(path), "; or ".join(choices))
    target = targets[0] if targets else None
    if target is None:
        _refuse_texts(file)
    if target is None or (len(names) < 2):
        raise UserError(
            f"which arrays are x and y? The file has {', '.join(names[:24]) or 'none'}",
            str(path),
            _with_capitals(names)
            or (FIELDS_KEY if file.columns(names) is None else f"{FIELDS_KEY}; {_OTHERS}"),
        )
    others = [name for name in names if name.lstrip("/") != target]
    inputs = [known["x"]] if "x" in known else others
    return {"x": _inputs(inputs, wanted, file, path), "y": [known[target]]}


def leaves_x_to_others(wanted: Wanted) -> bool:
    """Whether x are the columns that are nothing else: data.fields={y: outcome}, or no
    data.fields."""
    if wanted.fields is None:
        return True
    return "x" not in wanted.fields and (wanted.columns is not None or [*wanted.fields] == ["y"])


def _inputs(names: list[str], wanted: Wanted, file: StoredFile, path: Path) -> list[str]:
    """Returns the arrays of x. Raises UserError if several are not columns of a table."""
    if len(names) > 1 and wanted.columns is None and file.columns(names) is None:
        raise UserError(f"which of {', '.join(names[:24])} is x?", str(path), FIELDS_KEY)
    return names


def _refuse_texts(file: StoredFile) -> None:
    """Raises UserError if the file has targets that are not numbers."""
    for name in file.without_numbers:
        if name.lstrip("/") in TARGETS:
            file.array(name)


def _with_capitals(names: Sequence[str]) -> str:
    """Returns data.fields=... for a table whose target is capitalized, as in Label; else an empty
    string."""
    target = next((name for name in names if name.lower() in TARGETS), None)
    others = [name for name in names if name != target]
    x = f"[{', '.join(map(as_yaml, others))}]" if len(others) > 1 else "".join(others)
    return f"data.fields={{x: {x}, y: {target}}}" if target and 0 < len(others) <= 24 else ""


def split_name(wanted: Wanted) -> str | None:
    return None if wanted.split_by is None else name_and_words(wanted.split_by)[0]
