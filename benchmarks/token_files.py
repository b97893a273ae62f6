"""Tokens/s that data.name=tokens reads, beside a loop over numpy.memmap that one writes by hand.

python benchmarks/token_files.py [--mb 200] [--rounds 9] [--json FILE]

Both read the same batches of 16 windows in the same random order from files of uint16 in the page
cache, as int64, and begin by turns; the first round warms up. By hand: nanoGPT's
np.stack([data[i : i + T + 1].astype(np.int64) for i in starts]). data.name=tokens also checks that
the file has not changed, and that every token is below the vocabulary. Eight files: by hand one
memmap for each, chosen by a bisection; windows do not cross files there. Times are of the
processor: nothing waits, and other programs do not count. Ratios are per round.
"""

from __future__ import annotations

import argparse
import bisect
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rows import append

from hvdtrain.core.progress import fold
from hvdtrain.extras.tokens.data.datasets import tokens

BATCH = 16
BATCHES = 400  # in a round
VOCABULARY = 50257
Read = Callable[[np.ndarray], np.ndarray]  # windows (n,) -> int64 (n, T + 1)


def write(folder: Path, mb: int, files: int) -> list[Path]:
    """Writes files of random tokens."""
    random = np.random.default_rng(1)
    paths = [folder / f"{number}.bin" for number in range(files)]
    for path in paths:
        random.integers(0, VOCABULARY, mb * 500_000 // files, np.uint16).tofile(path)
    return paths


def by_hand(paths: list[Path], context: int) -> Read:
    maps = [np.memmap(path, np.uint16, "r") for path in paths]
    firsts = [sum(len(one) for one in maps[:number]) for number in range(len(maps))]

    def window(start: int) -> np.ndarray:
        number = bisect.bisect_right(firsts, start) - 1
        start -= firsts[number]
        return maps[number][start : start + context + 1].astype(np.int64)

    def of_one(start: int) -> np.ndarray:
        return maps[0][start : start + context + 1].astype(np.int64)

    one = of_one if len(maps) == 1 else window
    return lambda indices: np.stack([one(index * context) for index in indices.tolist()])


def measure(root: Path, paths: list[Path], context: int, rounds: int) -> dict[str, object]:
    """Returns the row of a context: tokens/s of both and their ratio."""
    source = tokens.build("tokens", root, "train", context=context, vocabulary=VOCABULARY)
    hand = by_hand(paths, context)
    ways: dict[str, Read] = {
        "hvdtrain": lambda indices: source.read(indices)["tokens"],
        "by hand": hand,
    }
    size = len(np.memmap(paths[0], np.uint16, "r"))
    firsts = np.arange(len(source)) * context
    inside = np.flatnonzero(firsts % size + context < size)  # of one file
    drawn = fold(1, np.arange(BATCH * BATCHES, dtype=np.uint64)) % np.uint64(len(inside))
    batches = inside[drawn.astype(np.int64)].reshape(BATCHES, BATCH)
    assert all((source.read(one)["tokens"] == hand(one)).all() for one in batches[:20])
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        names = list(ways)[:: 1 if number % 2 else -1]
        for name in names:
            began = time.process_time()
            for indices in batches:
                ways[name](indices)
            seconds = time.process_time() - began
            if number:
                rates[name].append(batches.size * (context + 1) / seconds)
    ratios = [a / b for a, b in zip(rates["hvdtrain"], rates["by hand"], strict=True)]
    return {
        "files": len(paths),
        "context": context,
        "tokens_per_s": {name: round(statistics.median(found)) for name, found in rates.items()},
        "range": {name: [round(min(found)), round(max(found))] for name, found in rates.items()},
        "to by hand": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "n": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    command = f"python benchmarks/token_files.py --mb {options.mb} --rounds {options.rounds}"
    for files in (1, 8):
        with tempfile.TemporaryDirectory() as folder:
            paths = write(Path(folder), options.mb, files)
            for context in (256, 1024, 4096):
                row = measure(Path(folder), paths, context, options.rounds)
                print(row, flush=True)
                if options.json:
                    append(options.json, {"command": command, **row})


if __name__ == "__main__":
    main()
