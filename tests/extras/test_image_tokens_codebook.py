"""The codebook: k-means as written down once more, and the nearest colour of every pixel,
exactly."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.core.progress import fold
from hvdtrain.data.datasets import digits, synthetic
from hvdtrain.data.source import ArraySource
from hvdtrain.errors import UserError
from hvdtrain.extras.image_tokens.codebook import (
    Codebook,
    Encoder,
    draw_pixels,
    k_means,
    make_codebook,
    nearest,
    reduce_images,
)


def brute(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """In Python's whole numbers, the first of equally near ones."""
    found = []
    for p in points.tolist():
        distances = [sum((a - b) ** 2 for a, b in zip(p, c, strict=True)) for c in centres.tolist()]
        found.append(distances.index(min(distances)))
    return np.array(found)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_nearest_colour_is_exact(channels: int) -> None:
    rng = np.random.default_rng(1)
    points = np.concatenate(
        [rng.integers(0, 256, (300, channels)), [[0] * channels, [255] * channels]]
    ).astype(np.uint8)
    centres = rng.integers(0, 256, (40, channels)).astype(np.uint8)
    centres[7] = centres[3]  # never taken
    assert np.array_equal(nearest(points, centres), brute(points, centres))
    encoder = Encoder(Codebook(centres))
    for part in np.array_split(points, 3):  # the second and third find colours in the table
        assert np.array_equal(
            encoder.encode(part.reshape(-1, 1, channels))[:, 0], brute(part, centres)
        )
    assert np.array_equal(encoder.encode(points), brute(points, centres))


def test_a_round_of_k_means_by_hand() -> None:
    # from 0 and 10, the first two colours: {0, 1, 1}, {10, 20, 21}: means 2/3 and 17; then {0, 1,
    # 1}, {10, 20, 21} again
    assert k_means(np.array([[0], [10], [1], [1], [20], [21]], np.uint8), 2).tolist() == [[1], [17]]


def test_as_many_colours_as_there_are_are_kept() -> None:
    pixels = np.array([[9, 9, 9], [0, 0, 255], [255, 0, 0], [9, 9, 9]], np.uint8)
    assert k_means(pixels, 3).tolist() == [[9, 9, 9], [0, 0, 255], [255, 0, 0]]
    with pytest.raises(UserError, match="the pixels have 3 colours; data.colours=4 asks for more"):
        k_means(pixels, 4)


def test_colours_are_the_means_of_their_pixels() -> None:
    """Each colour is near the mean of its pixels, and all of them are better than the colours to
    begin with."""
    pixels = draw_pixels(
        synthetic.build("synthetic", None, "train", samples=50, shape=(8, 8, 3)), 8
    )[:2000]
    centres = k_means(pixels, 16)
    own = brute(pixels, centres)
    for k in range(16):
        assert np.abs(pixels[own == k].mean(0) - centres[k]).max() < 6.0
    error = np.square(pixels.astype(float) - centres[own]).sum(1).mean()
    start = np.unique(pixels, axis=0)[:16]
    assert error < 0.3 * np.square(pixels.astype(float) - start[brute(pixels, start)]).sum(1).mean()


def test_the_pixels_are_those_that_counters_draw() -> None:
    images = digits.build("digits", None, "train")
    found = draw_pixels(images, 8)
    assert found.shape == (2**16, 1)
    for draw in (0, 1, 2, 65535):
        sample = fold(0x706978, 0, draw) % 1437
        place = fold(0x706978, 1, draw) % 64
        assert found[draw, 0] == images.x[sample].reshape(64)[place]


def test_a_reduced_image_has_the_means_of_its_squares() -> None:
    x = np.arange(64, dtype=np.uint8).reshape(1, 8, 8, 1)
    assert reduce_images(x, 8) is x
    reduced = reduce_images(x, 4)[0, :, :, 0]
    assert reduced.shape == (4, 4)
    assert reduced[0, 0] == 5  # (0 + 1 + 8 + 9) / 4 = 4.5
    assert reduced[3, 3] == 59  # (54 + 55 + 62 + 63) / 4 = 58.5
    assert (
        reduce_images(np.full((2, 4, 4, 3), 255, np.uint8), 1).tolist() == [[[[255, 255, 255]]]] * 2
    )


def test_the_codebook_of_the_digits() -> None:
    """17 grey values, of which two neighbours become one. The same for ever."""
    images = digits.build("digits", None, "train")
    codebook = make_codebook(images, 16, 8)
    assert codebook.colours.shape == (16, 1)
    assert (np.diff(codebook.colours[:, 0].astype(int)) > 0).all()
    again = make_codebook(ArraySource(images.x.copy(), images.y, 10), 16, 8)
    assert again.digest() == codebook.digest() == "9639d329a126ef35"
    tokens = Encoder(codebook).encode(images.x)
    assert np.abs(codebook.decode(tokens).astype(int) - images.x).max() <= 16
    assert np.array_equal(Encoder(codebook).encode(codebook.decode(tokens)), tokens)
