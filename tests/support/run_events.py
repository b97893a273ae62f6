"""Events of a run, as a job writes them, and run folders with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hvdtrain.records.run import RunRecord

Fields = dict[str, Any]
CONFIG = {
    "seed": 1,
    "batch.size": 64,
    "model.name": "mlp",
    "comm.compression": "same",
    "log.every_steps": 10,
}


def start(step: int = 0, **fields: Any) -> Fields:
    ranks = fields.get("ranks", 2)
    shape = {
        "ranks": ranks,
        "hosts": ["n1", "n2"][:ranks],
        "host_of_rank": ["n1", "n2", "n2", "n2"][:ranks],
        "engine": "mpi",
        "seconds": 0.0,
    }
    return {
        "time": 1000.0 + step,
        "kind": "start",
        "step": step,
        "schema": 1,
        **shape,
        "energy": {"cpu": "no counter"},
        **fields,
    }


def step(number: int, **fields: Any) -> Fields:
    """Ten steps an epoch, 64 images a step, 2 s."""
    return {
        "time": 1000.0 + number, "kind": "step", "step": number, "epochs": number / 10, "of": 2, "loss": 10.0 / number,  # noqa: E501
        "accuracy": number / 100,
        "samples_per_s": 320.0, "lr": 0.1, "batch": 64, "steps": 5, "window_s": 1.0, "seconds": number / 5,  # noqa: E501
        "phase_ms": {"forward": 2.0, "backward": 5.0, "communication": 1.0}, "work_ms": [7.0, 8.0, 9.0], "memory_mb": 300.0, **fields,  # noqa: E501
    }  # fmt: skip


def epoch(number: int, accuracy: float, **fields: Any) -> Fields:
    return {
        "time": 1000.5 + 10 * number, "kind": "epoch", "step": 10 * number, "epoch": number, "seconds": 2.0 * number, "epoch_s": 1.5,  # noqa: E501
        "samples_per_s": 400.0, "train_loss": 1.0 / number, "train_accuracy": 0.5, "val_loss": 1.2 / number, "val_accuracy": accuracy,  # noqa: E501
        "lr": 0.1, "batch": 64, "rank_work_ms": [8.0, 12.0], "joules": {}, **fields,
    }  # fmt: skip


def end(number: int, **fields: Any) -> Fields:
    return {
        "time": 1000.9 + number,
        "kind": "end",
        "step": number,
        "reason": "epochs=2",
        "exit_code": 0,
        **fields,
    }


COMPLETE = [
    start(),
    step(5),
    step(10),
    epoch(1, 0.7),
    step(15),
    step(20),
    epoch(2, 0.6),
    end(20, seconds=4.25),
]


def write(folder: Path, events: list[Fields], config: Fields | None = None, torn: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_text(
        "".join(json.dumps(event) + "\n" for event in events) + torn
    )
    if config is not None:
        (folder / "config.yaml").write_text(
            "".join(f"{key}: {json.dumps(value)}\n" for key, value in config.items())
        )
    return folder


def record_of(events: list[Fields], **config: Any) -> RunRecord:
    return RunRecord(Path("run"), CONFIG | config, events)
