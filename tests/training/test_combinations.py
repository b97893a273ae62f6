"""Pairs of features that are not refused train, and compute what one process computes; docs/combinations.md says what is so."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path

import pytest
from combinations import SIGNS, Found, Planned, bound_of, page, plan, run_pairs, shown
from pairs import EXAMPLES, Pair, all_pairs, refusal
from ranks import FULL, needs_horovod, needs_mpirun

ROOT = Path(__file__).parents[2]
PAIRS = {pair.name: pair for pair in all_pairs()}


@needs_mpirun
@needs_horovod
@pytest.mark.slow
def test_pairs_are_equal_to_one_process_or_refused() -> None:
    """A sample of those that run on mpi; all pairs on every engine in full rounds, which take an hour."""
    jobs = [pair for pair in PAIRS.values() if isinstance(plan(pair), Planned)] if FULL else _some_on_mpi(16)
    found = dict(run_pairs(jobs, float("inf")))
    print("\n".join(shown(pair.name, each) for pair, each in found.items()))
    assert len(found) == len(jobs)
    assert [pair.name for pair, each in found.items() if each.kind == "failed"] == []
    assert Counter(each.kind for each in found.values())["equal"] >= len(jobs) / 2


def _some_on_mpi(count: int) -> list[Pair]:
    names = random.Random(3).sample(sorted(PAIRS), 8 * count)
    on_mpi = [name for name in names if isinstance(found := plan(PAIRS[name]), Planned) and found.job.place.engine == "mpi"]
    quick = [name for name in on_mpi if "speed.compile" not in name]
    return [PAIRS[name] for name in quick[:count]]


def test_a_job_on_ranks_is_compared_with_the_one_that_has_its_numbers() -> None:
    found = plan(PAIRS["shard.stage=1 + optim.clip_norm=0.05"])
    assert isinstance(found, Planned) and found.twin is not None
    assert (found.job.place, found.twin.place) == (("mpi", 2, "shard.stage=1"), ("single", 1, ""))
    assert "optim.clip_norm=0.05" in found.twin.words and found.twin.words == found.job.words
    alike = plan(PAIRS["comm.local_steps=2 + model.recompute=all"])
    assert isinstance(alike, Planned) and alike.twin is not None
    assert "model.recompute=all" in alike.job.words and "recompute" not in alike.twin.words and alike.twin.place == alike.job.place
    alone = plan(PAIRS["comm.local_steps=2 + optim.clip_norm=0.05"])
    assert isinstance(alone, Planned) and alone.twin is None
    refused = plan(PAIRS["parallel.dense=a + comm.tune=true"])
    assert refused == Found("refused", "parallel.dense=a does not support comm.tune=true")


def test_only_what_rounds_more_may_differ_more() -> None:
    assert bound_of(["optim.name=sgd", "speed.precision=fp64"]) == 1e-12
    assert bound_of(["optim.name=muon"]) == 1e-8
    assert bound_of(["optim.name=sgd", "comm.compression=fp16"]) == 4e-3


def test_the_page_refuses_what_is_refused() -> None:
    """Every twentieth pair; the rest is of the command that writes the page."""
    text = (ROOT / "docs/combinations.md").read_text()
    signs = _signs(text)
    assert signs.keys() == PAIRS.keys() and SIGNS["failed"] not in signs.values()
    for name in list(PAIRS)[::20]:
        assert (signs[name] == SIGNS["refused"]) == (refusal(PAIRS[name]) is not None), name
    counts = Counter(signs.values())
    for kind, sign in SIGNS.items():
        assert f"| `{sign}` | {counts[sign]} |" in text or not counts[sign] or kind == "same key"


def test_a_page_of_other_results_says_so() -> None:
    name = "shard.stage=1 + optim.clip_norm=0.05"
    text = page(dict.fromkeys(PAIRS, Found("equal")) | {name: Found("failed", "apart")})
    assert _signs(text)[name] == "!" and "| `!` | 1 |" in text and ", 1 are wrong." in text and "not run yet" not in text


def _signs(text: str) -> dict[str, str]:
    """Pair -> its sign in the matrix."""
    rows = re.findall(r"^ *\d+  (.+?)  +(\S+)$", text.partition("```text")[2].partition("```")[0], re.MULTILINE)
    assert [words for words, _ in rows] == [example.words for example in EXAMPLES[1:]]
    of_row = {words: dict(zip((example.words for example in EXAMPLES), signs, strict=False)) for words, signs in rows}
    found = {f"{one} + {other}": sign for other, signs in of_row.items() for one, sign in signs.items()}
    return {name: sign for name, sign in found.items() if sign != SIGNS["same key"]}
