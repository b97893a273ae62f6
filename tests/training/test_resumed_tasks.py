"""Jobs with labels, pixels and weighted classes that stop within an epoch and resume with one rank
more: as one that never stopped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pool import on_ranks
from random_jobs import train
from ranks import FULL, jobs_of_this_copy, needs_extra, needs_mpirun

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.training.checkpoint import files

# steps; the first two of three parts go two steps beyond what is kept
EVERY = 4
END = 14
ALL = "speed.precision=fp64 optim.name=sgd epochs=null log.every_steps=1 checkpoint.keep_last=9"
SHAPES = (
    "data.name=own_data:shapes task.name=segmentation task.ignore_label=255 batch.size=7 "
    "model.name=unet model.widths=[4,6]"
)
CLASSES = (
    "data.name=own_data:partly_labelled task.top_k=2 task.ignore_label=-1 batch.size=31 "
    "evaluate.every_steps=3"
)
LABELS = "data.name=own_data:labels task.name=multilabel batch.size=31 evaluate.every_steps=5"
MOVED = "augment.crop=2 augment.flip=true"
JOBS = {
    "labels": f"{LABELS} model.name=mlp model.widths=[5] optim.base_lr=0.5",
    "pixels": f"{SHAPES} {MOVED} model.norm=group model.groups=2 task.dice=0.4 optim.base_lr=0.5 "
    "batch.evaluate=5 batch.micro=2",
    **jobs_of_this_copy(
        {"pixels, batch norm": f"{SHAPES} norm.kind=sync optim.base_lr=0.1 log.samples=2"}
    ),
    "classes": f"{CLASSES} task.class_weights=balanced model.name=linear optim.base_lr=0.1 "
    "batch.micro=4",
}
NEEDED = {"maps": "pixels", "multilabel": "labels"}
if FULL:
    JOBS |= {
        "labels, JAX": f"{LABELS} framework=jax model.name=mlp model.widths=[5] optim.base_lr=0.5",
        "classes, JAX": f"{CLASSES} task.class_weights=[0.5,1,2] framework=jax model.name=linear "
        "optim.base_lr=0.1",
    }


def went(words: list[str], run: Path, steps: int, ranks: int) -> None:
    """A part of the job, as on a machine that fails after `steps`: what was written after the last
    multiple of EVERY is lost."""
    words = [*words, f"stop.steps={steps}", f"checkpoint.every_steps={EVERY}"]
    if ranks == 1:
        found = train(SingleProcessCommunicator(), str(run), [*words, "comm.engine=single"])
    else:
        found = on_ranks("mpi", ranks, "random_jobs:train", str(run), [*words, "comm.engine=mpi"])[
            0
        ]
    assert found == {"code": 0, "text": ""}
    if steps < END:
        for folder in files.finished(run):
            if folder.name > files.name_of(steps // EVERY * EVERY):
                shutil.rmtree(folder)


def numbers(run: Path) -> dict[tuple[str, int], dict[str, float | None]]:
    """The metrics of each event "step" and "epoch"; for repeated steps, the last ones."""
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    names = {f"{of}{metric}" for metric in lines[0]["metrics"] for of in ("", "train_", "val_")}
    kept = [event for event in lines if event["kind"] in ("step", "epoch")]
    return {
        (event["kind"], event["step"]): {key: event[key] for key in names & event.keys()}
        for event in kept
    }


@pytest.mark.slow
@needs_mpirun
@pytest.mark.parametrize(
    "job",
    [
        pytest.param(
            job, marks=[needs_extra(name) for name in NEEDED if job.startswith(NEEDED[name])]
        )
        for job in JOBS
    ],
)
def test_a_job_that_goes_on_with_more_ranks_ends_as_one_that_did_not_stop(
    job: str, tmp_path: Path
) -> None:
    words = f"{ALL} {JOBS[job]}".split()
    straight = tmp_path / "straight"
    parts = tmp_path / "parts"
    went(words, straight, END, 1)
    for ranks, steps in ((1, EVERY + 2), (2, 2 * EVERY + 2), (3, END)):
        went(words, parts, steps, ranks)
    starts = [
        event
        for event in map(json.loads, (parts / "events.jsonl").read_text().splitlines())
        if event["kind"] == "start"
    ]
    assert [(event["ranks"], event["step"]) for event in starts] == [
        (1, 0),
        (2, EVERY),
        (3, 2 * EVERY),
    ]
    expected = numbers(straight)
    found = numbers(parts)
    extra = {
        ("epoch", EVERY + 2),
        ("epoch", 2 * EVERY + 2),
    } - expected.keys()  # evaluations where a part ended
    assert found.keys() - extra == expected.keys() and ("epoch", END) in expected
    for key, values in expected.items():
        assert len(values) >= 3 and found[key] == pytest.approx(values, rel=1e-12, abs=1e-14), key
    arrays: list[dict[str, Any]] = [
        files.read_arrays(files.finished(run)[-1], 2**20) for run in (straight, parts)
    ]
    assert arrays[0].keys() == arrays[1].keys()
    for name, array in arrays[0].items():
        np.testing.assert_allclose(arrays[1][name], array, rtol=1e-11, atol=1e-13, err_msg=name)
