"""The largest micro-batch that fits: found by predictions, never by failing."""

from __future__ import annotations

from collections.abc import Callable

_MOST_GUESSES = 20  # after the first two


def largest_micro(size: Callable[[int], float], most: int, room: float) -> int:
    """The most samples, of 1 ... most, that fit; of so many size() tells the bytes; 0 where one sample does not fit.

    Memory is convex in the samples, so that what a line between two sizes says fits; where one is nearly flat, halves are faster.
    """
    above = size(most)
    if above <= room:
        return most
    fits, below = 1, size(1) if most > 1 else above
    if below > room:
        return 0
    for number in range(_MOST_GUESSES):
        if most - fits == 1:
            break
        by_line = fits + max(1, int((room - below) / (above - below) * (most - fits)))
        guess = by_line if number % 2 == 0 and by_line < most else (fits + most) // 2
        found = size(guess)
        if found <= room:
            fits, below = guess, found
        else:
            most, above = guess, found
    return fits
