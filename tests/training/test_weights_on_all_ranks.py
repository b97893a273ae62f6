"""Pretrained weights on several ranks: each reads its own elements of files that all ranks see; a
file that a rank does not see, or sees with other contents."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_threads import Counting, ThreadRank, in_threads
from safetensors.torch import save_file
from test_load import CHUNK_BYTES, STATE, Learner

from hvdtrain.comm.communicator import Buffer, Handle, part_of
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import Arrays
from hvdtrain.errors import UserError
from hvdtrain.extras.pretrained.load import load_pretrained
from hvdtrain.extras.pretrained.weights_on_all_ranks import WeightPlace
from hvdtrain.training.checkpoint import load

WEIGHTS = {name: array for name, array in STATE.items() if name[0] in "pb"}
NAMES = {name[2:]: name for name in WEIGHTS}


class PretrainedLearner(Learner):
    """Begins with zeros."""

    def __init__(self, rank: int, ranks: int) -> None:
        zeros = {name: np.zeros_like(array) for name, array in WEIGHTS.items()}
        super().__init__(rank, ranks, zeros)

    def state_dict_names(self) -> dict[str, str]:
        return NAMES

    def own_names(self, found: Any) -> Any:
        return None


class LibraryLearner(PretrainedLearner):
    """Renames `theirs.*`, and joins the halves of one array."""

    def own_names(self, found: Any) -> Any:
        own = {name.removeprefix("theirs."): array for name, array in found.items()}
        halves = [own.pop(name) for name in ("columns.0", "columns.1")]
        return own | {"columns": np.concatenate(halves)}


class Sender(Counting):
    """Counts all bytes that this rank sends; rank 1 has the file at another path."""

    elsewhere: Path | None = None

    def start_spread(self, x: Buffer, name: str) -> Handle:
        self.sent += x[part_of(len(x), self.rank, self.size)].nbytes
        return super().start_spread(x, name)

    def broadcast_object(self, thing: Any, root: int = 0) -> Any:
        found = super().broadcast_object(thing, root)
        match found:
            case ((lines, dict() as places, others), failure) if self.rank and self.elsewhere:
                moved = {
                    own: WeightPlace(self.elsewhere, place.name) for own, place in places.items()
                }
                return (lines, moved, others), failure
        return found


@pytest.fixture(autouse=True)
def _small_chunks_and_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "CHUNK_BYTES", CHUNK_BYTES)
    number = {"rank 1": 1}
    monkeypatch.setattr(
        socket, "gethostname", lambda: f"n{number.get(threading.current_thread().name, 0)}"
    )


def tensors(dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    found = {name[2:]: torch.from_numpy(np.array(array)) for name, array in WEIGHTS.items()}
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() and dtype else tensor
        for name, tensor in found.items()
    }


def of_file(found: Mapping[str, torch.Tensor]) -> Arrays:
    """The state that a file of these tensors makes."""
    return {
        f"{'b' if name == 'seen' else 'p'}.{name}": (
            tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        ).numpy()
        for name, tensor in found.items()
    }


def write(path: Path, found: Mapping[str, torch.Tensor]) -> Path:
    if path.suffix:
        (torch.save if path.suffix == ".pt" else save_file)(dict(found), path)
        return path
    path.mkdir()
    names = list(found)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: found[name] for name in own}, path / file)
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def start(
    path: Path,
    ranks: int,
    expected: Arrays,
    elsewhere: Path | None = None,
    kind: type[PretrainedLearner] = PretrainedLearner,
) -> tuple[list[int], list[str]]:
    """Checks the weights of each rank; returns the bytes that each one sent, and the lines."""

    def of_rank(rank: ThreadRank) -> tuple[int, list[str]]:
        sender = Sender(rank._ranks, rank.rank)
        sender.elsewhere = elsewhere
        learner: Any = kind(rank.rank, rank.size)
        config = configure(None, [f"model.weights={path}"])
        loaded = load_pretrained(config, sender, learner, lambda: None)  # type: ignore[arg-type]
        for ours, theirs in zip(
            learner.pieces(), Learner(rank.rank, rank.size, expected).pieces(), strict=True
        ):
            assert ours.read().tobytes() == theirs.read().tobytes(), ours.name
        return sender.sent, loaded.lines

    found = in_threads(ranks, of_rank)
    assert all(lines == found[0][1] for _, lines in found)
    return [sent for sent, _ in found], found[0][1]


@pytest.mark.parametrize(
    ("file", "dtype", "ranks"),
    [
        ("w.safetensors", None, 2),
        ("w.safetensors", torch.bfloat16, 3),
        ("folder", torch.float16, 2),
    ],
)
def test_each_rank_reads_its_part(
    file: str, dtype: torch.dtype | None, ranks: int, tmp_path: Path
) -> None:
    """Only arrays that every rank has are sent: parts of large ones, and small ones by one rank."""
    found = tensors(dtype)
    expected = of_file(found)
    sent, lines = start(write(tmp_path / file, found), ranks, expected)
    assert lines[-1] == "        each rank reads a part of them from the file"
    small = sum(a.nbytes for a in expected.values() if a.nbytes < CHUNK_BYTES)
    assert sum(sent) == small + expected["p.everywhere"].nbytes
    total = sum(array.nbytes for array in expected.values())
    assert sent[0] < 0.1 * total, "rank 0 sent all of it"


def test_rank_0_sends_what_others_cannot_read(tmp_path: Path) -> None:
    found = tensors()
    total = sum(array.nbytes for array in WEIGHTS.values())
    path = write(tmp_path / "w.safetensors", found)
    absent = tmp_path / "absent.safetensors"
    sent, lines = start(path, 2, of_file(found), absent)
    assert sent == [total, 0] and lines[-1] == (
        f"        rank 0 reads and sends them: rank 1 on n1 cannot read {absent}: No such file or "
        "directory"
    )
    sent, lines = start(write(tmp_path / "w.pt", found), 2, of_file(found))
    assert sent == [total, 0] and lines[-1] == (
        "        rank 0 reads and sends them: none of them is a plain array of a safetensors file"
    )


def test_rank_0_sends_what_a_library_joins(tmp_path: Path) -> None:
    """Of arrays that it renames each rank reads its part."""
    found = tensors()
    whole = found.pop("columns")
    theirs = {f"theirs.{name}": tensor for name, tensor in found.items()}
    halves = dict(zip(("columns.0", "columns.1"), whole.tensor_split(2), strict=True))
    parts = {f"theirs.{name}": half.contiguous() for name, half in halves.items()}
    path = write(tmp_path / "w.safetensors", theirs | parts)
    sent, lines = start(path, 2, of_file(tensors()), kind=LibraryLearner)
    assert lines[-2:] == [
        "        each rank reads a part of them from the file",
        "        rank 0 sends 1 that the file has in another form",
    ]
    everywhere = WEIGHTS["p.everywhere"].nbytes
    small = sum(array.nbytes for array in WEIGHTS.values() if array.nbytes < CHUNK_BYTES)
    joined = WEIGHTS["p.columns"].nbytes
    assert sum(sent) == everywhere + small + joined
    assert joined < sent[0] < joined + 0.1 * sum(array.nbytes for array in WEIGHTS.values())


def test_copies_are_compared(tmp_path: Path) -> None:
    found = tensors()
    path = write(tmp_path / "w.safetensors", found)
    copy = tmp_path / "copy.safetensors"
    shutil.copy(path, copy)
    sent, _ = start(path, 2, of_file(found), copy)
    assert sent[0] < 0.1 * path.stat().st_size
    content = bytearray(path.read_bytes())
    for changed in (content[:-1] + bytes([content[-1] ^ 1]), content[:-8]):
        copy.write_bytes(changed)
        what = (
            "differs between ranks: its digest is [0-9a-f]{32} on n0, where rank 0 reads it, but "
            "[0-9a-f]{32} on n1, where rank 1 does"
        )
        errors = failures(path, copy)
        assert all(re.search(what, error.what) for error in errors), errors
        first, second = re.findall("[0-9a-f]{32}", errors[0].what)
        assert first != second


def test_what_one_rank_cannot_use_is_an_error_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tensors()
    found["rows"][-1] = torch.nan  # in the part of rank 1
    path = write(tmp_path / "w.safetensors", found)
    what = f"rows of {path} has nan, which is not a finite float32 number"
    assert [error.what for error in failures(path)] == [what] * 2
    pread = os.pread

    def broken(file: int, count: int, offset: int) -> bytes:
        if threading.current_thread().name == "rank 1":
            raise OSError(5, "Input/output error")
        return pread(file, count, offset)

    monkeypatch.setattr(os, "pread", broken)
    what = f"rank 1 on n1 cannot read {path}: Input/output error"
    assert [error.what for error in failures(path)] == [what] * 2


def failures(path: Path, elsewhere: Path | None = None) -> list[UserError]:
    """The error of each of two ranks."""

    def of_rank(rank: ThreadRank) -> UserError:
        sender = Sender(rank._ranks, rank.rank)
        sender.elsewhere = elsewhere
        learner: Any = PretrainedLearner(rank.rank, rank.size)
        config = configure(None, [f"model.weights={path}"])
        with pytest.raises(UserError) as caught:
            load_pretrained(config, sender, learner, lambda: None)  # type: ignore[arg-type]
        return caught.value

    return in_threads(2, of_rank)
