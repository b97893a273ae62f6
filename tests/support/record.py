"""What tests took, as lines of JSON in the file that HVDTRAIN_TEST_RECORD names; `python
tests/support/record.py FILE` sums them up."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

SLOWEST = 30


def note(fields: dict[str, Any]) -> None:
    """Appends a line with the running test; does nothing if no file is set."""
    if path := os.environ.get("HVDTRAIN_TEST_RECORD"):
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        with open(path, "a") as file:
            file.write(json.dumps({"test": test} | fields) + "\n")


def summary(rows: list[dict[str, Any]]) -> str:
    seconds = Counter[str]()
    of_core = Counter[str]()
    starts = [row["ranks"] for row in rows if "ranks" in row]
    for row in rows:
        seconds[row["test"]] += row.get("seconds", 0.0)
        of_core[row["test"]] += row.get("cpu_s", 0.0)
    again = sorted({row["test"] for row in rows if row.get("outcome") == "rerun"})
    tests = {row["test"] for row in rows if "seconds" in row}
    slowest = [
        f"{taken:7.1f} s {of_core[test]:7.1f} s  {test}"
        for test, taken in seconds.most_common(SLOWEST)
    ]
    return "\n".join(
        [
            f"{len(tests)} tests, {len(starts)} starts of MPI with {sum(starts)} ranks",
            f"the {len(slowest)} slowest, of the clock and of a core:",
            *slowest,
            f"tried again: {len(again)}",
            *again,
        ]
    )


if __name__ == "__main__":
    print(summary([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]))
