"""Hostile checkpoints: damaged files, and files that an attacker wrote, with correct checksums."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_bytes import chance, mutated, odd, pick
from numpy.random import Generator

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import Arrays, digest, whole
from hvdtrain.core.extras import commands, implementation
from hvdtrain.core.progress import Progress
from hvdtrain.data.sampler import indices
from hvdtrain.frameworks.learner import Learner
from hvdtrain.recipe.recipe import Recipe
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner, build_recipe
from hvdtrain.training.checkpoint import files
from hvdtrain.training.checkpoint.resume import check_identity, newest_good
from hvdtrain.training.checkpoint.shards import CheckpointShard, WrittenByAll
from hvdtrain.training.checkpoint.sums import CHUNK_BYTES, as_text, sums_of
from hvdtrain.training.progress.train_state import TrainState

IDENTITY = {
    "seed": 1,
    "data": {"samples": 50, "shape": [2, 2, 1], "classes": 3, "mean": [0.5], "std": [0.5]},
}
VALUES = (
    *(
        None,
        True,
        -1,
        0,
        1,
        2**31,
        2**63 - 1,
        2**63,
        10**400,
        0.5,
        -1e308,
        1e308,
        "x",
        "",
        "../../x",
        "__metadata__",
        "\ud800",
        "\x1b[2J",
    ),
    *(
        [],
        [1],
        [[[]]],
        {},
        {"a": 1},
        "p.fc.weight",
        "s.fc.weight.0",
        ["F64"],
        "BF16",
        "F8_E4M3",
        "F4",
        "C64",
        "BOOL",
        [2**62, 4],
        [0, 2**63],
    ),
)


@functools.cache
def job() -> tuple[Learner, Recipe, dict[bool, dict[str, bytes]]]:
    """A small one, and the files of a checkpoint of it: with a checksum of each array file, or of
    its chunks."""
    config = configure(
        None,
        [
            "framework=numpy",
            "model.name=linear",
            "recipe.growth=milestones",
            "recipe.grow_at=[1]",
            "recipe.grow_to=[40]",
            "batch.size=20",
        ],
    )
    learner = build_learner(
        config,
        Classification((2, 2, 1), 3, np.array([0.5]), np.array([0.5])),
        SingleProcessCommunicator(),
    )
    return learner, build_recipe(config, 50, None), {}


def good_files(home: Path, by_chunks: bool) -> dict[str, bytes]:
    learner, _, kept = job()
    if by_chunks not in kept:
        run = home / f"first {by_chunks}"
        run.mkdir()
        state: Arrays | WrittenByAll = learner.state()
        if by_chunks:
            parts = CheckpointShard(
                [whole(name, array) for name, array in learner.state().items()],
                files.ARRAYS,
                files.file_of,
                0,
            )
            state = WrittenByAll(parts, [], ["n1"], files.unfinished_name(3, "0123456789abcdef"))
        folder = files.write(
            run, TrainState(Progress(50, 500, 3, 192)), state, IDENTITY, {"a.b": "p.fc.bias"}
        )
        kept[by_chunks] = {path.name: path.read_bytes() for path in folder.iterdir()}
    return kept[by_chunks]


def checksums_that_fit(there: dict[str, bytes], by_chunks: bool) -> dict[str, bytes]:
    """Returns the files with correct checksums of their contents."""
    if by_chunks:
        data = {
            sums_of(name): [
                there[name][i : i + CHUNK_BYTES] for i in range(0, len(there[name]), CHUNK_BYTES)
            ]
            for name in files.ARRAYS
        }
        there |= {
            name: as_text(hashlib.sha256(chunk).hexdigest() for chunk in chunks).encode()
            for name, chunks in data.items()
        }
    without = ("SHA256SUMS", *(files.ARRAYS if by_chunks else ()))
    sums = [
        f"{hashlib.sha256(content).hexdigest()}  {name}\n"
        for name, content in there.items()
        if name not in without
    ]
    return there | {"SHA256SUMS": "".join(sums).encode()}


def read_checkpoint(rng: Generator, home: Path) -> Callable[[], None]:
    """One or two files of a checkpoint harmed; half of the time its checksums are made to fit."""
    by_chunks = chance(rng, 0.5)
    good = good_files(home, by_chunks)
    there = dict(good)
    for _ in range(int(rng.integers(1, 3))):
        name = pick(rng, tuple(there))
        if chance(rng, 0.5):
            there[name] = mutated(rng, there[name])
        elif name.endswith(".json"):
            there[name] = json.dumps(harmed(rng, json.loads(good[name]))).encode()
        elif name.endswith(".safetensors"):
            there[name] = other_header(rng, good[name])
    if chance(rng, 0.8):
        there = checksums_that_fit(there, by_chunks)
    folder = (
        home
        / "run"
        / "checkpoints"
        / pick(rng, ("step-00000003", "step-3", "step-99999999999999999999", "step-\u0663"))
    )
    folder.mkdir(parents=True)
    for name, data in there.items():
        (folder / name).write_bytes(data)
    if chance(rng, 0.1):
        odd(rng, folder / pick(rng, tuple(there)))
    return lambda: go_on(home / "run") if chance(rng, 0.7) else export(home / "run")


def harmed(rng: Generator, tree: object) -> object:
    """Somewhere in the tree another value, another name, or nothing."""
    if not isinstance(tree, dict) or not tree or chance(rng, 0.1):
        return pick(rng, VALUES)
    key = pick(rng, tuple(tree))
    match int(rng.integers(8)):
        case 0:
            return {name: value for name, value in tree.items() if name != key}
        case 1:
            return tree | {f"{pick(rng, VALUES)}": tree[key]}
        case _:
            return tree | {key: harmed(rng, tree[key])}


def other_header(rng: Generator, data: bytes) -> bytes:
    """Changes the header of a safetensors file: 8 bytes of length, JSON, numbers."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.dumps(harmed(rng, json.loads(data[8 : 8 + length]))).encode()
    length_field = (
        len(header) if chance(rng, 0.9) else pick(rng, (0, 1, 2**31, 2**40, 2**63, 2**64 - 1))
    )
    return struct.pack("<Q", length_field) + header + data[8 + length :]


def go_on(run: Path) -> None:
    """Resumes like a job: a checkpoint that is accepted must be complete, and the next step must
    have its numbers."""
    learner, recipe, _ = job()
    before = learner.state()
    found, arrays, _ = newest_good(run, 2**20)
    check_identity(found, IDENTITY)
    try:
        learner.load(arrays)
        assert learner.state().keys() == before.keys() and digest(learner.state())
        p = found.train_state.progress
        rows = indices(p.samples, recipe.at(p).batch, 0, 1, p.dataset, 1)
        assert len(rows) and rows.min() >= 0 and rows.max() < 50
    finally:
        learner.load(before)


def export(run: Path) -> None:
    trained_models = implementation("hvdtrain.predict()")
    if trained_models is None:
        return
    read: Any = importlib.import_module(".saved_weights", trained_models.rpartition(".")[0])
    checkpoint, arrays, _ = read.read_checkpoint(run, "newest")
    if "export" not in commands():
        return
    package = commands()["export"].module.rpartition(".")[0]
    of_file: Any = importlib.import_module(f"{package}.metadata")
    weights = of_file.model_state(arrays, checkpoint)
    assert weights and not any(".." in name.split("/") for name in weights)
    of_file.metadata(run, checkpoint)
