"""Runs programs of new users on the ranks, one after the other, each in its own folder. Rank 0
prints the outcomes as JSON.

resumed, the last program: resumes the job of FOLDER/resumed with a worker on each rank.
"""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path

import hvdtrain
from hvdtrain.core.import_torchvision import define_missing_operators

RESUMED = {
    "data.name": "own_datasets:noisy",
    "task.name": "regression",
    "model.name": "linear",
    "optim.base_lr": 0.02,
    "batch.size": 31,
    "epochs": 2,
    "log.every_steps": 3,
    "speed.precision": "fp64",
}


def main(home: str, *names: str) -> None:
    folder, *programs = map(Path, (home, *names))
    # a program imports torchvision, here maybe a CUDA build beside a CPU build of torch
    define_missing_operators()
    ended = {}
    for program in programs:
        here = folder / program.stem
        here.mkdir(parents=True, exist_ok=True)
        os.chdir(here)
        if program.stem == "resumed":
            run = hvdtrain.train(RESUMED, f"run={here}", "data.workers=1")
        else:
            run = runpy.run_path(str(program), run_name="__main__")["run"]
        ended[program.stem] = {
            "rank": run.rank,
            "code": run.code,
            "why": run.why,
            "objective": run.objective,
            "best": run.best,
        }
    if run.rank == 0:
        (folder / "ended.json").write_text(json.dumps(ended))
