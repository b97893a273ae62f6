"""Pairs of features that are not refused train, and compute what one process computes;
docs/combinations.md says what is so."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from datetime import date
from pathlib import Path

import pytest
from combinations import (
    PER_DAY,
    SIGNS,
    Found,
    Planned,
    bound_of,
    framework_row,
    framework_rows,
    kind_of,
    page,
    pairs_of_day,
    plan,
    read_page,
    run_pairs,
    shown,
    signs_of,
)
from pairs import all_pairs, refusal
from ranks import FULL, needs_horovod, needs_mpirun

from hvdtrain.core.extras import extras

PAGE = Path(__file__).parents[2] / "docs/combinations.md"
OF_EXTRAS = {
    *("context_parallel", "dense", "diloco", "gossip", "pipeline", "powersgd", "servers"),
    "tensor",
}
PAIRS = {pair.name: pair for pair in all_pairs()}


@needs_mpirun
@needs_horovod
@pytest.mark.slow
@pytest.mark.every_day
def test_pairs_are_equal_to_one_process_or_refused() -> None:
    """The pairs of today, or of HVDTRAIN_TEST_DAY=2026-11-28; all pairs on every engine in full
    rounds, which take hours."""
    day = date.fromisoformat(os.environ.get("HVDTRAIN_TEST_DAY") or date.today().isoformat())
    text = PAGE.read_text()
    jobs = (
        [pair for pair in PAIRS.values() if isinstance(plan(pair), Planned)]
        if FULL
        else pairs_of_day(day, text)
    )
    results = dict(run_pairs(jobs, float("inf")))
    print("\n".join(shown(pair.name, each) for pair, each in results.items()))
    assert len(results) == len(jobs) > 0
    wrong = [pair.name for pair, each in results.items() if each.kind == "failed"]
    again = f"python tests/support/combinations.py --jobs-only {shlex.join(wrong)}"
    assert not wrong, f"HVDTRAIN_TEST_DAY={day}; {again}"
    if not FULL:
        signs = signs_of(text)
        assert {pair.name: SIGNS[kind_of(pair.name, each)] for pair, each in results.items()} == {
            pair.name: signs[pair.name] for pair in jobs
        }


@pytest.mark.in_turn
def test_the_days_of_some_months_have_every_quick_pair_that_has_been_resumed() -> None:
    """On three of the days."""
    text = PAGE.read_text()
    seen = dict[int, set[str]]()
    for number in (1, 8, 31):
        of_months = [pairs_of_day(date(2026, month, number), text) for month in (1, 3, 5, 7)]
        assert all(len(pairs) <= PER_DAY for pairs in of_months) and of_months[0] == pairs_of_day(
            date(2026, 1, number), text
        )
        seen[number] = {pair.name for pairs in of_months for pair in pairs}
    assert not seen[1] & seen[8] and not seen[8] & seen[31] and all(seen.values())
    resumed = page(dict.fromkeys(PAIRS, Found("equal", resumed="mpi x 2 -> single x 1")))
    days = [
        {pair.name for pair in pairs_of_day(date(2026, month, 1), resumed)} for month in range(1, 5)
    ]
    assert all(0 < len(names) <= PER_DAY for names in days) and len(days[0] | days[1]) > PER_DAY
    assert pairs_of_day(date(2026, 1, 1), page(dict.fromkeys(PAIRS, Found("equal")))) == []


def test_a_job_on_ranks_is_compared_with_the_one_that_has_its_numbers() -> None:
    found = plan(PAIRS["shard.stage=1 + optim.clip_norm=0.05"])
    assert isinstance(found, Planned) and found.twin is not None
    assert (found.job.place, found.twin.place) == (("mpi", 2, "shard.stage=1"), ("single", 1, ""))
    assert "optim.clip_norm=0.05" in found.twin.words and found.twin.words == found.job.words
    alike = plan(PAIRS["comm.local_steps=2 + model.recompute=all"])
    assert isinstance(alike, Planned) and alike.twin is not None
    assert (
        "model.recompute=all" in alike.job.words
        and "recompute" not in alike.twin.words
        and alike.twin.place == alike.job.place
    )
    alone = plan(PAIRS["comm.local_steps=2 + optim.clip_norm=0.05"])
    assert isinstance(alone, Planned) and alone.twin is None
    refused = plan(PAIRS["shard.stage=1 + comm.tune=true"])
    assert refused == Found("refused", "shard.stage=1 does not support comm.tune=true")


def test_only_what_rounds_more_may_differ_more() -> None:
    assert bound_of(["optim.name=sgd", "speed.precision=fp64"]) == 1e-12
    assert bound_of(["optim.name=muon"]) == 1e-8
    assert bound_of(["optim.name=sgd", "comm.compression=fp16"]) == 4e-3


def test_the_page_refuses_what_is_refused() -> None:
    """Every twentieth pair; the rest is of the command that writes the page."""
    text = PAGE.read_text()
    signs = signs_of(text)
    is_complete = extras().keys() >= OF_EXTRAS  # a copy without one has other pairs
    assert signs.keys() == PAIRS.keys() or not is_complete
    assert SIGNS["failed"] not in signs.values()
    for name in [name for name in PAIRS if name in signs][::20]:
        assert (signs[name] == SIGNS["refused"]) == (refusal(PAIRS[name]) is not None), name
    counts = Counter(signs.values())
    for kind, sign in SIGNS.items() if is_complete else ():
        assert f"| `{sign}` | {counts[sign]} |" in text or not counts[sign] or kind == "same key"


def test_a_page_of_other_results_says_so() -> None:
    name = "shard.stage=1 + optim.clip_norm=0.05"
    other = "shard.stage=2 + optim.clip_norm=0.05"
    resumed = Found("equal", resumed="mpi x 2 -> single x 1")
    results = dict.fromkeys(PAIRS, resumed)
    results |= {name: Found("failed", "apart"), other: Found("equal")}
    in_jax = {"one": resumed, "two": Found("equal"), "three": Found("refused")}
    text = page(results, {"jax": framework_row(5, in_jax)})
    assert framework_rows(text) == {"jax": "5 | 4 | 2 | 1 | 0 | 0 |"}
    kept = read_page(text, [PAIRS[name], PAIRS[other]])
    assert [(each.kind, bool(each.resumed)) for each in kept.values()] == [
        ("failed", True),
        ("equal", False),
    ]
    assert signs_of(text)[other] == "o" and "| `o` | 1 |" in text
    assert (
        signs_of(text)[name] == "!"
        and "| `!` | 1 |" in text
        and ", 1 are wrong." in text
        and "not run yet" not in text
    )
