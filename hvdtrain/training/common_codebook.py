"""The codebook of image tokens, the same on all ranks, and its file in the run folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.on_all_ranks import on_rank_0_only
from hvdtrain.core.folder import Folder
from hvdtrain.data.codebook import (
    FILE,
    MOST_FILE_BYTES,
    Codebook,
    TokenImages,
    UnencodedImages,
    from_json,
    to_json,
)
from hvdtrain.errors import UserError


class CommonCodebook:
    """Made when it is needed first, of the training images; or read from a run folder."""

    def __init__(self, communicator: Communicator, run: Path | None = None) -> None:
        self._communicator = communicator
        self._run = run
        self._found: Codebook | None = None

    def encode(self, images: UnencodedImages, train: Callable[[], UnencodedImages]) -> TokenImages:
        """Every rank calls it. train() gives the training images. Raises UserError where there is
        no codebook, or it does not fit."""
        if self._found is None:
            run = self._run
            self._found = self._of_rank_0(
                (lambda: train().make_codebook()) if run is None else (lambda: read_codebook(run))
            )
        return images.encode(self._found)

    def _of_rank_0(self, make: Callable[[], Codebook]) -> Codebook:
        made = on_rank_0_only(self._communicator, make)
        shape = self._communicator.broadcast_object(None if made is None else made.colours.shape)
        colours = np.zeros(shape, np.uint8) if made is None else made.colours
        return Codebook(self._communicator.broadcast(colours, "codebook"))


def write_codebook(codebook: Codebook, run: Path) -> None:
    """Writes codebook.json, whole or not at all. Raises OSError."""
    with Folder.open(run) as folder:
        folder.replace(FILE, to_json(codebook))


def read_codebook(run: Path) -> Codebook:
    """Raises UserError where the file is absent or damaged."""
    try:
        with Folder.open(run) as folder:
            content = folder.read(FILE, MOST_FILE_BYTES)
    except OSError as error:
        what = f"the codebook cannot be read: {error.strerror or error}"
        raise UserError(
            what, str(run / FILE), "restore it from a copy; without it, colours are unknown"
        ) from None
    return from_json(content, str(run / FILE))
