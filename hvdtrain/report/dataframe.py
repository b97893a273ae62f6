"""A run as a pandas.DataFrame: a row for each event that has numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import UserError
from hvdtrain.report.run import Fields, RunRecord

if TYPE_CHECKING:
    import pandas

KINDS = ("step", "epoch", "target", "step_times")
_LIST_ITEMS = {"work_ms": ("min", "median", "max")}  # what the items of a list field are


def to_dataframe(run: RunRecord) -> pandas.DataFrame:
    """Rows in the order of the job, index 0..n; columns time, kind, step, then the events' fields, nested ones as `phase_ms.forward`.

    A field that an event lacks is NaN. attrs["config"] is the configuration by dotted key, attrs["run"] the folder.
    Rows of single steps are there if the run was read with step_times. Raises UserError where pandas is not installed.
    """
    try:
        import pandas
    except ModuleNotFoundError:
        raise UserError("pandas is not installed", "hvdtrain.read()", "pip install 'hvdtrain[notebook]'") from None
    rows = [_flat(event) for event in run.events if event["kind"] in KINDS]
    columns = dict.fromkeys(["time", "kind", "step", *(name for row in rows for name in row)])
    frame = pandas.DataFrame(rows, columns=list(columns))
    frame.attrs = {"run": str(run.folder), "config": dict(run.config)}
    return frame


def _flat(event: Fields, prefix: str = "") -> Fields:
    """Mappings, and lists whose items have names, as dotted fields."""
    flat: Fields = {}
    for name, value in event.items():
        items = _LIST_ITEMS.get(name)
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        elif items and isinstance(value, list) and len(value) == len(items):
            flat |= {f"{prefix}{name}.{item}": _nan_for_none(inner) for item, inner in zip(items, value, strict=True)}
        else:
            flat[prefix + name] = _nan_for_none(value)
    return flat


def _nan_for_none(value: Any) -> Any:
    return math.nan if value is None else value
