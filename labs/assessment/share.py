"""Whether the ranks shared the work, as counting_net.py noted it; no clock decides that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

MOST_WORK = 1.25  # of serial.py's samples, divided by the ranks: room for an epoch more
# of the weights' norm. Ranks that average agree to the last bits; trained apart, they differ by far
# more
MOST_APART = 0.01
_MOST_BYTES = 2**16


class Share(NamedTuple):
    """What one rank trained with."""

    samples: int  # counted again in each epoch
    first: float  # sum of its first batch
    last: np.ndarray  # some weights, before its last step
    end: np.ndarray  # and at its end


def read(folder: Path, rank: int) -> Share | None:
    """None: the rank left no note, or no valid one."""
    try:
        path = folder / f"share-{rank}.json"
        if path.is_symlink() or not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        note = json.loads(path.read_text())
        last, end = (np.array(note[name], np.float64).reshape(-1) for name in ("last", "end"))
        return Share(int(note["samples"]), float(note["first"]), last, end)
    except Exception:  # whatever a job may have put there
        return None


def most_samples(train: int, ranks: int) -> int:
    """That a rank may train with, of a set of so many: its part of serial.py's epochs, and a
    quarter more."""
    epochs = 5 if train > 10_000 else 8  # serial.py's
    return int(MOST_WORK * epochs * train / ranks)


def complaint(shares: list[Share | None], most: int) -> str | None:
    """Why the ranks, each with its share, did not share the work. None: they did."""
    for rank, share in enumerate(shares):
        if share is None:
            return f"rank {rank} of {len(shares)} did not train the network of net.py"
        if share.samples > most:
            return (
                f"rank {rank} trained with {share.samples:,} samples, at most {most:,} are its "
                "share"
            )
    first, *others = [share for share in shares if share is not None]
    for rank, share in enumerate(others, 1):
        if share.first == first.first:
            return f"ranks 0 and {rank} began with the same samples"
        if min(_apart(first.last, share.last), _apart(first.end, share.end)) > MOST_APART:
            return f"ranks 0 and {rank} trained apart: their weights differ"
    return None


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    """Their distance as a share of the norm; infinite where it is not a number."""
    if a.shape != b.shape or not np.linalg.norm(a) > 0:
        return np.inf
    distance = np.linalg.norm(a - b) / np.linalg.norm(a)
    return float(distance) if np.isfinite(distance) else np.inf
