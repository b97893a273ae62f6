"""Images as sequences of tokens: a start token, then the number of each pixel's nearest colour, row by row."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.core.digest import digest
from hvdtrain.data.source import Field, LabelledImages, Source, check_indices
from hvdtrain.data.subset import Subset
from hvdtrain.data.tokens.codebook import MOST_COLOURS, Codebook, Encoder, make_codebook, reduce_images
from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch

FILE = "codebook.json"  # of a run folder
MOST_BYTES = 2**21  # of that file
_BLOCK_VALUES = 2**22  # of pixels encoded at once


@dataclass(frozen=True, eq=False)
class UnencodedImages:
    """Images whose tokens wait for a codebook, which is the same on all ranks. Raises UserError where sizes do not fit."""

    images: LabelledImages
    side: int | None  # None: as the images are
    colours: int

    def __post_init__(self) -> None:
        height, width, channels = self.images.shape
        if height != width or channels not in (1, 3):
            what = f"images of {height}x{width}x{channels} have no tokens: they need as many rows as columns, and 1 or 3 channels"
            raise UserError(what, "data.source", "data.source=folder with data.source_options={size: 32, channels: 3}, or other images")
        if self.side is not None and (self.side < 1 or height % self.side):
            divisors = ", ".join(str(side) for side in range(1, height + 1) if height % side == 0)
            raise UserError(f"data.side={self.side} does not divide {height} pixels", "data.side", f"one of {divisors}")
        if not 2 <= self.colours <= MOST_COLOURS:
            raise UserError(f"{self.colours} colours are impossible", "data.colours", f"2 to {MOST_COLOURS}; iGPT has 512")

    @property
    def pixels(self) -> int:
        """The side of the reduced images."""
        return self.side or self.images.shape[0]

    def make_codebook(self) -> Codebook:
        """2 s for 512 colours. Raises UserError where the images have fewer colours."""
        return make_codebook(self.images, self.colours, self.pixels)

    def encode(self, codebook: Codebook) -> TokenImages:
        """All images, once: 5 s for each million different colours of 512, and the images are kept no longer."""
        images, side, encoder = self.images, self.pixels, Encoder(codebook)
        tokens = np.empty((len(images), side * side), np.uint8 if len(codebook.colours) <= 2**8 else np.uint16)
        block = max(1, _BLOCK_VALUES // math.prod(images.shape))
        for start in range(0, len(images), block):
            rows = np.arange(start, min(start + block, len(images)))
            tokens[rows] = encoder.encode(reduce_images(images.read(rows)["x"], side)).reshape(len(rows), -1)
        return TokenImages(tokens, codebook)


@dataclass(frozen=True, eq=False)
class TokenImages:
    """A source of {"tokens": int64 (n, side^2 + 1)}: images after a start token, whose number is that of the colours."""

    pixels: np.ndarray  # uint8 or uint16 (n, side^2), each below the number of colours
    codebook: Codebook
    reads_from_memory = True

    @property
    def start(self) -> int:
        """The token that every sequence begins with."""
        return len(self.codebook.colours)

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
        """A digest of all tokens: 0.05 s for CIFAR-10."""
        return self.identity()

    def identity(self) -> dict[str, str]:
        return {"codebook": self.codebook.digest(), "pixels": digest({"pixels": self.pixels})}


def codebook_of(source: Source) -> Codebook | None:
    """That of a source of image tokens, or of a part of one; else None."""
    while isinstance(source, Subset):
        source = source.source
    return source.codebook if isinstance(source, TokenImages) else None


def to_json(codebook: Codebook) -> bytes:
    """The file of a run folder: {"colours": [[255, 0, 0], ...]}."""
    return json.dumps({"colours": codebook.colours.tolist()}).encode() + b"\n"


def from_json(content: bytes, where: str) -> Codebook:
    """Raises UserError where the file is damaged."""
    try:
        colours = np.array(json.loads(content)["colours"])
        if colours.dtype.kind != "i" or colours.ndim != 2 or colours.shape[1] not in (1, 3) or not 2 <= len(colours) <= MOST_COLOURS:
            raise ValueError(f"{colours.dtype} {colours.shape}")
        if colours.min() < 0 or colours.max() > 255:
            raise ValueError("values outside of 0 to 255")
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError) as error:
        what = f"the codebook is damaged: {type(error).__name__}: {error}"
        raise UserError(what, where, "restore it from a copy; without it, colours are unknown") from None
    return Codebook(colours.astype(np.uint8))
