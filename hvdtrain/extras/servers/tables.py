"""The table on a report's page for a run with asynchronous updates."""

from __future__ import annotations

from collections import Counter

from hvdtrain.records.run import RunRecord
from hvdtrain.records.table import MOST_RANKS, Table, cell, percent, shown

_MOST_AGES = 12  # ages in a row


def staleness(run: RunRecord) -> Table:
    """Returns a table of the staleness of gradients when they were applied, with a row for each
    worker."""
    found: dict[str, Counter[int]] = {}
    for event in run.events_of("step"):
        of_workers = event.get("staleness")
        for worker, counts in of_workers.items() if isinstance(of_workers, dict) else ():
            if isinstance(counts, dict):
                ages = {
                    int(age): n
                    for age, n in counts.items()
                    if age.isdecimal() and isinstance(n, int)
                }
                found.setdefault(worker, Counter()).update(ages)
    rows = []
    for worker, counts in sorted(found.items(), key=lambda item: (len(item[0]), item[0]))[
        :MOST_RANKS
    ]:
        total = counts.total()
        shares = ", ".join(
            f"{age}: {percent(counts[age] / total)}" for age in sorted(counts)[:_MOST_AGES]
        )
        if total:
            mean = sum(age * n for age, n in counts.items()) / total
            rows.append(
                [
                    cell(worker),
                    shown(total, ",.0f"),
                    shown(mean),
                    shown(max(counts), ",.0f"),
                    shares,
                ]
            )
    return Table(["worker", "updates", "mean", "most", "share of updates of each staleness"], rows)


TABLES = {"Updates between a worker's reading of the weights and its update": staleness}
