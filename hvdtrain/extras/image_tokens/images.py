"""Images as sequences of tokens: a pixel becomes the number of its nearest colour."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.core.arrays import digest
from hvdtrain.data.field import Field
from hvdtrain.data.option_error import OptionError
from hvdtrain.data.source import LabelledImages, Source, Unfinished, check_indices
from hvdtrain.extras.image_tokens.codebook import (
    FILE,
    MOST_COLOURS,
    Codebook,
    Encoder,
    make_codebook,
    read_codebook,
    reduce_images,
    to_json,
)

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch

_ENCODED_VALUES = 2**22  # values of pixels encoded at a time


@dataclass(frozen=True, eq=False)
class UnencodedImages(Unfinished):
    """Images that need a codebook, which is the same on all ranks, to become tokens. Raises
    UserError if sizes do not match."""

    array = "codebook"
    images: LabelledImages
    side: int | None  # None: as the images are
    colours: int

    def __post_init__(self) -> None:
        height, width, channels = self.images.shape
        if height != width or channels not in (1, 3):
            what = (
                f"images of {height}x{width}x{channels} cannot be converted to tokens: they must "
                "be square, with 1 or 3 channels"
            )
            raise OptionError(
                what,
                "source",
                "data.source=folder with data.source_options={size: 32, channels: 3}, or other "
                "images",
            )
        if self.side is not None and (self.side < 1 or height % self.side):
            divisors = ", ".join(str(side) for side in range(1, height + 1) if height % side == 0)
            raise OptionError(
                f"data.side={self.side} does not divide {height} pixels",
                "side",
                f"one of {divisors}",
            )
        if not 2 <= self.colours <= MOST_COLOURS:
            raise OptionError(
                f"{self.colours} colours are impossible",
                "colours",
                f"2 to {MOST_COLOURS}; iGPT has 512",
            )

    @property
    def pixels(self) -> int:
        """Height and width of the reduced images, in pixels."""
        return self.side or self.images.shape[0]

    def compute(self) -> np.ndarray:
        """Computes the colours of a codebook; takes 2 s for 512. Raises UserError if the images
        have fewer."""
        return make_codebook(self.images, self.colours, self.pixels).colours

    def read(self, run: Path) -> np.ndarray:
        return read_codebook(run).colours

    def finish(self, array: np.ndarray) -> TokenImages:
        """Encodes all images once, and drops them; takes 5 s for each million distinct colours with
        a codebook of 512."""
        codebook = Codebook(array)
        images = self.images
        side = self.pixels
        encoder = Encoder(codebook)
        tokens = np.empty(
            (len(images), side * side), np.uint8 if len(codebook.colours) <= 2**8 else np.uint16
        )
        block = max(1, _ENCODED_VALUES // math.prod(images.shape))
        for start in range(0, len(images), block):
            rows = np.arange(start, min(start + block, len(images)))
            tokens[rows] = encoder.encode(reduce_images(images.read(rows)["x"], side)).reshape(
                len(rows), -1
            )
        return TokenImages(tokens, codebook)


@dataclass(frozen=True, eq=False)
class TokenImages(Source):
    """A source of {"tokens": int64 (n, side^2 + 1)}: a start token, which is equal to the number of
    colours, and the image."""

    pixels: np.ndarray  # uint8 or uint16 (n, side^2), each below the number of colours
    codebook: Codebook
    reads_from_memory = True

    @property
    def start(self) -> int:
        """The token that every sequence begins with."""
        return self.codebook.values

    @property
    def pictures(self) -> Codebook:
        return self.codebook

    @property
    def run_files(self) -> dict[str, bytes]:
        return {FILE: to_json(self.codebook)}

    @property
    def fields(self) -> dict[str, Field]:
        return {"tokens": Field("int64", (self.pixels.shape[1] + 1,), self.start + 1)}

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, indices: np.ndarray) -> Batch:
        check_indices(indices, len(self))
        tokens = np.full((len(indices), self.pixels.shape[1] + 1), self.start, np.int64)
        tokens[:, 1:] = self.pixels[indices]
        return {"tokens": tokens}

    def digests(self, seed: int) -> dict[str, str]:
        """Returns a digest of all tokens; takes 0.05 s for CIFAR-10."""
        return self.identity()

    def identity(self) -> dict[str, str]:
        return {"codebook": self.codebook.digest(), "pixels": digest({"pixels": self.pixels})}
