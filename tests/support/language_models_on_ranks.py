"""Jobs with language models of transformers, for ranks that train one after the other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from ranks import HIGHEST_STAGE

import hvdtrain
from hvdtrain.__main__ import main

SAMPLE = ["sample", "--prompt", "the ", "--count", "3", "--length", "8", "--temperature", "0.5"]
VOCABULARY = 50
SEQUENCES = [
    np.random.default_rng(length).integers(0, VOCABULARY, length)
    for length in (5, 8, 3, 12, 2, 7, 16, 4, 9, 6, 11, 10, 14, 2, 3)
]
WORDS = [
    "optim.name=sgd",
    "optim.momentum=0",
    "optim.base_lr=0.5",
    "speed.precision=fp64",
    "log.display=lines",
]
LORA = ["model.lora=['*c_attn','*c_fc','*c_proj']", "model.lora_rank=4", "model.lora_alpha=8"]
_PACKED = ["task.name=language", "data.pack=17", "batch.size=4", "model.attn_implementation=eager"]
# by the folder of the model
JOBS = (
    ("gpt2", [*_PACKED, *LORA, HIGHEST_STAGE]),
    ("bert", ["data.pad={x: 0}", "batch.size=5"]),
)


def data_of(name: str) -> dict[str, object]:
    """Sequences of tokens, or with classes."""
    if name == "gpt2":
        return {"tokens": SEQUENCES}
    return {"x": SEQUENCES, "y": np.arange(len(SEQUENCES)) % 3}


def train(folder: Path, number: int, run: Path, steps: int, *more: str) -> hvdtrain.Run:
    """Trains a job until a step, with the model and weights of a folder in this one."""
    name, words = JOBS[number]
    data = data_of(name)
    return hvdtrain.train(
        {"run": str(run), "stop.steps": steps},
        *WORDS,
        f"model.name=transformers:{folder / name}",
        f"model.weights={folder / name}",
        *words,
        *more,
        train_data=data,
        val_data=data,
    )


def jobs(folder: str) -> None:
    """Each is stopped and resumed."""
    for number in range(len(JOBS)):
        for steps in (2, 4):
            train(Path(folder), number, Path(folder) / f"{number}", steps, "comm.engine=mpi")
    name = f"model.name=transformers:{folder}/gpt2"
    words = ["task.name=language", "data.name=text", f"data.root={folder}", "data.context=12"]
    words += ["model.vocab_size=256", HIGHEST_STAGE, "optim.name=adamw", "optim.base_lr=0.02"]
    words += ["batch.size=8", "stop.steps=6", "log.display=lines", "comm.engine=mpi"]
    assert main([*words, name, f"run={folder}/text"]) == 0
    assert main([*SAMPLE, f"{folder}/text", name, "comm.engine=mpi"]) == 0
