"""Compares two runs by their events: configuration, environment, first weights, and the first step
at which a loss or metric differs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hvdtrain.cli.options import CommandParser
from hvdtrain.cli.output import align, plural, print_result, with_json_value
from hvdtrain.core.extras import commands
from hvdtrain.errors import DONE, short
from hvdtrain.events import redaction
from hvdtrain.extras.compare.differing import differing_environment, differing_keys, environment_of
from hvdtrain.records.run import Fields, RunRecord, number, read_run
from hvdtrain.records.table import cell

_WIDEST = 60  # letters of a value in a line
_KINDS = ("step", "epoch")
_NOT_RESULTS = ("time", "seconds", "epoch_s", "samples_per_s", "step", "kind", "lr", "batch")


class FirstDifference(NamedTuple):
    """The first event in which two runs differ."""

    step: int
    name: str  # of the field: loss, val_accuracy, ...
    values: tuple[float, float]


def compare(arguments: Sequence[str]) -> int:
    """Runs `compare`; returns the exit code. Raises UserError."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(commands()["compare"].usage)
        return DONE
    parser = CommandParser("compare", commands()["compare"].usage.partition("  ")[0])
    parser.add_argument("runs", nargs="*")
    parser.add_argument("--json")
    parsed = parser.parse_intermixed_args(with_json_value(arguments))
    if len(parsed.runs) != 2:
        parser.error(f"two RUNs are needed, not {len(parsed.runs)}")
    runs = [read_run(Path(run).expanduser()) for run in parsed.runs]
    keys = [
        (key, [redaction.redact({key: value})[key] for value in values])
        for key, values in differing_keys(runs)
    ]
    environment = differing_environment(runs)
    first, last = first_difference(*runs)
    lines = [
        *_listed("configuration", "key", [(key, list(map(cell, of))) for key, of in keys]),
        *_environment_lines(runs, environment),
        _weights(runs),
        _loss(first, last),
    ]
    result = {
        "runs": parsed.runs,
        "configuration": dict(keys),
        "environment": dict(environment),
        "digests": [run.events_of("start")[0].get("digest") for run in runs if _has_start(run)],
        "first_difference": None if first is None else first._asdict(),
        "compared_to_step": last,
    }
    print_result(parsed.json, lines, result)
    return DONE


def first_difference(one: RunRecord, other: RunRecord) -> tuple[FirstDifference | None, int]:
    """Returns the first event in which the runs differ, and the last step that both have.

    Compared are losses and metrics of the events "step" and "epoch" that both have for a step, to
    the last bit.
    """
    found = [_results(run) for run in (one, other)]
    both = sorted(found[0].keys() & found[1].keys())
    for step, kind in both:
        values = [of[step, kind] for of in found]
        for name in values[0]:
            if name in values[1] and not _is_same(values[0][name], values[1][name]):
                return FirstDifference(step, name, (values[0][name], values[1][name])), step
    return None, both[-1][0] if both else 0


def _results(run: RunRecord) -> dict[tuple[int, str], dict[str, float]]:
    """Returns (step, kind) -> {name: value} of losses and metrics."""
    return {(event["step"], event["kind"]): _metrics(event, run) for event in _events(run)}


def _events(run: RunRecord) -> list[Fields]:
    return [event for event in run.events if event["kind"] in _KINDS]


def _metrics(event: Fields, run: RunRecord) -> dict[str, float]:
    """Returns the losses and metrics of an event; NaN for what is not finite."""
    declared = run.start_event.get("metrics")
    names = {"loss", *(declared if isinstance(declared, dict) else {})}
    fields = {"", "train_", "val_"}
    wanted = {f"{prefix}{name}" for prefix in fields for name in names} - {*_NOT_RESULTS}
    logged = event.get("logged")
    of_loop = {
        f"logged.{name}": number(event, f"logged.{name}")
        for name in (logged if isinstance(logged, dict) else {})
    }
    return {name: number(event, name) for name in event if name in wanted} | of_loop


def _is_same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _listed(title: str, what: str, differing: Sequence[tuple[str, list[str]]]) -> list[str]:
    """Returns the lines of one group: its title with the count, and a row for each difference."""
    if not differing:
        return [f"{title:14} the same"]
    rows = [
        [f"  {name}", *(short(value, _WIDEST) or "-" for value in of)] for name, of in differing
    ]
    differ = "differs" if len(differing) == 1 else "differ"
    return [f"{title:14} {plural(len(differing), what)} {differ}", *align(rows, left=(0, 1, 2))]


def _environment_lines(
    runs: Sequence[RunRecord], differing: Sequence[tuple[str, list[str]]]
) -> list[str]:
    unknown = [str(run.folder) for run in runs if not environment_of(run)]
    if unknown:
        return [f"{'environment':14} not recorded by {' and '.join(unknown)}"]
    return _listed("environment", "value", differing)


def _has_start(run: RunRecord) -> bool:
    return bool(run.events_of("start"))


def _weights(runs: Sequence[RunRecord]) -> str:
    """Returns the line on the weights at the first start."""
    digests = [run.events_of("start")[0].get("digest") for run in runs if _has_start(run)]
    if len(digests) < 2 or None in digests:
        return f"{'first weights':14} not known"
    return f"{'first weights':14} {'the same' if digests[0] == digests[1] else 'differ'}"


def _loss(first: FirstDifference | None, last: int) -> str:
    if not last:
        return f"{'results':14} no step that both runs have in an event (log.every_steps)"
    if first is None:
        return f"{'results':14} the same bits in all events up to step {last:,}"
    one, other = first.values
    size = max(abs(one), abs(other))
    apart = f", {abs(one - other) / size:.1e} apart" if math.isfinite(one - other) and size else ""
    return (
        f"{'results':14} differ first in the event of step {first.step:,}: {first.name} "
        f"{one!r} and {other!r}{apart}"
    )
