"""Jobs on files of tokens, and `tokenize`, on the ranks of this start."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np

import hvdtrain
from hvdtrain.__main__ import main
from hvdtrain.comm.launcher_variables import placement

STEPS = 9
MODEL = [
    "task.name=language",
    "model.name=gpt",
    "model.layers=1",
    "model.heads=2",
    "model.width=8",
    "optim.name=sgd",
    "optim.momentum=0",
    "optim.base_lr=0.3",
    "speed.precision=fp64",
    "batch.size=7",
    "log.display=lines",
    "seed=5",
]
# of tokens/wiki and tokens/code; code begins again within the job
KINDS = {
    "windows": ["data.root=tokens/wiki", "data.context=12"],
    "mixture": ["data.root=tokens", "data.context=16", 'data.mixture={"wiki":0.7,"code":0.3}'],
    "packed": [
        "data.root=tokens",
        "data.mixture={wiki: 2, code: 1}",
        "data.documents=true",
        "data.context=20",
        "data.pack=40",
    ],
}


def texts(folder: Path) -> list[str]:
    """Writes texts of each kind of file; returns their paths in the folder."""
    drawn = random.Random(3)

    def text(most: int) -> str:
        words = [
            drawn.choice(("one", "zwei", "trois", "été")) for _ in range(drawn.randint(0, most))
        ]
        return " ".join(words)

    (folder / "a.txt").write_text(text(300) + "\n")
    (folder / "empty.txt").write_text("")
    lines = [json.dumps({"text": text(20), "n": number}) for number in range(150)]
    (folder / "b.jsonl").write_text("\n".join(lines) + "\n\n")
    names = ["a.txt", "empty.txt", "b.jsonl"]
    return [str(folder / name) for name in names]


def tokenized(to: Path, files: list[str], *words: str) -> int:
    return main(["tokenize", "--to", f"{to}", "--shard-mb", "0.002", *words, *files])


def trained(kind: str, run: str, *words: str) -> dict[str, np.ndarray]:
    """What a job of STEPS steps trains; it may be given as stop.steps=N of `words`."""
    job = ["data.name=tokens", *KINDS[kind], "data.val_share=0.2", *MODEL, f"run={run}"]
    found = hvdtrain.train(None, *job, f"stop.steps={STEPS}", *words)
    return dict(found.weights)


def on_ranks(folder: str, *kinds: str) -> int:
    """Tokenizes; then runs the jobs of these kinds, and one that stops after four steps. Rank 0
    saves their weights."""
    os.chdir(folder)
    size = placement(os.environ).size
    code = tokenized(Path(f"on-{size}"), ["a.txt", "empty.txt", "b.jsonl"])
    for kind in kinds:
        found = trained(kind, f"{kind}-{size}")
        trained(kind, f"{kind}-stopped-{size}", "stop.steps=4")
        if placement(os.environ).rank == 0:
            np.savez(f"{kind}-{size}.npz", **found)
    return code
