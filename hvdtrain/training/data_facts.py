"""The facts about the data that are compared between ranks and at a resume."""

from __future__ import annotations

from typing import Any

from hvdtrain.config.schema import Config
from hvdtrain.data.sampler import BLOCKS_VERSION, shuffle_version
from hvdtrain.data.source import Source
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.checkpoint.files import Identity
from hvdtrain.training.datasets import Datasets

# Task.facts() of images -> their names in messages
_FACT_NAMES = {
    "shape": "image shape",
    "classes": "classes",
    "mean": "mean of the pixels",
    "std": "their deviation",
}
_OF_TASK = " of the task"  # suffix of the names of all other facts


def data_facts(config: Config, datasets: Datasets) -> dict[str, Any]:
    """Returns the facts about the data that must be equal on all ranks, by their names in
    messages."""
    task = datasets.task
    train = datasets.train
    val = datasets.val
    return {
        "training samples": len(train),
        "validation samples": len(val),
        **{_FACT_NAMES.get(name, name + _OF_TASK): value for name, value in task.facts().items()},
        **digests(train, "training", config.seed),
        **(
            {}
            if (known := train.foresight) is None
            else {"samples in a block of the training files": known.rows}
        ),  # used to divide samples among ranks
        **_facts_of_order(datasets),
        **digests(val, "validation", config.seed),
    }


def _facts_of_order(datasets: Datasets) -> dict[str, str]:
    """Returns what decides the order of the training samples, by key, if the data do."""
    facts = {} if datasets.draws is None else datasets.draws.facts
    return {f"data.{name}": fact for name, fact in facts.items()}


def facts_of_task(found: dict[str, Any]) -> dict[str, Any]:
    """Extracts Task.facts() from data_facts()."""
    names = {shown: name for name, shown in _FACT_NAMES.items()}
    facts = {
        names.get(shown, shown.removesuffix(_OF_TASK)): value for shown, value in found.items()
    }
    return {name: facts[name] for name in facts if name in _FACT_NAMES or name + _OF_TASK in found}


def digests(source: Source, name: str, seed: int) -> dict[str, Any]:
    """Returns digests of labels and images, or of arrays, by their names in messages."""
    return {f"digest of the {name} {part}": value for part, value in source.digests(seed).items()}


def identity(config: Config, datasets: Datasets) -> Identity:
    """Returns the facts that a checkpoint keeps for comparison at a resume: the seed, and a digest
    of the training set with all labels."""
    task = datasets.task
    # a checkpoint that names no task is of classification
    named = {} if task.name == Classification.name else {"task": task.name}
    data = {"samples": len(datasets.train), **named, **task.facts(), **datasets.train.identity()}
    version = shuffle_version(len(datasets.train))
    if config.data.shuffle == "blocks":
        version = f"{BLOCKS_VERSION} {config.data.shuffle_block} x {config.data.shuffle_window}"
    if datasets.draws is not None:
        version = " ".join(f"{key} {fact}" for key, fact in _facts_of_order(datasets).items())
    if version is not None:
        data["shuffle"] = version
    return {"seed": config.seed, "data": data}
