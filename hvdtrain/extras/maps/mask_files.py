"""Predicts masks of image files with a model of task.name=segmentation: one PNG per image, whose
pixels are class numbers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.comm.on_all_ranks import on_rank_0
from hvdtrain.data.around_source import AroundSource
from hvdtrain.data.field import Field
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError, short
from hvdtrain.extras.image_files.image_source import ImageSource
from hvdtrain.extras.maps.shown_masks import palette
from hvdtrain.frameworks.learner import Learner
from hvdtrain.training.predictions import predict as predict_samples
from hvdtrain.training.run_rank import ConnectedRank

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch

_WHERE = "--to"


def check_folder_of_masks(to: str, force: bool) -> None:
    """Raises UserError if a folder of this name cannot be created, or already has files."""
    path = Path(os.path.expanduser(to))
    if path.suffix or to == "-":
        what = f"masks are written as PNG files into a folder, but {to} is not a folder"
        raise UserError(what, _WHERE, "--to masks")
    if not path.absolute().parent.is_dir():
        raise UserError(f"there is no folder {path.parent}", _WHERE, f"mkdir -p {path.parent}")
    if os.path.lexists(path) and not (path.is_dir() and (force or not any(path.iterdir()))):
        raise UserError(
            f"{to} exists already", _WHERE, "--force writes into the folder; or give another name"
        )


@dataclass(frozen=True, eq=False)
class _WithoutMasks(AroundSource):
    """Images without known masks. Their loss is computed for class 0 and not used."""

    source: Source
    y: Field

    def read(self, indices: np.ndarray) -> Batch:
        return {
            "x": self.source.read(indices)["x"],
            "y": np.zeros((len(indices), *self.y.shape), self.y.dtype),
        }


def write_masks(
    rank: ConnectedRank,
    learner: Learner,
    y: Field,
    source: ImageSource,
    names: Sequence[str],
    to: str,
    force: bool,
) -> int:
    """Writes the masks of this rank's images under the images' names; returns how many there are.
    Every rank calls it. y: the masks of the task.

    Raises UserError if two images would have the same mask file, and if a file cannot be written.
    """
    files = [str(PurePosixPath(name).with_suffix(".png")) for name in names]
    if len(set(files)) < len(files):
        twice = next(name for number, name in enumerate(files) if name in files[:number])
        raise UserError(
            f"two images would have the mask {short(twice)}",
            "--images",
            "names that differ in more than the suffix",
        )
    folder = Path(os.path.expanduser(to))
    on_rank_0(rank.communicator, lambda: check_folder_of_masks(to, force))
    written = 0
    asked = _WithoutMasks(source, y)
    for indices, predictions in predict_samples(
        rank.config, learner, asked, rank.communicator, rank.heartbeat
    ):
        for index, classes in zip(indices.tolist(), predictions.outputs.argmax(1), strict=True):
            _write(folder / files[index], classes)
            written += 1
    return sum(rank.communicator.allgather(np.array([written]), "predict.masks").tolist())


def _write(path: Path, classes: np.ndarray) -> None:
    """Writes classes (H, W) as a PNG: 8 bits with a palette, or 16 bits for more than 256
    classes."""
    import PIL.Image

    if classes.max(initial=0) < 256:
        image = PIL.Image.frombytes("P", classes.shape[::-1], classes.astype(np.uint8).tobytes())
        image.putpalette(palette().ravel().tolist())
    else:
        image = PIL.Image.fromarray(classes.astype(np.uint16))
    unfinished = path.with_suffix(".png.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(unfinished, "PNG")
        unfinished.replace(path)
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}",
            _WHERE,
            "a folder that can be written and has room",
        ) from None
