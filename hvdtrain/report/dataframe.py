"""A run as a pandas.DataFrame: a row for each event that has numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import UserError
from hvdtrain.report.run import Fields, Record

if TYPE_CHECKING:
    import pandas

KINDS = ("step", "epoch", "target")
_SPREADS = {"work_ms": ("min", "median", "max")}  # lists whose places have names


def frame(record: Record) -> pandas.DataFrame:
    """Rows in the order of the job, index 0..n; columns time, kind, step, then the events' fields: `phase_ms.forward` for one within.

    A field that an event has not is NaN. attrs["config"] is the configuration by dotted key, attrs["run"] the folder.
    Of a record that was read with step_times the rows of single steps are there too.
    """
    try:
        import pandas
    except ModuleNotFoundError:
        raise UserError("pandas is not installed", "a run as a table", "pip install 'hvdtrain[notebook]'") from None
    rows = [_flat(event) for event in record.events if event["kind"] in (*KINDS, "step_times")]
    first = ("time", "kind", "step")
    columns = dict.fromkeys([*first, *(name for row in rows for name in row)])
    table = pandas.DataFrame(rows, columns=list(columns))
    table.attrs = {"run": str(record.folder), "config": dict(record.config)}
    return table


def _flat(event: Fields, prefix: str = "") -> Fields:
    flat: Fields = {}
    for name, value in event.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        elif name in _SPREADS and isinstance(value, list) and len(value) == len(_SPREADS[name]):
            flat |= {f"{prefix}{name}.{place}": _known(one) for place, one in zip(_SPREADS[name], value, strict=True)}
        else:
            flat[prefix + name] = _known(value)
    return flat


def _known(value: Any) -> Any:
    return math.nan if value is None else value
