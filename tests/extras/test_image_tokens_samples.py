"""log.samples with image tokens: images that the model draws at each evaluation, without any
effect on training."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from ranks import Job, in_full_rounds, mpirun, needs_extra, needs_mpirun, python
from waiting import wait_until

from hvdtrain.__main__ import main
from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.folder import Folder
from hvdtrain.errors import DONE, REQUEUE
from hvdtrain.events.log import Event, Log
from hvdtrain.extras.image_tokens.codebook import read_codebook
from hvdtrain.training.build import build_learner
from hvdtrain.training.datasets import open_datasets
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.job import make_job
from hvdtrain.training.start import begin

pytestmark = needs_extra("sample")

MODEL = [
    "task.name=language",
    "model.name=gpt",
    "model.layers=1",
    "model.heads=2",
    "model.width=8",
    "optim.name=adamw",
]
IMAGES = [
    "data.name=image_tokens",
    "data.colours=4",
    "data.side=4",
    *MODEL,
    "model.residual_dropout=0.1",
    "batch.size=479",
    "epochs=2",
]


def images_of(path: Path, side: int) -> np.ndarray:
    """The images of a strip of up to 16, uint8 (n, side, side)."""
    page = np.asarray(Image.open(path))
    factor = 64 // side
    return np.stack(
        [page[:64:factor, left : left + 64 : factor] for left in range(0, page.shape[1], 66)]
    )


def test_a_strip_of_images_at_each_evaluation_and_the_same_weights(tmp_path: Path) -> None:
    for name, words in {
        "with": ["log.samples=5", "batch.evaluate=2"],
        "again": ["log.samples=5"],
        "without": [],
    }.items():
        assert main([*IMAGES, *words, f"run={tmp_path / name}"]) == DONE
    strips = {path.name: path for path in (tmp_path / "with" / "samples").iterdir()}
    assert sorted(strips) == ["step-00000000.png", "step-00000003.png", "step-00000006.png"]
    colours = read_codebook(tmp_path / "with").colours
    for path in strips.values():
        drawn = images_of(path, 4)
        assert drawn.shape == (5, 4, 4) and {*np.unique(drawn)} <= {*colours[:, 0].tolist()}
        assert path.read_bytes() == (tmp_path / "again" / "samples" / path.name).read_bytes()
    assert len({path.read_bytes() for path in strips.values()}) == 3
    weights = {
        (tmp_path / name / "checkpoints" / "step-00000006" / "weights.safetensors").read_bytes()
        for name in ("with", "without")
    }
    assert len(weights) == 1
    assert not (tmp_path / "without" / "samples").exists()
    lines = map(json.loads, (tmp_path / "with" / "events.jsonl").read_text().splitlines())
    assert [(event["step"], event["count"]) for event in lines if event["kind"] == "samples"] == [
        (0, 5),
        (3, 5),
        (6, 5),
    ]


def test_a_full_disk_costs_the_picture_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configure(None, [*IMAGES, "log.samples=2"])
    datasets = open_datasets(config)
    emitted = list[Event]()
    learner = build_learner(config, datasets.task, SingleProcessCommunicator())
    now = begin(config, datasets)

    def no_room(run: Path) -> Folder:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    here: dict[str, Any] = {
        "signals": Signals(0),
        "heartbeat": Heartbeat(),
        "log": Log([emitted.append]),
        "start": now,
        "run": tmp_path,
    }
    job = make_job(config, datasets, SingleProcessCommunicator(), learner, **here, open_run=no_room)
    beats = job.heartbeat.beats
    job.samples.draw(now)
    job.prefetcher.close()
    assert (
        "no samples of this step: " in (said := capsys.readouterr().err)
        and "step-00000000.png: No space left on device" in said
    )
    assert job.heartbeat.beats - beats == 16, "a sign of life at each position"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@needs_mpirun
def test_two_ranks_draw_what_one_draws_and_stop_meanwhile(tmp_path: Path) -> None:
    """With one sample a rank has none, and keeps in step; with shards it gathers weights for the
    other."""
    for samples, stage in ((5, 0), (1, 3)):
        runs = {ranks: tmp_path / f"{ranks}-{samples}-{stage}" for ranks in (1, 2)}
        words = [
            *IMAGES,
            "speed.precision=fp64",
            "model.residual_dropout=0",
            f"log.samples={samples}",
            "max_steps=3",
        ]
        assert main([*words, f"run={runs[1]}"]) == DONE
        result = mpirun(
            2,
            ["-m", "hvdtrain", *words, f"shard.stage={stage}", "comm.engine=mpi", f"run={runs[2]}"],
        )
        assert result.returncode == DONE, result.stderr
        for name in ("step-00000000.png", "step-00000003.png"):
            one, two = (run / "samples" / name for run in runs.values())
            assert one.read_bytes() == two.read_bytes()
    run = tmp_path / "stopped"
    long = [
        *IMAGES,
        "data.side=8",
        "model.layers=12",
        "model.width=64",
        "log.samples=1024",
        "batch.evaluate=1024",
        "comm.engine=mpi",
    ]
    long += ["log.per_rank=true"]
    with Job(2, ["-m", "hvdtrain", *long, f"run={run}"], is_warm=True) as job:
        # whose first line is written just before the first samples are drawn
        log = run / "ranks" / "rank-00001.log"
        wait_until(lambda: log.exists() and log.read_text(), "rank 1 trains")
        time.sleep(1.0)  # before that the job would stop, too
        os.kill(job.pids()[1], signal.SIGTERM)
        result = job.wait()
    assert result.returncode == REQUEUE, result.stderr
    assert not (run / "samples").exists() and "a signal on another rank" in result.stdout


@pytest.mark.slow
@in_full_rounds
@needs_mpirun
@pytest.mark.ranks4
@needs_extra("tensor")
def test_ranks_of_a_tensor_group_draw_what_one_process_draws(tmp_path: Path) -> None:
    """And go on where one process stopped, and one process where they did."""
    words = (
        "task.name=language data.name=image_tokens data.colours=16 model.name=gpt model.layers=1 "
        "model.heads=2 model.width=16 "
    )
    words += "speed.precision=fp64 evaluate.every_steps=2 recipe.warmup=0 log.samples=3 epochs=1"
    tensor = ["parallel.tensor=2", "comm.engine=mpi"]
    of_positions = [*tensor, "parallel.sequence=true"]
    starts = [
        (1, [f"run={tmp_path}/1"], 2),
        (4, [f"run={tmp_path}/4", *tensor], 2),
        (2, [f"run={tmp_path}/2", *of_positions], 2),
    ]
    starts += [
        (2, [f"resume={tmp_path}/1", *of_positions], 4),
        (1, [f"resume={tmp_path}/2", "parallel.tensor=1"], 4),
    ]
    for size, how, steps in starts:
        argv = [
            "-m",
            "hvdtrain",
            *([] if "resume" in how[0] else words.split()),
            *how,
            f"stop.steps={steps}",
        ]
        result = mpirun(size, argv) if size > 1 else python(argv)
        assert result.returncode == 0, result.stderr
    pictures = {
        run: {path.name: path.read_bytes() for path in tmp_path.glob(f"{run}/**/step-*.png")}
        for run in "142"
    }
    assert len(pictures["1"]) == 3 and pictures["1"] == pictures["2"]
    assert len(pictures["4"]) == 2 and pictures["4"].items() <= pictures["1"].items()
