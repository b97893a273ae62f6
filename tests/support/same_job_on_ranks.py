"""Compares the ranks of a job whose last rank differs in seven ways: {case: message}, on the
ranks."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.read import configure
from hvdtrain.config.schema import Config
from hvdtrain.data.source import ArraySource
from hvdtrain.errors import UserError
from hvdtrain.training.build import build_task
from hvdtrain.training.data_facts import data_facts
from hvdtrain.training.datasets import Datasets
from hvdtrain.training.replicas.same_job import check_same_facts, facts

NET = (
    "from mine.layers import SCALE\n\ndef build(shape, classes):\n    raise RuntimeError('nobody "
    "runs this')\n"
)


def source(change: Callable[[np.ndarray, np.ndarray], None] | None) -> ArraySource:
    """60 images; `change` alters pixels and labels in place."""
    x = (np.arange(60 * 4 * 3 * 2) % 251).astype(np.uint8).reshape(60, 4, 3, 2)
    y = np.arange(60) % 5
    if change:
        change(x, y)
    return ArraySource(x, y, 5)


def datasets(change: Callable[[np.ndarray, np.ndarray], None] | None = None) -> Datasets:
    train = source(change)
    val = source(None)
    # mean and deviation do not show the change
    return Datasets(train, val, build_task(source(None), val, Config()))


def relabel(x: np.ndarray, y: np.ndarray) -> None:
    y[:] = np.roll(y, 1)


def alter_two_pixels(x: np.ndarray, y: np.ndarray) -> None:
    x[7, 0, 0, 0], x[7, 1, 0, 0] = x[7, 1, 0, 0], x[7, 0, 0, 0]  # mean and deviation stay


def reorder(x: np.ndarray, y: np.ndarray) -> None:
    x[[3, 8]], y[[3, 8]] = x[[8, 3]], y[[8, 3]]  # of the same class: the labels do not show it


def write_code(folder: Path, scale: int) -> None:
    (folder / "mine").mkdir(parents=True)
    (folder / "mine/__init__.py").write_text("raise RuntimeError('nobody runs this')\n")
    (folder / "mine/net.py").write_text(NET)
    (folder / "mine/layers.py").write_text(f"SCALE = {scale}\n")


def cases(communicator: Communicator, home: Path) -> dict[str, Any]:
    odd = communicator.rank == communicator.size - 1
    write_code(home / "code", 2 if odd else 1)
    write_metadata(home / "metadata", "numpy", "1.99")
    config = configure(None, ["framework=numpy", "model.name=linear", "batch.size=6"])
    user_model = configure(None, ["model.name=mine.net:build", "batch.size=6"])
    same = datasets()
    sys.path.append(str(home / "code"))

    def message(config: Any, data: Datasets) -> str:
        try:
            check_same_facts(
                communicator, facts(config, data_facts(config, data), communicator.name)
            )
        except UserError as error:
            return str(error)
        return ""

    message(config, same)  # the first call imports modules
    began = time.perf_counter()
    found = {"same": message(config, same)}
    seconds = time.perf_counter() - began
    found["model code"] = message(user_model, same)
    found["labels"] = message(config, datasets(relabel if odd else None))
    found["pixels"] = message(config, datasets(alter_two_pixels if odd else None))
    found["data order"] = message(config, datasets(reorder if odd else None))
    found["configuration"] = message(
        configure(
            None, ["framework=numpy", "model.name=linear", "batch.size=6", f"seed={1 + odd}"]
        ),
        same,
    )
    if odd:
        os.environ["PYTHONHASHSEED"] = "7"
    found["environment"] = message(config, same)
    os.environ.pop("PYTHONHASHSEED", None)
    if odd:
        sys.path.insert(0, str(home / "metadata"))
    found["versions"] = message(config, same)
    return {"messages": found, "seconds": seconds}


def write_metadata(folder: Path, package: str, version: str) -> None:
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


def found(communicator: Communicator, folder: str) -> dict[str, Any]:
    """Returns the result of cases(), and restores the path and the environment."""
    warnings.simplefilter("error")
    return cases(communicator, Path(folder) / str(communicator.rank))
