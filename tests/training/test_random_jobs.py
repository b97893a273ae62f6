"""Jobs drawn from seeds: on ranks of any engine, stage and mesh, and resumed elsewhere, they
compute what one process computes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from drawn_job import Limits, Place, draw
from random_jobs import ONE, Part, Verdict, compared, judged, run_jobs, shown, train
from ranks import needs_mpirun, of_this_copy

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.errors import UserError
from hvdtrain.recipe.batch import resolve_batch_size
from hvdtrain.training.conflicts import refuse_conflicts

ON_2 = Limits(
    engines=("mpi", "torchdist"), sizes=(2,), frameworks=("torch",) * 8 + ("jax", "numpy")
)
SEEDS = range(12)
OF_EXTRAS = "parallel.tensor=2 parallel.pipeline=2 parallel.dense=a servers.count=1"


@needs_mpirun
@pytest.mark.slow
def test_drawn_jobs_are_equal_to_one_process_or_refused(tmp_path: Path) -> None:
    verdicts: dict[int, Verdict] = {}
    for job, verdict, parts in run_jobs(SEEDS, ON_2, tmp_path, limit_s=600):
        print(shown(job, verdict, parts))
        verdicts[job.seed] = verdict
    assert verdicts.keys() == {*SEEDS}
    assert {seed: verdict for seed, verdict in verdicts.items() if verdict.kind == "failed"} == {}
    assert Counter(verdict.kind for verdict in verdicts.values())["equal"] >= len(SEEDS) - 2


def test_a_seed_gives_one_job_and_few_jobs_are_refused() -> None:
    refused = 0
    seen = set[str]()
    for seed in range(100, 140):
        job = draw(seed, Limits())
        assert job == draw(seed, Limits())
        for place in filter(None, (job.place, job.next_place)):
            seen |= {word.partition("=")[0] for word in (*job.words.split(), *place.words.split())}
            try:
                config = configure(
                    None, f"{job.words} {place.words} comm.engine={place.engine}".split()
                )
                refuse_conflicts(resolve_batch_size(config, place.ranks), place.engine, place.ranks)
            except UserError:
                refused += 1
    is_complete = of_this_copy([OF_EXTRAS]) == [OF_EXTRAS]  # without one, other jobs are drawn
    assert refused <= (4 if is_complete else 8)
    assert {
        "shard.stage",
        *of_this_copy(["parallel.tensor"]),
        "optim.ema",
        "optim.clip_norm",
        "recipe.growth",
        "batch.micro",
        "framework",
    } <= seen


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("words", "kind"),
    [("", "equal"), ("optim.base_lr=0.0200001", "failed"), ("evaluate.every_steps=1", "failed")],
)
def test_other_numbers_and_other_events_are_found(tmp_path: Path, words: str, kind: str) -> None:
    """The job of one process, beside the same job with another rate or more evaluations."""
    job: Any = next(
        job
        for job in (draw(seed, ON_2) for seed in range(50))
        if "=torch " in job.words and job.next_place
    )
    parts = [
        Part(job, ONE, tmp_path / "one"),
        Part(job, Place("single", 1, words), tmp_path / "other"),
    ]
    parts.append(Part(job, ONE, tmp_path / "next", tmp_path / "one"))
    for part in parts:
        part.prepare()
        assert train(SingleProcessCommunicator(), str(part.run), part.words) == {
            "code": 0,
            "text": "",
        }
    verdict = compared(parts)
    assert (verdict.kind, verdict.apart == 0.0) == (kind, words != "optim.base_lr=0.0200001"), (
        verdict
    )
    text = shown(job, verdict, parts)
    assert (f"cp -r one/checkpoints/step-{job.steps:08d} next/checkpoints; hvdtrain" in text) == (
        kind == "failed"
    )


def test_a_refusal_is_one_with_code_2_that_names_a_key() -> None:
    text = "shard.stage=3 does not\n  where: shard.stage"
    assert judged(2, text) == Verdict("refused", "shard.stage: shard.stage=3 does not")
    assert (
        judged(1, text) is None
        and judged(2, "no.key is wrong") is None
        and judged(2, f"Traceback\n{text}") is None
    )
    for words in of_this_copy(["parallel.tensor=2"]):
        config = [*draw(0, ON_2).words.split(), words]
        assert judged(**train(SingleProcessCommunicator(), "unused", config)) is not None
