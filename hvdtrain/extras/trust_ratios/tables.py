"""The table on a report's page for a run with log.trust_ratios."""

from __future__ import annotations

import math
import statistics

from hvdtrain.records.run import RunRecord
from hvdtrain.records.table import Table, cell, shown

_MOST_LAYERS = 200


def trust_ratios(run: RunRecord) -> Table:
    """Returns a table with a row for each parameter: the factors of its learning rate."""
    found: dict[str, list[float]] = {}
    for event in run.events_of("trust_ratios"):
        ratios = event.get("ratios")
        for name, ratio in ratios.items() if isinstance(ratios, dict) else ():
            if isinstance(ratio, int | float) and math.isfinite(ratio):
                found.setdefault(name, []).append(float(ratio))
    rows = [
        [
            cell(name),
            *map(shown, (values[0], min(values), statistics.median(values), max(values))),
            shown(values[-1]),
        ]
        for name, values in list(found.items())[:_MOST_LAYERS]
    ]
    if len(found) > _MOST_LAYERS:
        rows.append([f"{len(found) - _MOST_LAYERS:,} more: events.jsonl", "", "", "", "", ""])
    return Table(["parameter", "first", "smallest", "median", "largest", "last"], rows)


TABLES = {"Trust ratios: factors of each layer's learning rate": trust_ratios}
